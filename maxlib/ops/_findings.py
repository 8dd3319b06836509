"""Tables of measurements per device kind: implementations that failed `check`, and the best tiles of `tune`.

The user's tables are in a cache directory (`MAXLIB_CACHE`, or `maxlib` under `XDG_CACHE_HOME`, or `~/.cache/maxlib`).
The package may ship tables of tiles, over which the user's take precedence. Each table is read once per process.
"""

import contextlib
import functools
import json
import os
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from maxlib._utils.files import cache_directory

IGNORE = "MAXLIB_IGNORE_CHECKS"
"""Environment variable: set to 1 to ignore the failures that `check` found."""

SHIPPED = Path(__file__).with_name("tables")


def file_of(device_kind: str, folder: Path | None = None) -> Path:
    """Returns the path of a device kind's table."""
    name = re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-")
    return (cache_directory() if folder is None else folder) / f"{name}.json"


def versions() -> dict[str, str]:
    """Returns the versions that a result depends on: another compiler, or package of kernels, may fix or break one."""
    installed = {}
    for name in ("jax", "jaxlib", "tokamax", "jax-linear-attention", "jax-triton", "triton"):
        with contextlib.suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


@functools.cache
def findings(device_kind: str) -> dict[str, Any]:
    """Returns `{"refused": {name: reason}, "tiles": {key: sizes}}` of a device kind; empty if nothing was measured.

    Failures only apply to this machine, and to the versions with which they were found. Unreadable files are ignored.
    """
    shipped, user = _read(file_of(device_kind, SHIPPED)), _read(file_of(device_kind))
    return {"refused": user["refused"], "tiles": shipped["tiles"] | user["tiles"]}


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Reads a table; what is damaged, or failed with other versions, is left out."""
    try:
        table = json.loads(path.read_text())
    except (OSError, ValueError):
        table = None
    table = table if isinstance(table, dict) else {}
    sections = {name: table.get(name) for name in ("refused", "tiles")}
    entries = {name: dict(section) if isinstance(section, dict) else {} for name, section in sections.items()}
    # Tiles tuned with another compiler are still a good choice, but its failures do not apply.
    return entries | ({} if table.get("versions") == versions() else {"refused": {}})


def refused(op: str, implementation: str, device_kind: str) -> str | None:
    """Returns why an implementation failed `check` on this kind of device, or None."""
    if os.environ.get(IGNORE) == "1":
        return None
    why = findings(device_kind)["refused"].get(f"{op}/{implementation}")
    return why and f"failed `python -m maxlib.ops check` here ({why}); {file_of(device_kind)} says so"


def tiles(key: str, device_kind: str) -> dict[str, Any] | None:
    """Returns the fastest tile sizes that `tune` measured for a key, a kernel and a shape, or None."""
    return findings(device_kind)["tiles"].get(key)


def write(device_kind: str, **changes: dict[str, Any]) -> Path:
    """Merges `refused` or `tiles` into the user's table of a device kind; a value of None removes an entry.

    Returns:
        The path of the table.
    """
    path = file_of(device_kind)
    table: dict[str, Any] = {"device": device_kind, **_read(path), "versions": versions()}
    for name, entries in changes.items():
        table[name] = {key: value for key, value in (table[name] | entries).items() if value is not None}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write atomically, because other processes may be reading.
    partial = path.with_suffix(f".{os.getpid()}")
    partial.write_text(json.dumps(table, indent=1) + "\n")
    partial.replace(path)
    findings.cache_clear()
    return path
