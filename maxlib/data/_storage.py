"""Files of sources: on a disk, or in an object store (`gs://`, `s3://`), which fsspec reads."""

import dataclasses
import glob
import hashlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePath, PurePosixPath
from typing import Any

from maxlib._utils.files import cache_directory, store_client

Paths = str | os.PathLike | Sequence[str | os.PathLike]


@dataclasses.dataclass(frozen=True, order=True)
class RemoteFile:
    """A file in an object store, with the methods of `pathlib.Path` that sources use."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    @property
    def parent(self) -> str:
        return self.url.rpartition("/")[0]

    def open(self, mode: str = "rb") -> Any:
        return store_client(self.url).open(self.url, mode)

    def read_bytes(self) -> bytes:
        return store_client(self.url).cat_file(self.url)


File = Path | RemoteFile


def is_remote(path: Any) -> bool:
    """Returns True for a URL such as `s3://bucket/name`."""
    return "://" in str(path)


def as_file(path: Any) -> File:
    """Returns the file of a path or URL."""
    return RemoteFile(str(path)) if is_remote(path) else Path(path)


def find_files(paths: Paths) -> list[File]:
    """Finds the files of paths, folders and patterns in the given order; those of folders and patterns are sorted."""
    paths = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not paths:
        raise ValueError("Give at least one path, got an empty list.")
    return [file for path in paths for file in (_remote(str(path)) if is_remote(path) else _local(Path(path)))]


def _local(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file() and not _is_hidden(file, path)]
    else:
        files = [Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file()]
    return sorted(_nonempty(files, path))


def _remote(url: str) -> list[RemoteFile]:
    store = store_client(url)
    store.invalidate_cache()  # others may have written there
    if store.isfile(url):
        return [RemoteFile(url)]
    names = [name for name in store.glob(url) if store.isfile(name)] if glob.has_magic(url) else store.find(url)
    files = [name for name in names if not _is_hidden(PurePosixPath(name), PurePosixPath(url))]
    return sorted(RemoteFile(store.unstrip_protocol(name)) for name in _nonempty(files, url))


def _is_hidden(file: PurePath, path: PurePath) -> bool:
    """Returns True if a name in the path of a file begins with a dot and was not asked for."""
    return any(name.startswith(".") and name not in path.parts for name in file.parts)


def _nonempty(files: list[Any], path: Any) -> list[Any]:
    if not files:
        raise FileNotFoundError(f"{path} names no file: give files, folders that contain files, or glob patterns.")
    return files


def exists(file: File) -> bool:
    """Returns True for a file that exists."""
    return store_client(file.url).isfile(file.url) if isinstance(file, RemoteFile) else file.exists()


def size_of(file: File) -> int:
    """Returns the size of a file in bytes."""
    return store_client(file.url).size(file.url) if isinstance(file, RemoteFile) else file.stat().st_size


def read_range(file: File, start: int, stop: int) -> bytes:
    """Reads bytes `start` to `stop`; from a store, with one request of that range."""
    if isinstance(file, RemoteFile):
        return store_client(file.url).cat_file(file.url, start=start, end=stop)
    with file.open("rb") as opened:
        opened.seek(start)
        return opened.read(stop - start)


def local_copy(file: File) -> Path:
    """Returns a local file unchanged; copies one of a store into the cache directory, unless this version is there."""
    if isinstance(file, Path):
        return file
    store = store_client(file.url)
    version = hashlib.blake2b(f"{file.url} {store.ukey(file.url)}".encode(), digest_size=16).hexdigest()
    copy = cache_directory() / "data" / f"{version}{file.suffix}"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=copy.parent, prefix=".part-")
        os.close(handle)
        try:
            store.get_file(file.url, part)
            os.replace(part, copy)
        finally:
            Path(part).unlink(missing_ok=True)
    return copy
