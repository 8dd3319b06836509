"""Atomic file writes, strict JSON and its types, the cache directory, and clients of object stores."""

import json
import os
from pathlib import Path
from typing import Any

JSON_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def cache_directory() -> Path:
    """Returns `MAXLIB_CACHE`, or `maxlib` under `XDG_CACHE_HOME`, or `~/.cache/maxlib`."""
    if directory := os.environ.get("MAXLIB_CACHE"):
        return Path(directory)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "maxlib"


def store_client(url: str) -> Any:
    """Returns fsspec's client of a URL's object store; it repeats requests that the store throttles.

    Raises ImportError, with what to install, if there is none.
    """
    scheme = url.partition("://")[0]
    try:
        import fsspec

        return fsspec.filesystem(scheme)
    except ImportError as error:
        extra = {"s3": "s3", "gs": "gcs"}.get(scheme)
        install = "install fsspec's client of it" if extra is None else f'pip install "maxlib[{extra}]"'
        raise ImportError(f"{scheme}:// needs the client of its store: {install}") from error


def write_atomically(path: Path, text: str) -> None:
    """Writes `path` atomically, so that a kill leaves the old file or the new one; creates its directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Builds a JSON object, as `object_pairs_hook` of `json.loads`. Raises ValueError for a name given twice."""
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"the fields {', '.join(twice)} are given more than once; keep one of each.")
    return data


def read_json_object(path: Path) -> dict[str, Any]:
    """Reads the JSON object of a file. Raises ValueError, which names the file, for anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} must be a JSON object in UTF-8: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"{path} must be a JSON object, got a {type(data).__name__}")
    return data


def read_json(line: str) -> Any:
    """Reads one line of a log; None if it is truncated or damaged."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a number within the range of float64."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64)
