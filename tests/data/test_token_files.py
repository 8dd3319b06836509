"""Arrays of tokens on disk are the documents that OLMo reads from them."""

import pickle

import numpy as np
import pytest

from maxlib import data

EOS, LENGTH = 3, 16


def arrays(folder, kind):
    """Files as OLMo's, without a header, that end with the token that ends documents."""
    random, tokens = np.random.default_rng(0), []
    for i, size in enumerate((200, 77, 130)):
        array = random.integers(4, 250, size)
        array[random.integers(0, size, 9)] = EOS
        array[-1] = EOS
        tokens.append(array.astype(kind))
        tokens[-1].tofile(folder / f"{i}.npy")
    return tokens


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64"])
def test_samples_and_documents(tmp_path, kind):
    tokens = arrays(tmp_path, kind)
    samples = data.numpy_tokens(tmp_path, dtype=kind, length=LENGTH)
    wanted = [array[i : i + LENGTH] for array in tokens for i in range(0, len(array) - LENGTH + 1, LENGTH)]
    assert len(samples) == len(wanted)
    for i, sample in enumerate(wanted):
        np.testing.assert_array_equal(samples[i]["tokens"], sample)
    documents = data.numpy_tokens(tmp_path, dtype=kind, eos_id=EOS)
    assert len(documents) == sum((array == EOS).sum() for array in tokens)
    np.testing.assert_array_equal(np.concatenate([d["tokens"] for d in documents]), np.concatenate(tokens))
    assert all((d["tokens"] == EOS).sum() == 1 and d["tokens"][-1] == EOS for d in documents)


def test_samples_are_those_of_olmo(tmp_path):
    olmo = pytest.importorskip("olmo_core.data.numpy_dataset", exc_type=ImportError)
    arrays(tmp_path, "uint16")
    paths = sorted(tmp_path.glob("*.npy"))
    theirs = olmo.NumpyFSLDataset(
        *paths, sequence_length=LENGTH, pad_token_id=0, eos_token_id=EOS, vocab_size=250, dtype=np.uint16
    )
    ours = data.numpy_tokens(paths, dtype="uint16", length=LENGTH)
    assert len(ours) == len(theirs)
    for i in range(len(ours)):
        np.testing.assert_array_equal(ours[i]["tokens"], theirs[i]["input_ids"])
    rows = list(data.pack(ours, length=LENGTH))
    assert all(row["targets"][-1] == -1 and (row["segment_ids"] == 1).all() for row in rows)


def test_files_of_numpy_save_name_their_type(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(10, 40, dtype=np.uint32))
    samples = data.numpy_tokens(tmp_path / "tokens.npy", length=10)
    assert samples[2]["tokens"].tolist() == list(range(30, 40))
    with pytest.raises(ValueError, match="must be a one-dimensional array of uint16, got uint32"):
        data.numpy_tokens(tmp_path / "tokens.npy", dtype="uint16", length=10)
    tail = data.numpy_tokens(tmp_path / "tokens.npy", eos_id=35)
    assert [len(document["tokens"]) for document in tail] == [26, 4]


def test_the_map_is_not_pickled(tmp_path):
    np.zeros(100_000, np.uint16).tofile(tmp_path / "tokens.npy")
    samples = data.numpy_tokens(tmp_path, dtype="uint16", length=50_000)
    assert len(samples[1]["tokens"]) == 50_000
    copy = pickle.dumps(samples)
    assert len(copy) < 10_000
    assert len(pickle.loads(copy)[1]["tokens"]) == 50_000


def test_mistakes(tmp_path):
    np.zeros(5, np.uint16).tofile(tmp_path / "tokens.npy")
    for options, message in (
        ({"length": 2}, "name the dtype of its tokens"),
        ({"length": 2, "dtype": "uint32"}, "no array of uint32"),
        ({"length": 6, "dtype": "uint16"}, "no document"),
        ({"length": 2, "eos_id": 1, "dtype": "uint16"}, "either length= or eos_id="),
        ({"eos_id": 100_257, "dtype": "uint16"}, "uint16 holds no eos_id=100257"),
        ({"length": 0, "dtype": "uint16"}, "at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            data.numpy_tokens(tmp_path, **options)
    np.array([2**40], np.uint64).tofile(tmp_path / "tokens.npy")
    with pytest.raises(ValueError, match=r"tokens.npy: from token 0.* got 1099511627776 at index 0"):
        data.numpy_tokens(tmp_path, dtype="uint64", length=1)[0]
