"""Implementations that failed `python -m maxlib.ops check`, in a table for each device kind.

Tables are in a cache directory (`MAXLIB_CACHE`, or `maxlib` under `XDG_CACHE_HOME`, or `~/.cache/maxlib`). Each is read
once per process.
"""

import contextlib
import functools
import json
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from maxlib._utils.files import cache_directory, write_atomically

IGNORE = "MAXLIB_IGNORE_CHECKS"
"""Environment variable: set to 1 to ignore the failures that `check` found."""


def file_of(device_kind: str) -> Path:
    """Returns the path of a device kind's table."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return cache_directory() / f"{name}.json"


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on: another compiler, or package of kernels, may fix or break one."""
    installed = {}
    for name in ("jax", "jaxlib", "tokamax", "jax-linear-attention", "jax-triton", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@functools.cache
def failures(device_kind: str) -> dict[str, str]:
    """Returns `{name: reason}` of a device kind, found here with these versions; nothing from a damaged file."""
    try:
        table = json.loads(file_of(device_kind).read_text())
        return dict(table["refused"]) if table["versions"] == versions() else {}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def refused(op: str, implementation: str, device_kind: str) -> str | None:
    """Returns why an implementation failed `check` on this kind of device, or None."""
    if os.environ.get(IGNORE) == "1":
        return None
    why = failures(device_kind).get(f"{op}/{implementation}")
    return why and f"failed `python -m maxlib.ops check` here ({why}); {file_of(device_kind)} says so"


def write(device_kind: str, changes: dict[str, str | None]) -> Path:
    """Merges failures into the table of a device kind; a value of None removes an entry. Returns the table's path."""
    refused = {name: why for name, why in (failures(device_kind) | changes).items() if why is not None}
    path = file_of(device_kind)
    table = {"device": device_kind, "versions": versions(), "refused": refused}
    write_atomically(path, json.dumps(table, indent=1) + "\n")
    failures.cache_clear()
    return path
