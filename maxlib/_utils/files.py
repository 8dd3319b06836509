"""Files that are whole or not there, and JSON that says each thing once."""

import os
from pathlib import Path
from typing import Any


def write_atomically(path: Path, text: str) -> None:
    """Writes `path` so that a kill leaves the old file or the new one; makes its directory."""
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
