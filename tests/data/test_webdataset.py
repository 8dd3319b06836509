"""Tar files in the format of WebDataset: every sample once, in order, by shard, and resumed in the middle of a file."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

from maxlib import data, tokenization


def write(path, samples: dict[str, dict[str, bytes]]) -> None:
    with tarfile.open(path, "w") as tar:
        for key, files in samples.items():
            for name, content in files.items():
                member = tarfile.TarInfo(f"{key}.{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.fixture
def folder(tmp_path):
    """Four files of 5, 7, 5 and 7 samples, whose tokens name file and sample."""
    for i in range(4):
        samples = {
            f"some/folder.v1/{'long' * 40 if j == 2 else ''}{j:03}": {
                "txt": f"text {i} {j}".encode(),
                "npy": npy(np.arange(1000 * i + 10 * j, 1000 * i + 10 * j + 3 + j)),
                "meta.json": json.dumps({"number": j}).encode(),
                "cls": b"1",
            }
            for j in range(5 + 2 * (i % 2))
        }
        write(tmp_path / f"{i}.tar", samples)
    return tmp_path


def test_samples_are_documents(folder):
    documents = list(data.WebDataset(folder)[:])
    assert len(documents) == 24
    document = documents[7]
    assert document["text"] == "text 1 2" and document["meta.json"] == {"number": 2} and document["cls"] == b"1"
    assert document["tokens"].tolist() == [1020, 1021, 1022, 1023, 1024]
    assert document["record"] == f"{folder}/1.tar: some/folder.v1/{'long' * 40}002"


def test_a_place_among_other_files_is_refused(folder):
    begun = iter(data.WebDataset(folder)[:])
    next(begun)
    with pytest.raises(ValueError, match="number of documents or files is 4, but here it is 1"):
        iter(data.WebDataset(folder / "0.tar")[:]).set_state(begun.get_state())


def test_fewer_samples_than_shards_are_an_error_at_once(folder):
    source = data.WebDataset(folder / "0.tar", epochs=None)
    with pytest.raises(
        ValueError, match="has 5 records, of which this shard .* reads none .every 8th, from number 5.: use fewer"
    ):
        next(data.Loader(lambda part: data.pack(source[part], length=8), batch_size=8, timeout=20))


def test_they_are_those_of_webdataset(tmp_path):
    webdataset = pytest.importorskip("webdataset")
    image = pytest.importorskip("PIL.Image").fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    path = str(tmp_path / "0.tar")
    with webdataset.TarWriter(path) as writer:
        for i in range(6):
            sample = {"txt": f"größe {i}", "json": {"i": i}, "npy": np.arange(i + 1), "png": image}
            writer.write({"__key__": f"a/b{i}", **sample})
    theirs = list(webdataset.WebDataset(path, shardshuffle=False).decode("pil"))
    ours = list(data.WebDataset(path)[:])
    assert len(ours) == len(theirs) == 6
    for document, sample in zip(ours, theirs, strict=True):
        assert (document["text"], document["json"]) == (sample["txt"], sample["json"])
        np.testing.assert_array_equal(document["tokens"], sample["npy"])
        np.testing.assert_array_equal(np.asarray(document["image"]), np.asarray(sample["png"]))
        assert document["record"].endswith(sample["__key__"])


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
def test_each_shard_reads_its_own_and_an_epoch_has_every_sample_once(folder, num_shards):
    for seed in (None, 3):
        source = data.WebDataset(folder, epochs=2, seed=seed)
        shards = [[int(d["tokens"][0]) for d in source[i::num_shards]] for i in range(num_shards)]
        every = sorted(1000 * i + 10 * j for i in range(4) for j in range(5 + 2 * (i % 2)))
        assert sorted(token for shard in shards for token in shard) == sorted(every * 2)
        if num_shards <= 4 and seed is None:
            assert all(
                {token // 1000 for token in shard} == set(range(i, 4, num_shards)) for i, shard in enumerate(shards)
            )


def test_epochs_read_files_in_another_order(folder):
    documents = [int(d["tokens"][0]) // 1000 for d in data.WebDataset(folder, epochs=3, seed=1)[:]]
    orders = [tuple(dict.fromkeys(documents[24 * i : 24 * i + 24])) for i in range(3)]
    assert len(set(orders)) > 1 and all(sorted(order) == [0, 1, 2, 3] for order in orders)


@pytest.mark.parametrize("num_shards", [1, 2, 8])
def test_resumed_is_uninterrupted(folder, num_shards):
    """After every batch, so also within a file, at its end, and at that of an epoch."""
    source = data.WebDataset(folder, epochs=None, seed=2)

    def loader():
        rows = lambda part: data.pack(source[part], length=16, bins=2)
        return data.Loader(rows, batch_size=8, num_shards=num_shards, prefetch=1)

    uninterrupted, states = loader(), []
    batches = []
    for _ in range(12):
        states.append(json.loads(json.dumps(uninterrupted.get_state())))
        batches.append(next(uninterrupted)["tokens"])
    uninterrupted.close()
    for i in (0, 1, 2, 3, 5, 8, 11):
        resumed = loader()
        if i:
            resumed.set_state(states[i])
        np.testing.assert_array_equal(next(resumed)["tokens"], batches[i])
        resumed.close()


def test_a_place_in_another_order_is_refused(folder):
    first, other = (iter(data.WebDataset(folder, epochs=None, seed=seed)[::]) for seed in (2, 3))
    next(first)
    with pytest.raises(ValueError, match="files shuffled with the seed 2, but here it is 3"):
        other.set_state(first.get_state())


def test_a_stream_is_tokenized_and_mixed(folder):
    tokenizer = tokenization.train_bpe(["text 0123"] * 3, vocab_size=262)
    source = data.tokenize(data.WebDataset(folder), tokenizer, eos_id=0)
    mixture = data.Mixture({"tars": source, "memory": data.in_memory([[5, 6, 7]])}, {"tars": 1, "memory": 1}, seed=0)
    mixed = [document for _, document in zip(range(20), mixture[:], strict=False)]
    texts = [tokenizer.decode(d["tokens"].tolist()) for d in mixed if d["source"] == "tars"]
    assert texts[:2] == ["text 0 0", "text 0 1"]


def test_damage_is_named(folder, tmp_path):
    path = tmp_path / "bad.tar"
    content = (folder / "0.tar").read_bytes()
    cut = (content[:700], content[:1200], content[:4096], content[:1024] + b"x" * 512 + content[1536:])
    for damaged in (b"no tar file" * 100, b"", gzip.compress(content), *cut):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"bad\.tar: this is no tar file, a compressed or a damaged one"):
            list(data.WebDataset(path)[:])
    write(path, {"a": {"json": b"{"}})
    with pytest.raises(ValueError, match=r"bad\.tar: a: the file 'json' cannot be decoded"):
        list(data.WebDataset(path)[:])
    write(path, {"": {"hidden": b""}})
    with pytest.raises(ValueError, match="has 0 records"):
        list(data.WebDataset(path)[:])
    with tarfile.open(path, "w") as tar:
        for _ in range(2):
            tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    with pytest.raises(ValueError, match="a has two files 'txt'"):
        list(data.WebDataset(path)[:])
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        data.WebDataset(folder, epochs=0)


def test_a_bucket(folder):
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for path in folder.glob("*.tar"):
        store.pipe_file(f"/tars/{path.name}", path.read_bytes())
    remote = list(data.WebDataset("memory://tars/*.tar")[1::2])
    for document, wanted in zip(remote, data.WebDataset(folder)[1::2], strict=True):
        assert document["text"] == wanted["text"]
    store.rm("/tars", recursive=True)
