"""safetensors files and their index: read and written as by the safetensors library, and refused if damaged."""

import json
import os

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from maxlib.weights.files import INDEX, SINGLE, Header, find_tensors, shard, write_file, write_index

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(5).astype(np.float16),
    "c": np.arange(7).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 3), np.float32),
    "scalar": np.array(3, np.float32),
    "whole": np.arange(4, dtype=np.int64),
}


def header(name: str) -> Header:
    return Header(name, TENSORS[name].dtype, TENSORS[name].shape)


def sharded(path, **files: list[str]):
    """A directory of files `<key>.safetensors` with these tensors, and its index."""
    weight_map = {}
    for key, names in files.items():
        save_file({name: TENSORS[name] for name in names}, path / f"{key}.safetensors")
        weight_map |= dict.fromkeys(names, f"{key}.safetensors")
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map}))
    return weight_map


def test_files_are_read_as_safetensors_does(tmp_path):
    save_file(TENSORS, tmp_path / SINGLE)
    tensors = find_tensors(tmp_path)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(tensors[name].view(), tensor)
        assert tensors[name].view().shape == tensor.shape


def test_safetensors_reads_what_is_written(tmp_path):
    files = shard([header(name) for name in TENSORS], max_bytes=10**6)
    assert list(files) == [SINGLE]
    write_file(tmp_path / SINGLE, files[SINGLE], iter(TENSORS[h.name] for h in files[SINGLE]))
    back = load_file(tmp_path / SINGLE)
    assert all(
        np.array_equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )
    with safe_open(tmp_path / SINGLE, "np") as file:
        assert file.metadata() == {"format": "pt"}
    for name, stored in find_tensors(tmp_path).items():
        assert stored.offset % TENSORS[name].dtype.itemsize == 0


def test_files_are_cut_by_size():
    headers = [Header(str(n), np.dtype(np.float32), (n,)) for n in (1, 1, 3, 9, 2, 2)]
    files = shard(headers, max_bytes=20)
    assert [[h.name for h in file] for file in files.values()] == [["1", "1", "3"], ["9"], ["2", "2"]]
    assert list(files) == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]


def test_sharded_files_there_and_back(tmp_path):
    files = shard([header(name) for name in TENSORS], max_bytes=25)
    assert len(files) > 2
    for name, headers in files.items():
        write_file(tmp_path / name, headers, iter(TENSORS[h.name] for h in headers))
    write_index(tmp_path, files)
    assert json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"] == sum(
        t.nbytes for t in TENSORS.values()
    )
    for name, stored in find_tensors(tmp_path).items():
        np.testing.assert_array_equal(stored.view(), TENSORS[name])


@pytest.mark.parametrize("keep", [0, -1])
def test_truncated_files_are_refused(keep, tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / SINGLE)
    content = (tmp_path / SINGLE).read_bytes()
    (tmp_path / SINGLE).write_bytes(content[:keep])
    with pytest.raises(ValueError, match=rf"{SINGLE} is truncated or corrupt .*Download it again"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        '{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}',
        "not json",
    ],
)
def test_corrupt_headers_are_refused(entry, tmp_path):
    (tmp_path / SINGLE).write_bytes(len(entry).to_bytes(8, "little") + entry.encode() + bytes(24))
    with pytest.raises(ValueError, match="truncated or corrupt"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        "\udcff",
    ],
)
def test_corrupt_indices_are_refused(content, tmp_path):
    (tmp_path / INDEX).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"{INDEX} must be a JSON object whose weight_map"):
        find_tensors(tmp_path)


def test_an_index_that_names_a_tensor_twice_is_refused(tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "one.safetensors", "a": "two.safetensors"}}')
    with pytest.raises(ValueError, match="fields .* given more than once"):
        find_tensors(tmp_path)


def test_an_index_has_to_match_its_files(tmp_path):
    weight_map = sharded(tmp_path, one=["a", "b"], two=["c"])
    assert find_tensors(tmp_path).keys() == {"a", "b", "c"}
    for change, message in (
        ({"b": None}, r"does not list: b \(one.safetensors\)"),
        ({"d": "two.safetensors"}, r"lists tensors that are not there: d \(two.safetensors\)"),
        ({"c": "one.safetensors"}, r"lists tensors that are not there: c \(one.safetensors\)"),
        ({"c": "three.safetensors"}, r"three.safetensors is listed in .* but does not exist"),
    ):
        changed = {k: v for k, v in (weight_map | change).items() if v}
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": changed}))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            find_tensors(tmp_path)


def test_one_file_beside_an_index_is_ambiguous(tmp_path):
    sharded(tmp_path, one=["a"])
    save_file(TENSORS, tmp_path / SINGLE)
    with pytest.raises(ValueError, match="has both .* keep only the intended one"):
        find_tensors(tmp_path)


@pytest.mark.parametrize("way", ["../outside.safetensors", "absolute", "link", "sub/../../outside.safetensors"])
def test_paths_that_leave_the_directory_are_refused(way, tmp_path):
    save_file({"a": TENSORS["a"]}, tmp_path / "outside.safetensors")
    home = tmp_path / "model"
    (home / "sub").mkdir(parents=True)
    name = {"absolute": str(tmp_path / "outside.safetensors"), "link": "link.safetensors"}.get(way, way)
    if way == "link":
        (home / "link.safetensors").symlink_to(tmp_path / "outside.safetensors")
    (home / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(
        ValueError, match="weights must be inside the directory, but .* points to .*outside.safetensors"
    ):
        find_tensors(home)


def test_links_within_a_hugging_face_cache_are_followed(tmp_path):
    """Its snapshots are links to blobs beside them."""
    (tmp_path / "repo" / "blobs").mkdir(parents=True)
    home = tmp_path / "repo" / "snapshots" / "abc"
    home.mkdir(parents=True)
    save_file({"a": TENSORS["a"]}, tmp_path / "repo" / "blobs" / "123")
    (home / SINGLE).symlink_to(os.path.join("..", "..", "blobs", "123"))
    np.testing.assert_array_equal(find_tensors(home)["a"].view(), TENSORS["a"])
    (tmp_path / "elsewhere").symlink_to(home)  # how the directory itself is reached does not matter
    assert "a" in find_tensors(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["pytorch_model.bin", "model.pth"],
            r"has model.pth, pytorch_model.bin. Such files are pickles.*save_pretrained",
        ),
        (["pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"], "pickles"),
        (["model-00001-of-00002.safetensors"], "without an index"),
        (["model-q4.gguf"], "has model-q4.gguf: weights.from_gguf reads"),
        (["README.md"], "but has neither"),
    ],
)
def test_directories_without_safetensors_say_what_to_do(files, message, tmp_path):
    for name in files:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(FileNotFoundError, match=message):
        find_tensors(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no such directory"):
        find_tensors(tmp_path / "absent")
