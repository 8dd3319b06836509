"""Ids, labels and records from files and callers are read as they are, or refused with their place."""

import json
import math

import numpy as np
import pytest

from maxlib import data, post_training, tokenization
from maxlib.data._documents import token_ids
from tests.data import test_megatron, test_webdataset
from tests.data.test_chats import CHAT, PLAIN

ASK, YES = CHAT[:1], [{"role": "assistant", "content": "a"}]
TEMPLATE = tokenization.ChatTemplate(PLAIN)
TOKENIZER = tokenization.train_bpe(["a size"], vocab_size=259, special_tokens=("<user>", "<assistant>", "</s>"))

MARKS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
MIDDLES = tokenization.train_bpe(["a size"], vocab_size=260, special_tokens=MARKS)


def documents(**fields):
    return data.in_memory(["x"]).map(lambda _: fields)


def from_parquet(ids, folder):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"tokens": [ids]}), folder / "a.parquet")
    return data.parquet(folder / "a.parquet", field="tokens")[0]["tokens"]


def from_pretokenized(ids, folder):
    """Reads a corpus of 32 bits per id, whose file holds other ids than were written."""
    from array_record.python.array_record_module import ArrayRecordWriter

    data.write_tokens(data.in_memory(["a"]), folder, TOKENIZER)
    manifest = json.loads((folder / "manifest.json").read_text())
    path = folder / manifest["files"][0]["name"]
    writer = ArrayRecordWriter(str(path), "group_size:1")
    writer.write(np.array(ids, "<i4").tobytes())
    writer.close()
    manifest["dtype"], manifest["files"][0]["bytes"] = "<i4", path.stat().st_size
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return data.read_tokens(folder)[0]["tokens"]


def from_numpy(ids, folder):
    np.save(folder / "a.npy", ids)
    return data.numpy_tokens(folder / "a.npy", length=2)[0]["tokens"]


def from_megatron(ids, folder):
    prefix = test_megatron.write(folder / "a", [np.array(ids)], kind=np.int64)
    return data.megatron_documents(prefix)[0]["tokens"]


def megatron_sample(ids, folder):
    prefix = test_megatron.write(folder / "a", [np.array(ids)], kind=np.int64)
    return data.megatron_samples(prefix, length=1)[0]["tokens"]


def megatron_end(ids, folder):
    prefix = test_megatron.write(folder / "a", [np.array([5, 7])], kind=np.int64)
    return data.megatron_samples(prefix, length=1, eod_id=ids[0])[0]["tokens"]


def from_tar(ids, folder):
    test_webdataset.write(folder / "a.tar", {"a": {"npy": test_webdataset.npy(ids)}})
    return next(iter(data.WebDataset(folder / "a.tar")[::1]))["tokens"]


def with_middle(ids, _):
    middles = data.fill_in_the_middle(data.in_memory(["a"]), MIDDLES, bos_id=ids[0])
    return middles[0]["tokens"][:1]


def with_bos(ids, _):
    return data.tokenize(data.in_memory(["a"]), TOKENIZER, bos_id=ids[0])[0]["tokens"][:1]


def write_with_eos(ids, folder):
    data.write_tokens(data.in_memory(["a"]), folder, TOKENIZER, eos_id=ids[0])
    return data.read_tokens(folder)[0]["tokens"][-1:]


def packed(ids, _):
    return next(iter(data.pack(documents(tokens=ids), length=4)))["tokens"]


def packed_targets(ids, _):
    return next(iter(data.pack(documents(tokens=[0] * len(ids), targets=ids), length=4)))["targets"]


def padded(ids, _):
    return data.pad(documents(tokens=ids, targets=[-1] * len(ids)), length=4)[0]["tokens"]


def padded_targets(ids, _):
    return data.pad(documents(tokens=[0] * len(ids), targets=ids), length=4)[0]["targets"]


def prompt(ids, _):
    return post_training.completion_batch([ids], [[1]], [1.0], length=8)["tokens"][0]


def completion(ids, _):
    return post_training.completion_batch([[0]], [ids], [1.0], length=8)["tokens"][0][1:]


# How ids enter, by the public name that reads them.
ENTRANCES = {
    "in_memory": [lambda ids, _: data.in_memory([ids])[0]["tokens"]],
    "records": [lambda ids, _: data.records([{"tokens": ids}], field="tokens")[0]["tokens"]],
    "parquet": [from_parquet],
    "WebDataset": [from_tar],
    "numpy_tokens": [from_numpy],
    "megatron_documents": [from_megatron],
    "megatron_samples": [megatron_sample, megatron_end],
    "fill_in_the_middle": [with_middle],
    "read_tokens": [from_pretokenized],
    "tokenize": [with_bos],
    "write_tokens": [write_with_eos],
    "pack": [packed, packed_targets],
    "pad": [padded, padded_targets],
    "completion_batch": [prompt, completion],
}
# Type hints are checked in tests; without that, the check of the value refuses the same.
HINT = "violates type hint|Type-check error"
WAYS = [(name, way) for name, ways in ENTRANCES.items() for way in ways]


BAD = 2**31, 2**70, -1, -(2**31) - 1, 5.0, True, "7", None, [7]
COLUMN = 2**32 + 5, -1, 5.0, None  # what a column of Parquet can hold beside an integer
INTEGERS = 2**32 + 5, -1  # what an array of int64 can hold
HOLDS = {from_parquet: COLUMN, from_pretokenized: [-1]}
HOLDS |= dict.fromkeys((from_numpy, from_megatron, megatron_sample), INTEGERS)
HOLDS |= {from_tar: (*INTEGERS, 5.0, math.nan, "7")}
MEANS = {packed_targets: -1, padded_targets: -1}  # nothing learned
MEANS |= dict.fromkeys((with_bos, with_middle, megatron_end, write_with_eos))  # no token


@pytest.mark.parametrize(("name", "enter"), WAYS)
def test_bad_ids_are_refused(name, enter, tmp_path):
    """With what must hold, and not as an error of numpy."""
    must = "must be token ids, one-dimensional integers from (0|-2147483648) to 2147483647"
    for bad in HOLDS.get(enter, BAD):
        if bad is not MEANS.get(enter, ...):
            with pytest.raises((ValueError, TypeError), match=f"{must}|{HINT}"):
                enter([bad, 7], tmp_path)


@pytest.mark.parametrize("bad", [[5.0], ["7"], [[7]], [[7], [8, 9]], [1, True], 7, None, b"7"], ids=str)
def test_what_is_no_id_is_refused(bad):
    with pytest.raises(
        ValueError, match="prompt 3 must be token ids, one-dimensional integers from 0 to 2147483647, got"
    ):
        token_ids(bad, "prompt 3")


@pytest.mark.parametrize("dtype", [np.int64, np.uint32, np.uint64])
def test_arrays_are_read_as_they_are_or_refused(dtype):
    assert data.in_memory([np.array([2**31 - 1], dtype)])[0]["tokens"].tolist() == [2**31 - 1]
    with pytest.raises(ValueError, match="Document 0, .* got 2147483648 at index 1"):
        data.in_memory([np.array([1, 2**31], dtype)])


def test_fields_of_a_record_are_not_those_of_later_stages(tmp_path):
    """Whatever a record of a file has beside its text or messages, the rows are the same."""
    plain = {"text": "a size", "messages": ASK + YES}
    names = ("tokens", "targets", "segment_ids", "positions", "images", "audio", "source", "record", "folder")
    names += ("loss_weights",)
    for value in ([1] * 6, None):
        rows, lengths = [], []
        for record in (plain, plain | dict.fromkeys(names, value)):
            (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
            text = data.tokenize(data.jsonl(tmp_path / "a.jsonl"), TOKENIZER)
            chats = data.chats(tmp_path / "a.jsonl")
            table = data.records([record], field="messages")
            each = [text, *(data.tokenize_chats(source, TOKENIZER, TEMPLATE) for source in (chats, table))]
            rows.append([next(iter(data.pack(records, length=32, overlong={"a": "drop"}))) for records in each])
            lengths.append([data.pad(records, length=32)[0] for records in each[1:]])
        for before, after in zip([*rows[0], *lengths[0]], [*rows[1], *lengths[1]], strict=True):
            assert before.keys() == after.keys()
            assert all((before[name] == after[name]).all() for name in before)


def test_the_side_of_a_split_depends_on_what_is_read(tmp_path):
    """Chats with a field "text" that is the same in all of them, and texts with the same "messages"."""
    lines = [{"messages": [{"role": "user", "content": str(i)}], "text": "same", "body": str(i)} for i in range(40)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps(line | {"messages": line["messages"]}) + "\n" for line in lines)
    )
    for documents in (data.chats(tmp_path / "a.jsonl"), data.jsonl(tmp_path / "a.jsonl", field="body")):
        train, held_out = data.split(documents, validation=0.5)
        assert 8 < len(list(held_out)) < 32 and len(list(train)) + len(list(held_out)) == 40


def test_labels_are_booleans_and_answers_the_last_message():
    source = [{"messages": ASK + YES, "desirable": "false"}, {"messages": [CHAT[2], *YES], "desirable": np.bool_(True)}]
    examples = data.kto_examples(source, TOKENIZER, TEMPLATE)
    assert examples[1]["desirable"]
    for label in ("false", None, math.nan, 2, [True]):
        source[0]["desirable"] = label
        with pytest.raises(ValueError, match="document 0: .*'desirable' must be True or False"):
            examples[0]
    for chosen in (ASK + YES + ASK, "a", [*ASK, "a"]):
        pairs = data.pairs([{"chosen": chosen, "rejected": ASK + YES + CHAT[2:3]}], TOKENIZER, TEMPLATE)
        with pytest.raises(ValueError, match=r"document 0: .*must (be the last message|answer the same prompt)"):
            pairs[0]


def test_the_other_answer_is_looked_for_among_what_is_left():
    source = data.records(
        [{"messages": [{"role": "user", "content": str(i)}, *YES], "desirable": True} for i in range(9)],
        field="messages",
    )
    third = source.filter(lambda document: document["messages"][0]["content"] in "036")
    assert len(list(data.kto_examples(third, TOKENIZER, TEMPLATE))) == 3


@pytest.mark.parametrize("torn", ["", '{"source": "a", "rec', '{"source": "a", "record": 2'])
def test_bad_records_go_on_after_a_torn_line(torn, tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"source": "a", "record": 1, "error": "\\u00e9"}\n' + torn)
    bad = data.SkipBadRecords(limit=5, path=path)
    assert len(bad) == 1
    bad.add("a", 2, ValueError("x"))
    assert len(data.SkipBadRecords(limit=5, path=path)) == 2
    assert [json.loads(line)["record"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize("line", ["no JSON", "[]", '{"source": "a"}', '{"source": 1, "record": 1}'])
def test_lines_that_are_no_bad_records_are_named(line, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"source": "a", "record": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad.jsonl: line 2 must be an object with a 'source' and a 'record'"):
        data.SkipBadRecords(limit=5, path=tmp_path / "bad.jsonl")


@pytest.mark.parametrize("weight", [math.nan, -1, "1", 1e308])
def test_weights_are_numbers(weight):
    sources = {"a": data.in_memory([[1]]), "b": data.in_memory([[2]])}
    with pytest.raises((ValueError, TypeError), match=f"weights must name a positive number for every source|{HINT}"):
        data.Mixture(sources, {"a": weight, "b": 1e308}, seed=0)


@pytest.mark.parametrize("name", ["num_batches", "prefetch", "timeout"])
def test_no_limit_is_nan(name):
    """Which nothing exceeds, so that a loader would never end."""
    with pytest.raises((ValueError, TypeError), match=f"{name}.* (must be|positive)|{HINT}"):
        data.Loader(lambda part: data.pack(documents(tokens=[1])[part], length=4), batch_size=1, **{name: math.nan})
    with pytest.raises((ValueError, TypeError), match=f"limit must be at least 0|{HINT}"):
        data.SkipBadRecords(limit=math.nan)


def test_advantages_are_finite():
    with pytest.raises(ValueError, match="advantages must be finite, got nan for completion 1"):
        post_training.completion_batch([[1]] * 2, [[2]] * 2, [1.0, math.nan], length=4)
    with pytest.raises(ValueError, match="prompt 1 must have a token"):
        post_training.completion_batch([[1], []], [[2]] * 2, [1.0, 1.0], length=4)
