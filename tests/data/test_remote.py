"""Sources in an object store are those on a disk: fsspec's memory, and an emulated bucket."""

import contextlib
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from maxlib import data
from maxlib.data import _storage
from tests.checkpoint import gs_emulator
from tests.data.corpus import documents
from tests.data.test_megatron import corpus, write

fsspec = pytest.importorskip("fsspec")
TEXTS = [f"Document {i}. " + "The cat sat on the mat. " * (i % 5) for i in range(12)]


@pytest.fixture
def folder(tmp_path) -> Path:
    """Files of every format."""
    (tmp_path / "text" / "more").mkdir(parents=True)
    (tmp_path / "text" / ".hidden").mkdir()
    (tmp_path / "text" / ".hidden" / "no.txt").write_text("not read")
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / ("more" if i % 2 else "") / f"{i:02}.txt").write_text(text)
    lines = "".join(f'{{"text": "{text}", "messages": [{{"role": "user", "content": "hi"}}]}}\n' for text in TEXTS)
    (tmp_path / "lines.jsonl").write_text(lines)
    np.concatenate(documents()).astype(np.uint16).tofile(tmp_path / "tokens.npy")
    write(tmp_path / "megatron", corpus(5))
    data.write_tokens(data.in_memory(TEXTS), tmp_path / "written", Tokenizer.from_str(WORDS), documents_per_file=5)
    return tmp_path


WORDS = (
    '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[],"normalizer":null,"pre_tokenizer":'
    '{"type":"Whitespace"},"post_processor":null,"decoder":null,"model":{"type":"WordLevel",'
    '"vocab":{"a":0,"cat":1},"unk_token":"a"}}'
)


@pytest.fixture
def memory(folder, monkeypatch):
    monkeypatch.setenv("MAXLIB_CACHE", str(folder / "cache"))
    store = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            store.pipe_file(f"/bucket/{path.relative_to(folder)}", path.read_bytes())
    yield "memory://bucket"
    store.rm("/bucket", recursive=True)


SOURCES = {
    "folder": lambda root: data.text_files(f"{root}/text"),
    "pattern": lambda root: data.text_files(f"{root}/text/**/*.txt", document="line"),
    "file": lambda root: data.text_files([f"{root}/text/02.txt", f"{root}/text/00.txt"], document="paragraph"),
    "jsonl": lambda root: data.jsonl(f"{root}/lines.jsonl"),
    "files": lambda root: data.files([f"{root}/text", f"{root}/lines.jsonl"]),
    "tokens": lambda root: data.numpy_tokens(f"{root}/tokens.npy", dtype="uint16", length=20),
    "token documents": lambda root: data.numpy_tokens(f"{root}/tokens.npy", dtype="uint16", eos_id=2000),
    "megatron": lambda root: data.megatron_samples(f"{root}/megatron", length=16, eod_id=1),
    "write_tokens": lambda root: data.read_tokens(f"{root}/written"),
}


def same(ours, wanted) -> None:
    assert len(ours) == len(wanted) > 0
    for i in range(len(wanted)):
        assert ours[i].keys() == wanted[i].keys()
        for name, value in wanted[i].items():
            np.testing.assert_array_equal(ours[i][name], value)


@pytest.mark.parametrize("kind", SOURCES)
def test_a_source_in_a_bucket_is_that_on_the_disk(memory, folder, kind):
    same(SOURCES[kind](memory), SOURCES[kind](str(folder)))


def test_parquet_in_a_bucket(memory, folder):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": TEXTS}), folder / "rows.parquet", row_group_size=5)
    fsspec.filesystem("memory").pipe_file("/bucket/rows.parquet", (folder / "rows.parquet").read_bytes())
    same(data.parquet(f"{memory}/rows.parquet"), data.parquet(folder / "rows.parquet"))


def test_array_record_is_copied_once_and_again_when_it_changes(memory, folder, monkeypatch):
    store, copied = fsspec.filesystem("memory"), []
    get_file = type(store).get_file
    monkeypatch.setattr(type(store), "get_file", lambda *args, **kw: copied.append(args[1]) or get_file(*args, **kw))
    for _ in range(2):
        data.read_tokens(f"{memory}/written")
    assert len(copied) == 4  # the manifest and three files
    name = sorted(store.find("/bucket/written"))[-1]
    store.pipe_file(name, store.cat_file(name))
    data.read_tokens(f"{memory}/written")


def test_chats_in_a_bucket_say_where_they_are(memory):
    chat = data.chats(f"{memory}/lines.jsonl")[0]
    assert (chat["record"], chat["folder"]) == (f"{memory}/lines.jsonl: byte 0", memory)


def test_what_is_missing_is_named(memory, monkeypatch):
    for path in (f"{memory}/nothing", f"{memory}/text/*.jpg"):
        with pytest.raises(FileNotFoundError, match="names no file"):
            data.text_files(path)
    with pytest.raises(FileNotFoundError, match=r"written/none/manifest.json does not exist"):
        data.read_tokens(f"{memory}/written/none")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    fsspec.registry._registry.pop("s3", None) if hasattr(fsspec.registry, "_registry") else None
    with pytest.raises(ImportError, match=r'pip install "maxlib\[s3\]"'):
        _storage.as_file("s3://bucket/file").read_bytes()


def test_a_bad_byte_in_a_bucket_is_named(memory):
    fsspec.filesystem("memory").pipe_file("/bucket/bad.txt", b"fine\n\xff")
    with pytest.raises(ValueError, match=r"memory://bucket/bad.txt: byte 5: text must be UTF-8"):
        data.text_files(f"{memory}/bad.txt", document="line")


def _s3(monkeypatch):
    server = pytest.importorskip("moto.server").ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("bucket")
    return server.stop


def _gs(monkeypatch):
    pytest.importorskip("gcp_storage_emulator")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in gs_emulator.clients(port).items():
        monkeypatch.setenv(name, value)
    # Its threads would keep this process alive.
    serve = f"from tests.checkpoint import gs_emulator; gs_emulator.start({port})"
    process = subprocess.Popen([sys.executable, "-c", serve], cwd=Path(__file__).parents[2])
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port), timeout=1):
            break
        time.sleep(0.1)
    return process.kill


@pytest.mark.full
@pytest.mark.parametrize(("scheme", "package", "serve"), [("s3", "s3fs", _s3), ("gs", "gcsfs", _gs)])
def test_in_an_emulated_bucket(folder, monkeypatch, scheme, package, serve):
    pytest.importorskip(package)
    monkeypatch.setenv("MAXLIB_CACHE", str(folder / "cache"))
    stop = serve(monkeypatch)
    try:
        store = fsspec.filesystem(scheme, skip_instance_cache=True)
        for path in folder.rglob("*"):
            if path.is_file() and "cache" not in path.parts:
                store.pipe_file(f"bucket/{path.relative_to(folder)}", path.read_bytes())
        for source in SOURCES.values():
            same(source(f"{scheme}://bucket"), source(str(folder)))
    finally:
        stop()


def test_a_megatron_index_is_read_by_ranges(memory, monkeypatch):
    """A document costs one request of its bytes, not the file."""
    store, ranges = fsspec.filesystem("memory"), []
    cat_file = type(store).cat_file
    pair = data.megatron_documents(f"{memory}/megatron")

    def counted(self, path, start=None, end=None, **kw):
        ranges.append((start, end))
        return cat_file(self, path, start=start, end=end, **kw)

    monkeypatch.setattr(type(store), "cat_file", counted)
    tokens = [pair[i]["tokens"] for i in range(3)]
    assert [end - start for start, end in ranges] == [2 * len(document) for document in tokens]
    assert struct.unpack("<H", store.cat_file("/bucket/megatron.bin", *ranges[1])[:2]) == (tokens[1][0],)
