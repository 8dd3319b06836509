"""Parquet, ArrayRecord and other formats yield their documents, and errors name the record."""

import gzip
import json
from itertools import islice

import numpy as np
import pytest

from maxlib import data
from tests.data.corpus import process


def texts(documents):
    return [documents[i]["text"] for i in range(len(documents))]


def test_records_of_a_table():
    table = [{"t": "one"}, {"t": b"zw\xc3\xb6"}, {"t": [1, 2]}, {"t": [{"role": "user", "content": "x"}]}, {"t": ""}]
    documents = data.records(table, field="t")
    assert texts(documents[:2]) == ["one", "zwö"]
    assert documents[2]["tokens"].tolist() == [1, 2]
    assert documents[3] == {"messages": table[3]["t"], "record": "record 3"}
    with pytest.raises(ValueError, match="record 4: the field 't' must hold text"):
        documents[4]
    with pytest.raises(ValueError, match="no record in the table"):
        data.records([])


@pytest.mark.parametrize("name", ["labels", "completion_mask", "assistant_masks"])
def test_labels_of_tokenized_records_are_not_left_out_in_silence(name):
    """All tokens would be learned, prompts too."""
    table = data.records([{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], name: [0, 1, 1]}], field="input_ids")
    with pytest.raises(ValueError, match=f"record 0: beside the tokens there are {name}, which are not read"):
        table[0]


def test_a_folder_of_many_formats(tmp_path):
    (tmp_path / "a.md").write_text("one")
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "two"}) + "\n")
    (tmp_path / "c.JSONL").write_text(json.dumps({"text": "three"}) + "\n")
    assert texts(data.files(tmp_path)) == ["one", "two", "three"]
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="d.jsonl.gz: byte 0: this file is compressed: unpack it first"):
        data.files(tmp_path)


def test_tables_add_no_fields_to_tools(tmp_path):
    """Arrow gives each object the fields of all others; TRL's data sets have tools as JSON."""
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "ok"}]
    tools = [{"name": "look", "at": {"x": 1}}, {"name": "go", "to": {"y": 2}}]
    pq.write_table(arrow.table({"messages": [chat], "tools": [tools]}), tmp_path / "chats.parquet")
    (read,) = data.parquet(tmp_path / "chats.parquet", field="messages")
    assert read["tools"] == tools
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"messages": [chat], "tools": [tools]})
    assert data.records(table, field="messages")[0]["tools"] == tools


def test_parquet(tmp_path):
    arrow, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    want = [f"text {i}" for i in range(25)]
    table = arrow.table({"text": want, "ids": [[i, i + 1] for i in range(25)]})
    for i, rows in enumerate((table[:10], table[10:])):
        pq.write_table(rows, tmp_path / f"{i}.parquet", row_group_size=4)
    assert texts(data.parquet(tmp_path)) == want
    assert data.parquet(tmp_path, field="ids")[24]["tokens"].tolist() == [24, 25]
    assert sorted(texts(data.files(tmp_path).shuffle(seed=0))) == sorted(want)
    with pytest.raises(ValueError, match=r"0.parquet: there is no column 'body', only \['text', 'ids'\]"):
        data.parquet(tmp_path, field="body")
    chat = {"messages": [[{"role": "user", "content": "?"}]], "tools": [["look"]], "other": [1]}
    pq.write_table(arrow.table(chat), tmp_path / "chats.parquet")
    (read,) = data.parquet(tmp_path / "chats.parquet", field="messages")  # a template gets the tools
    assert read["tools"] == ["look"] and read["messages"] == chat["messages"][0] and "other" not in read
    pq.write_table(arrow.table({"input_ids": [[1, 2]], "labels": [[-100, 2]]}), tmp_path / "ids.parquet")
    with pytest.raises(ValueError, match="ids.parquet: beside the tokens there are labels, which are not read"):
        data.parquet(tmp_path / "ids.parquet", field="input_ids")
    (tmp_path / "0.parquet").write_bytes(b"nonsense" * 4)
    with pytest.raises(ValueError, match="0.parquet: this is no Parquet file"):
        data.parquet(tmp_path)


@pytest.mark.parametrize("shards", [4, 3], ids=["files divide", "files do not"])
def test_a_stream_resumes_exactly_on_other_hosts(tmp_path, shards):
    datasets = pytest.importorskip("datasets")
    for i in range(4):
        lines = [json.dumps({"text": " ".join(str(100 * i + j) for _ in range(j % 5 + 1))}) for j in range(12)]
        (tmp_path / f"{i}.jsonl").write_text("\n".join(lines) + "\n")
    names = [str(tmp_path / f"{i}.jsonl") for i in range(4)]
    hub = datasets.load_dataset("json", data_files=names, split="train", streaming=True, cache_dir=str(tmp_path))
    source = data.HFStream(hub, epochs=2).map(lambda d: {"tokens": np.array([int(x) for x in d["text"].split()])})
    every = [int(d["tokens"][0]) for k in range(shards) for d in source[k::shards]]
    assert sorted(every) == sorted(2 * [100 * i + j for i in range(4) for j in range(12)])

    def loader(host, hosts):
        rows = lambda part: data.pack(source[part], length=8, bins=2)
        with process(host, hosts):
            return data.Loader(rows, batch_size=shards, num_shards=shards, num_batches=100)

    uninterrupted = loader(0, 1)
    for _ in range(3):
        next(uninterrupted)
    state = json.loads(json.dumps(uninterrupted.get_state()))
    want = [batch["tokens"] for batch in islice(uninterrupted, 6)]
    halves = [loader(0, 2), loader(1, 2)]
    for half in halves:
        half.set_state(state)
    got = [np.concatenate([next(half)["tokens"] for half in halves]) for _ in range(6)]
    np.testing.assert_array_equal(got, want)
