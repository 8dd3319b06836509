"""Model directories in buckets, with a fake bucket; tests/checkpoint/test_remote.py has emulators of the services."""

import json

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from maxlib.weights import buckets


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """A directory on the disk as the bucket, and another as the cache."""
    there = tmp_path / "there"
    there.mkdir()
    files = DirFileSystem(str(there), LocalFileSystem(auto_mkdir=True))
    monkeypatch.setattr("maxlib._utils.files.store_client", lambda url: files)
    monkeypatch.setenv("MAXLIB_CACHE", str(tmp_path / "cache"))
    (there / "bucket").mkdir()
    return there / "bucket"


def test_a_directory_is_written_and_read(bucket):
    with buckets.whole_in_bucket("s3://bucket/model", lambda names: None) as part:
        (part / "config.json").write_text("{}")
        (part / "model.safetensors").write_bytes(b"weights")
        (part / "additional_chat_templates").mkdir()
        (part / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    assert buckets.exists("s3://bucket/model")
    copied = buckets.local("s3://bucket/model")
    assert {str(path.relative_to(copied)): path.read_bytes() for path in copied.rglob("*") if path.is_file()} == {
        "additional_chat_templates/rag.jinja": b"{{ documents }}",
        "config.json": b"{}",
        "model.safetensors": b"weights",
    }


def test_a_directory_that_does_not_exist(bucket):
    assert not buckets.exists("gs://bucket/model")
    with pytest.raises(FileNotFoundError, match="gs://bucket/model has no files of a model"):
        buckets.local("gs://bucket/model")


def test_weights_that_the_index_does_not_name_are_not_copied(bucket):
    (bucket / "model").mkdir()
    names = ["config.json", "consolidated.safetensors", "model-00001-of-00001.safetensors"]
    for name in names:
        (bucket / "model" / name).write_text("{}")
    index = {"metadata": {"total_size": 1}, "weight_map": {"w": names[2]}}
    (bucket / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    dense = bucket / "model" / "2_Dense"  # of a sentence-transformers model
    dense.mkdir()
    (dense / "model.safetensors").write_text("{}")
    copied = buckets.local("s3://bucket/model")
    assert {path.name for path in copied.iterdir()} == {names[0], names[2], "model.safetensors.index.json", "2_Dense"}
    assert (copied / "2_Dense" / "model.safetensors").exists()


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://bucket", "gs://", "s3://bucket/x?secret=1\n"])
def test_urls_with_credentials_are_refused_and_not_repeated(url):
    with pytest.raises(ValueError, match="s3://bucket/path") as error:
        buckets.local(url)
    assert "secret" not in str(error.value)
