"""Megatron's files are read as Megatron reads them: the same samples in the same order."""

import hashlib
import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from maxlib import data

LENGTH, EOD, SEED = 8, 1, 77
SPLIT = (70, 20, 10)
GOLDEN = [
    (None, "16294f5535d5e357"),
    (115, "fbc3802bc9238e43"),
    (310, "56137020d9b809fe"),
]  # digests of what GPTDataset of megatron-core 0.16.1 returns


def write(prefix: Path, documents: list[np.ndarray], *, kind: type = np.uint16) -> str:
    """Writes a pair by the description of the format."""
    codes = {np.uint16: 8, np.int32: 4, np.int64: 5}
    lengths = [len(document) for document in documents]
    starts = np.cumsum([0, *lengths[:-1]]) * kind().itemsize
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, codes[kind], len(documents), len(documents) + 1)
    tables = np.array(lengths, "<i4"), np.array(starts, "<i8"), np.arange(len(documents) + 1, dtype="<i8")
    Path(f"{prefix}.idx").write_bytes(header + b"".join(table.tobytes() for table in tables))
    Path(f"{prefix}.bin").write_bytes(b"".join(document.astype(kind).tobytes() for document in documents))
    return str(prefix)


def corpus(seed: int, count: int = 60, longest: int = 30) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [np.append(random.integers(2, 9000, random.integers(0, longest)), EOD) for _ in range(count)]


class Tokenizer:
    """What Megatron asks a tokenizer for."""

    vocab_size, eod, pad = 10_000, EOD, 9_999
    unique_identifiers = {"class": "none"}  # noqa: RUF012
    bos = eos = cls = mask = sep = eod


@pytest.fixture(scope="module")
def megatron():
    pytest.importorskip("megatron.core.datasets.helpers_cpp", exc_type=ImportError)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    from megatron.core.datasets import blended_megatron_dataset_builder, gpt_dataset, indexed_dataset

    return blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder, gpt_dataset, indexed_dataset


def of_megatron(megatron, folder: Path, blend, sizes, **options) -> list:
    builder, gpt, _ = megatron
    resets = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = gpt.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=LENGTH,
        blend=blend,
        split=",".join(map(str, SPLIT)),
        tokenizer=Tokenizer(),
        **{"path_to_cache": str(folder / "cache"), **resets, **options},
    )
    return builder(gpt.GPTDataset, sizes, lambda: True, config).build()


def rows(samples) -> np.ndarray:
    """[samples, length + 1]"""
    pairs = [(row["tokens"], row["targets"]) for row in (samples[i] for i in range(len(samples)))]
    return np.stack([np.append(tokens, targets[-1]) for tokens, targets in pairs])


def texts(dataset) -> np.ndarray:
    return np.stack([dataset._query_document_sample_shuffle_indices(i)[0] for i in range(len(dataset))])


def test_documents_of_a_pair_that_megatrons_builder_wrote(megatron, tmp_path):
    _, _, indexed = megatron
    documents = corpus(0)
    for kind in (np.uint16, np.int32):
        prefix = tmp_path / kind.__name__
        builder = indexed.IndexedDatasetBuilder(f"{prefix}.bin", dtype=kind)
        for document in documents:
            builder.add_document(document, [len(document)])
        builder.finalize(f"{prefix}.idx")
        copy = write(tmp_path / "copy", documents, kind=kind)
        assert Path(f"{copy}.idx").read_bytes() == Path(f"{prefix}.idx").read_bytes()
        source = data.megatron_documents(str(prefix))
        theirs = indexed.IndexedDataset(str(prefix), multimodal=False)
        assert len(source) == len(theirs) == len(documents)
        for i, document in enumerate(documents):
            np.testing.assert_array_equal(source[i]["tokens"], theirs[i])
            np.testing.assert_array_equal(source[i]["tokens"], document)


@pytest.mark.parametrize(("num_samples", "digest"), GOLDEN)
def test_samples_are_those_that_megatron_read(tmp_path, num_samples, digest):
    """Also where megatron-core is not installed."""
    prefix = write(tmp_path / "corpus", corpus(1))
    ours = rows(data.megatron_samples(prefix, length=LENGTH, num_samples=num_samples, seed=SEED, split=SPLIT))
    assert hashlib.blake2b(ours.astype("<i4").tobytes(), digest_size=8).hexdigest() == digest


# One epoch; part of one; a second epoch of which most is read, and of which little is read.
@pytest.mark.parametrize("num_samples", [None, 30, 150, 115, 310])
def test_samples_and_their_order_are_those_of_gpt_dataset(megatron, tmp_path, num_samples):
    prefix = write(tmp_path / "corpus", corpus(1))
    theirs = of_megatron(megatron, tmp_path, ([prefix], None), [num_samples, 12, None])
    for part, dataset, count in zip(("train", "valid", "test"), theirs, (num_samples, 12, None), strict=True):
        ours = data.megatron_samples(prefix, length=LENGTH, num_samples=count, seed=SEED, split=SPLIT, part=part)
        assert len(ours) == len(dataset)
        np.testing.assert_array_equal(rows(ours), texts(dataset))


@pytest.mark.parametrize(
    ("weights", "num_samples"), [([0.3, 0.5, 0.2], 200), ([1.0, 1.0, 1.0], 90), (None, None), (None, 70)]
)
def test_blends_are_those_of_blended_dataset(megatron, tmp_path, weights, num_samples):
    prefixes = [write(tmp_path / name, corpus(i, 40 + 9 * i)) for i, name in enumerate("abc")]
    # Megatron's builder has no cache of blends without torch.distributed.
    theirs = of_megatron(megatron, tmp_path, (prefixes, weights), [num_samples, 10, 10], path_to_cache=None)[0]
    source = prefixes if weights is None else dict(zip(prefixes, weights, strict=True))
    ours = data.megatron_samples(source, length=LENGTH, num_samples=num_samples, seed=SEED, split=SPLIT)
    pairs = [theirs[i] for i in range(len(theirs))]
    wanted = np.stack([np.append(pair["tokens"], pair["labels"][-1]) for pair in pairs])
    np.testing.assert_array_equal(rows(ours), wanted)


def test_blends_follow_their_weights(tmp_path):
    """After every sample, no source is a whole sample away from its share."""
    documents = [[np.append(np.full(20, 2 + i), EOD)] * 40 for i in range(3)]
    prefixes = [write(tmp_path / name, corpus) for name, corpus in zip("abc", documents, strict=True)]
    for source, shares in ((dict(zip(prefixes, (3, 5, 2), strict=True)), (0.3, 0.5, 0.2)), (prefixes, (1 / 3,) * 3)):
        samples = rows(data.megatron_samples(source, length=LENGTH, num_samples=90, seed=SEED))
        counts = np.cumsum(samples.max(axis=1)[:, None] == np.arange(2, 5), axis=0)
        assert len(samples) == 90 and (np.abs(counts - np.outer(np.arange(1, 91), shares)) <= 1).all()


def test_documents_apart(megatron, tmp_path):
    prefix = write(tmp_path / "corpus", corpus(2, longest=9))
    resets = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), True)
    dataset = of_megatron(megatron, tmp_path, ([prefix], None), [40, 4, 4], **resets)[0]
    ours = data.megatron_samples(prefix, length=LENGTH, num_samples=40, seed=SEED, split=SPLIT, eod_id=EOD)
    for i in range(40):
        row, wanted = ours[i], dataset[i]
        np.testing.assert_array_equal(row["tokens"], wanted["tokens"])
        np.testing.assert_array_equal(row["positions"], wanted["position_ids"])
        np.testing.assert_array_equal(row["targets"], np.where(wanted["loss_mask"] > 0, wanted["labels"], -1))
        same = row["segment_ids"][:, None] == row["segment_ids"][None]
        hidden = ~(same & np.tril(np.ones((LENGTH, LENGTH), bool)))
        np.testing.assert_array_equal(hidden, wanted["attention_mask"][0])


def test_two_epochs_through_a_loader_resumed_in_the_middle(tmp_path):
    prefix = write(tmp_path / "corpus", corpus(3))
    samples = data.megatron_samples(prefix, length=LENGTH, num_samples=190, seed=SEED)
    assert len(samples) > 1.5 * len(data.megatron_samples(prefix, length=LENGTH, seed=SEED))

    def loader(num_shards):
        return data.Loader(lambda part: samples[part].to_iter_dataset(), batch_size=4, num_shards=num_shards)

    batches = [batch["tokens"] for _, batch in zip(range(40), loader(1), strict=False)]
    np.testing.assert_array_equal(np.concatenate(batches), rows(samples)[:160, :-1])
    sharded = loader(2)
    halves = [next(sharded)["tokens"] for _ in range(20)]
    resumed = loader(2)
    resumed.set_state(json.loads(json.dumps(sharded.get_state())))
    halves += [next(resumed)["tokens"] for _ in range(20)]
    for batch, half in zip(batches, halves, strict=True):  # the same samples, in other rows
        np.testing.assert_array_equal(np.unique(batch, axis=0), np.unique(half, axis=0))


def test_damaged_and_mistaken(tmp_path):
    prefix = write(tmp_path / "corpus", corpus(4))
    with pytest.raises(ValueError, match="too few for a sample of 5000"):
        data.megatron_samples(prefix, length=5000)
    with pytest.raises(ValueError, match="split must have up to three shares"):
        data.megatron_samples(prefix, length=8, split=(1, 0, 0, 1))
    with pytest.raises(ValueError, match="length and num_samples must be at least 1, got 0 and None"):
        data.megatron_samples(prefix, length=0)
    with pytest.raises(ValueError, match="at least one prefix, got none"):
        data.megatron_samples([], length=8)
    with pytest.raises(ValueError, match="need positive ones and num_samples="):
        data.megatron_samples({prefix: 1.0}, length=8)
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    content = index.read_bytes()
    for damaged, message in (
        (content[:20], "no index"),
        (b"X" + content[1:], "no index"),
        (content[:90], "ends within"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            data.megatron_documents(prefix)
    index.write_bytes(content)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ValueError, match="one of them was damaged"):
        data.megatron_documents(prefix)
    tokens.unlink()
    with pytest.raises(FileNotFoundError):
        data.megatron_documents(prefix)
