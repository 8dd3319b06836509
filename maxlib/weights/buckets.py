"""Model directories in object stores: `s3://bucket/model` and `gs://bucket/model`, through fsspec.

They are read through a copy in the cache directory, like models of the hub, and written through a temporary directory.
A bucket cannot rename a directory, so the configuration is written last; without it nothing is read.
"""

import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from maxlib._utils import files as _files
from maxlib.weights.files import FOLDERS, INDEX, OWN_FILES, read_index

# Files without which a directory is not read: written last and removed first.
LAST = ("config.json", "adapter_config.json")
_URL = re.compile(r"(?:s3|gs)://([A-Za-z0-9][\w.-]*)/(.+?)/*")


def is_bucket(directory: Any) -> bool:
    """Returns whether a directory is in an object store: its name begins with `s3://` or `gs://`."""
    return str(directory).startswith(("s3://", "gs://"))


def local(directory: str | Path) -> Path:
    """Returns a local directory unchanged; copies a bucket's directory into the cache, unless it is already there.

    Only files of a model are copied, without subdirectories.

    Args:
        directory: A directory, or its name in a bucket, such as "s3://bucket/model".

    Returns:
        The directory; a copy must not be written to.

    Raises:
        FileNotFoundError: If there is no such directory in the bucket.
        OSError: If the store refuses or keeps failing.
        ImportError: If the client of the store is not installed.
    """
    if not is_bucket(directory):
        return Path(directory)
    store = _Store(str(directory))
    listed = {name: mark for name, mark in store.files().items() if any(fnmatch.fnmatch(name, p) for p in OWN_FILES)}
    if not listed:
        raise FileNotFoundError(f"{store.url} has no files of a model.")
    # Each version of the directory has its own copy.
    key = hashlib.blake2b(json.dumps([store.url, sorted(listed.items())]).encode(), digest_size=16).hexdigest()
    home = _files.cache_directory() / "buckets" / key
    with _locked(home):  # only one process per host copies
        if not home.exists():
            part = Path(tempfile.mkdtemp(dir=home.parent, prefix=".part-"))
            try:
                _copy(store, listed, part)
                part.rename(home)
            finally:
                shutil.rmtree(part, ignore_errors=True)
    return home


def _copy(store: "_Store", listed: dict[str, str], part: Path) -> None:
    names = sorted(listed)
    if INDEX in listed:  # a bucket may also have the same weights in other files
        store.get(INDEX, part)
        needed = {*read_index(part / INDEX).values()}
        others = {name for name in names if name.endswith(".safetensors") and "/" not in name} - needed
        names = [name for name in names if name not in {INDEX, *others}]
    for name in names:
        store.get(name, part)


@contextmanager
def whole_in_bucket(url: str, check: Callable[[list[str]], None]) -> Iterator[Path]:
    """Yields a temporary directory, whose files are uploaded at the end, the configuration last.

    Args:
        url: The directory in the bucket.
        check: Called with the existing names; raises an error if they must not be replaced.
    """
    store = _Store(url)
    check(sorted(store.files()))
    with tempfile.TemporaryDirectory(prefix="maxlib-export-") as part:
        yield Path(part)
        new = sorted(path.relative_to(part).as_posix() for path in Path(part).rglob("*") if path.is_file())
        old = store.files()
        for name in [name for name in old if name in LAST] + [name for name in old if name not in (*new, *LAST)]:
            store.remove(name)
        for name in sorted(new, key=lambda name: name in LAST):
            store.put(Path(part), name)


def child(directory: str | Path, name: str) -> Any:
    """Returns the path or URL of an entry in a directory."""
    return f"{str(directory).rstrip('/')}/{name}" if is_bucket(directory) else Path(directory) / name


def exists(directory: str | Path) -> bool:
    """Returns whether an export exists; in a bucket, whether it is complete."""
    if not is_bucket(directory):
        return Path(directory).exists()
    return bool({*LAST} & {*_Store(str(directory)).files()})


def children(directory: str | Path) -> list[str]:
    """Returns the names of the directories in a directory."""
    if is_bucket(directory):
        return _Store(str(directory)).directories()
    return [path.name for path in Path(directory).iterdir()]


def remove(directory: str | Path) -> None:
    """Removes a directory and its contents."""
    if is_bucket(directory):
        _Store(str(directory)).remove_all()
    else:
        shutil.rmtree(directory)


class _Store:
    """One directory of a bucket. Its client repeats requests that the store throttles or drops."""

    def __init__(self, url: str):
        if (match := _URL.fullmatch(url)) is None:
            # Do not print the URL: it may contain a password.
            raise ValueError("a directory in a bucket must be named s3://bucket/path or gs://bucket/path, without more")
        bucket, path = match.groups()
        self.url, self.root = url, f"{bucket}/{path}"
        self._fs = _files.store_client(url)

    def files(self) -> dict[str, str]:
        """Returns the versions of the files in the directory, by name."""
        entries = self._entries()
        files = {
            name: str(next((entry[k] for k in _VERSIONS if entry.get(k)), ""))
            for name, entry in entries
            if entry["type"] == "file"
        }
        for folder in self.directories():
            if any(fnmatch.fnmatch(folder, pattern) for pattern in FOLDERS):
                nested = _Store(child(self.url, folder)).files()
                files |= {f"{folder}/{name}": version for name, version in nested.items()}
        return files

    def directories(self) -> list[str]:
        return [name for name, entry in self._entries() if entry["type"] == "directory"]

    def get(self, name: str, to: Path) -> None:
        (to / name).parent.mkdir(exist_ok=True)
        self._fs.get_file(f"{self.root}/{name}", str(to / name))

    def put(self, directory: Path, name: str) -> None:
        self._fs.put_file(str(directory / name), f"{self.root}/{name}")

    def remove(self, name: str) -> None:
        self._fs.rm_file(f"{self.root}/{name}")

    def remove_all(self) -> None:
        for name in sorted(self.files(), key=lambda name: name not in LAST):
            self.remove(name)
        for name in self.directories():
            _Store(child(self.url, name)).remove_all()

    def _entries(self) -> list[tuple[str, dict[str, Any]]]:
        self._fs.invalidate_cache()  # others may have written there
        try:
            entries = self._fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return []
        named = [(PurePosixPath(str(entry["name"])), entry) for entry in entries]
        return [(path.name, entry) for path, entry in named if str(path.parent) == self.root]


_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "LastModified", "updated")


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """Holds a lock file next to `home`, which the operating system releases when the process ends."""
    home.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(home.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)
