"""Pretokenized data equal tokenization on the fly, however often the writing was interrupted."""

import json
import sys

import numpy as np
import pytest

from maxlib import data, tokenization
from maxlib.data.__main__ import main

TEXTS = [f"Document {i}: " + "größer " * (i % 9) for i in range(50)]


@pytest.fixture(scope="module")
def tokenizer():
    return tokenization.train_bpe(TEXTS, vocab_size=300)


def write(directory, tokenizer, documents=None, **kwargs):
    documents = data.in_memory(TEXTS) if documents is None else documents
    kwargs = {"bos_id": 0, "eos_id": 1, "documents_per_file": 20, "batch": 8, **kwargs}
    return data.write_tokens(documents, directory, tokenizer, **kwargs)


def tokens(directory) -> list[list[int]]:
    return [document["tokens"].tolist() for document in data.read_tokens(directory)]


def test_same_as_on_the_fly(tmp_path, tokenizer):
    heard = []
    manifest = write(tmp_path, tokenizer, progress=heard.append)
    want = [d["tokens"].tolist() for d in data.tokenize(data.in_memory(TEXTS), tokenizer, bos_id=0, eos_id=1)]
    assert tokens(tmp_path) == want
    assert data.read_tokens(tmp_path)[0]["tokens"].dtype == np.int32
    assert manifest == data.read_manifest(tmp_path)
    total = {"documents": 50, "tokens": sum(map(len, want)), "characters": sum(map(len, TEXTS))}
    assert manifest["total"] == total | {"longest": max(map(len, want))}
    assert [file["documents"] for file in manifest["files"]] == [20, 20, 10]
    assert heard[-1].tokens == total["tokens"] and len(heard) > 5


def test_goes_on_where_it_was_stopped(tmp_path, tokenizer):
    class Stopped(Exception):
        pass

    def stop(counts):
        if counts.documents > 30:
            raise Stopped

    with pytest.raises(Stopped):
        write(tmp_path, tokenizer, progress=stop)
    with pytest.raises(FileNotFoundError, match="has not been finished"):
        data.read_tokens(tmp_path)
    first = (tmp_path / "tokens-00000.array_record").stat().st_mtime_ns
    write(tmp_path, tokenizer)
    assert (tmp_path / "tokens-00000.array_record").stat().st_mtime_ns == first
    write(tmp_path / "at once", tokenizer)
    assert tokens(tmp_path) == tokens(tmp_path / "at once")
    with pytest.raises(ValueError, match="was started with other settings: eos_id was 1 and is now None"):
        write(tmp_path, tokenizer, eos_id=None)


def test_bad_records_and_damage(tmp_path, tokenizer):
    documents = data.in_memory([*TEXTS[:10], [1, 2, 3]])
    with pytest.raises(ValueError, match=r"'text' must be valid Unicode: .*surrogates not allowed"):
        data.tokenize(data.in_memory(["half a pair \ud83d"]), tokenizer)[0]
    with pytest.raises(ValueError, match=r"1 bad records, more than limit=0; .*documents need 'text'"):
        write(tmp_path / "a", tokenizer, documents)
    assert write(tmp_path / "a", tokenizer, documents, bad_records=1)["bad_records"] == 1
    assert len(tokens(tmp_path / "a")) == 10
    file = tmp_path / "a" / "tokens-00000.array_record"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"bytes, the manifest says \d+: it was damaged"):
        data.read_tokens(tmp_path / "a")
    file.unlink()
    with pytest.raises(FileNotFoundError, match="tokens-00000.array_record is missing"):
        data.read_tokens(tmp_path / "a")
    assert data.read_manifest(tmp_path / "a")["dtype"] == "<u2"


def test_command(tmp_path, tokenizer, monkeypatch, capsys):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    tokenization.save_tokenizer(tokenizer, tmp_path / "tok", bos_token="<bos>", eos_token="<eos>")
    command = f"tokenize {tmp_path}/a.jsonl --field body --tokenizer {tmp_path}/tok --out {tmp_path}/out --eos <eos>"
    monkeypatch.setattr(sys, "argv", ["maxlib.data", *command.split()])
    main()
    said = capsys.readouterr().out
    assert "50" in said and "characters per token" in said
    assert all(document[-1] == 1 for document in tokens(tmp_path / "out"))
    sys.argv += ["--bos", "<nothing>"]
    with pytest.raises(SystemExit, match="error: '<nothing>' is not in the tokenizer's vocabulary"):
        main()
