"""Sources yield the documents of their files, and errors name the file and byte."""

import json
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxlib import data
from maxlib.data import _sources


def texts(documents):
    return [documents[i]["text"] for i in range(len(documents))]


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_records(path: Path, records: list[bytes]) -> Path:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records:
        writer.write(record)
    writer.close()
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_what_a_document_is(tmp_path, end):
    path = write(tmp_path / "a.txt", end.join(["ä one", "two", "", "  ", "three", "", ""]))
    assert texts(data.text_files(path)) == [path.read_bytes().decode()]
    assert texts(data.text_files(path, document="line")) == ["ä one", "two", "three"]
    assert texts(data.text_files(path, document="paragraph")) == [f"ä one{end}two", "three"]


def test_folders_and_patterns_are_sorted_and_hidden_files_left_out(tmp_path):
    for name in ("b/2.txt", "a/1.md", "c.txt", ".git/x", "b/.hidden"):
        write(tmp_path / name, name)
    assert texts(data.text_files(tmp_path)) == ["a/1.md", "b/2.txt", "c.txt"]
    assert texts(data.text_files(str(tmp_path / "**" / "*.txt"))) == ["b/2.txt", "c.txt"]
    assert texts(data.text_files([tmp_path / "c.txt", tmp_path / "a"])) == ["c.txt", "a/1.md"]


def test_byte_order_mark_is_no_text(tmp_path):
    path = write(tmp_path / "a.txt", b"\xef\xbb\xbf" + b"one\ntwo")
    assert texts(data.text_files(path)) == ["one\ntwo"]
    assert texts(data.text_files(path, document="line")) == ["one", "two"]


def test_jsonl_keeps_the_record(tmp_path):
    path = write(tmp_path / "a.jsonl", '{"content": "one\\n", "id": 1}\n\n{"content": "zwö"}\n')
    documents = data.jsonl(path, field="content")
    assert documents[0] == {"content": "one\n", "id": 1, "text": "one\n"}
    assert texts(documents) == ["one\n", "zwö"]


def test_array_record(tmp_path):
    first = write_records(tmp_path / "a.array_record", [b"one", "zwö".encode()])
    second = write_records(tmp_path / "b.array_record", [b"three"])
    assert texts(data.array_record([first, second])) == ["one", "zwö", "three"]
    records = write_records(tmp_path / "c.array_record", [json.dumps({"t": "x"}).encode()])
    assert texts(data.array_record(records, field="t")) == ["x"]


def test_in_memory():
    assert texts(data.in_memory(["a", "b"])) == ["a", "b"]
    tokens = data.in_memory([[1, 2], np.array([3], np.uint16)])
    assert [tokens[i]["tokens"].tolist() for i in range(2)] == [[1, 2], [3]]
    assert tokens[1]["tokens"].dtype == np.int32


@pytest.mark.full
def test_python_docs_is_long_and_always_the_same():
    docs = _sources._python_docs.__wrapped__()
    assert sum(map(len, docs)) > 1_500_000
    assert list(docs) == texts(data.python_docs())


def test_python_docs_is_topics_and_docstrings_in_order(tmp_path, monkeypatch):
    from pydoc_data.topics import topics

    write(
        tmp_path / "b.py", b'"""Second."""\ndef f():\n    """  Of f.\n\n    More."""\n    class C:\n        "Of C."\n'
    )
    write(tmp_path / "a.py", b'"""First."""\nx = "not this"\nif x:\n    async def g(): "Of g."\n')
    write(tmp_path / "empty.py", b"x = 1\n")
    (tmp_path / "test").mkdir()
    write(tmp_path / "test" / "left_out.py", b'"""Left out."""\n')
    monkeypatch.setattr(_sources.sysconfig, "get_path", lambda name: str(tmp_path))
    docs = _sources._python_docs.__wrapped__()
    assert docs[-2:] == ("First.\n\nOf g.", "Second.\n\nOf f.\n\nMore.\n\nOf C.")
    assert list(docs[:-2]) == [topics[name] for name in sorted(topics) if topics[name].strip()]
    assert any("list comprehension" in text for text in docs)


@pytest.mark.parametrize(
    ("document", "byte"),
    [("file", 9), ("line", 9), ("paragraph", 9)],
)
def test_undecodable_text_names_file_and_byte(tmp_path, document, byte):
    path = write(tmp_path / "bad.txt", b"one\n\ntwo \xff three\n")
    with pytest.raises(ValueError, match=rf"bad.txt: byte {byte}: text must be UTF-8, got 0xff"):
        data.text_files(path, document=document)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "\xff"}', "byte 24: text must be UTF-8"),
        (b'{"text": "a"', "byte 26: each line must be one JSON object: Expecting"),
        (b'["a"]', "byte 14: each line must be a JSON object, got a list"),
        (b'{"txt": "a"}', "byte 14: the field 'text' must hold text, got None; fields here: .'txt'."),
        (b'{"text": "  "}', "byte 14: the field 'text' must hold text, got '  '"),
        (b'{"text": 3}', "byte 14: the field 'text' must hold text, got 3"),
        (b'{"text": "\\ud800"}', "byte 14: the field 'text' must be valid Unicode"),
    ],
)
def test_bad_jsonl_names_file_and_byte(tmp_path, line, message):
    path = write(tmp_path / "bad.jsonl", b'{"text": "a"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=f"bad.jsonl: {message}"):
        data.jsonl(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "there is no text"),
        (b" \n\n", "there is no text"),
        (b"\xef\xbb\xbf", "there is no text"),
        ("\u2003".encode(), "the document is empty. Remove it"),
    ],
)
@pytest.mark.parametrize("document", ["file", "line", "paragraph"])
def test_file_without_text(tmp_path, content, message, document):
    good, empty = write(tmp_path / "a.txt", "text"), write(tmp_path / "empty.txt", content)
    with pytest.raises(ValueError, match=f"empty.txt: byte 0: {message}"):
        data.text_files([good, empty], document=document)


def test_bad_array_record_names_file_and_record(tmp_path):
    path = write_records(tmp_path / "a.array_record", [b"good", b"ba\xff"])
    documents = data.array_record(path)
    with pytest.raises(ValueError, match=r"a.array_record: record 1: byte 2: text must be UTF-8"):
        documents[1]
    broken = write(tmp_path / "c.array_record", path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"c.array_record: this is no ArrayRecord file, or a damaged one"):
        data.array_record(broken)
    with pytest.raises(ValueError, match=r"b.array_record: byte 0: there is no record"):
        data.array_record(write_records(tmp_path / "b.array_record", []))


def test_bad_arguments(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere names no file"):
        data.text_files(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="at least one path"):
        data.text_files([])
    with pytest.raises(ValueError, match="put it in a list"):
        data.in_memory("one text")
    with pytest.raises(ValueError, match="at least one document"):
        data.in_memory([])
    with pytest.raises(ValueError, match="Document 1 is empty"):
        data.in_memory(["a", " "])
    with pytest.raises(ValueError, match=r"Document 0 is empty: remove it"):
        data.in_memory([[]])
    with pytest.raises(ValueError, match=r"Document 0, .* must be token ids, .* got float64"):
        data.in_memory([[0.5]])


def test_split_depends_on_content_alone():
    words = [f"document {i}" for i in range(2000)]
    train, valid = data.split(data.in_memory(words), validation=0.1)
    held_out = {valid[i]["text"] for i in range(2000) if valid[i] is not None}
    kept = {train[i]["text"] for i in range(2000) if train[i] is not None}
    assert held_out.isdisjoint(kept)
    assert held_out | kept == set(words)
    assert 150 < len(held_out) < 250
    _, valid = data.split(data.in_memory(words[::-1][:1000]), validation=0.1)
    assert {valid[i]["text"] for i in range(1000) if valid[i] is not None} == held_out & set(words[1000:])
    # A hash that changed would move documents between the sides of a run that goes on.
    assert sorted(held_out)[:3] == ["document 0", "document 1009", "document 1015"]


def test_split_of_tokens_and_bad_fractions():
    train, valid = data.split(data.in_memory([[i, i + 1] for i in range(100)]), validation=0.5)
    assert all((train[i] is None) != (valid[i] is None) for i in range(100))
    with pytest.raises(ValueError, match="leaves no validation document"):
        data.split(data.in_memory(["a", "b"]), validation=0.01)
    with pytest.raises(ValueError, match="between 0 and 1"):
        data.split(data.in_memory(["a", "b"]), validation=5)
