"""Names of leaves in files of earlier versions."""

from collections.abc import Collection, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")
# Path suffixes: old -> new, with the last version that wrote the old one.
RENAMED = {"router.correction": "router.expert_bias"}  # 0.1.0.dev0


def current_names(stored: Mapping[str, Entry], wanted: Collection[str]) -> dict[str, Entry]:
    """Renames stored entries from an old name to the new one, if the model has the new name and not the old one.

    Args:
        stored: Entries by path in the file.
        wanted: Paths of the current model.
    """
    return {_current(path, wanted): entry for path, entry in stored.items()}


def _current(path: str, wanted: Collection[str]) -> str:
    for old, new in RENAMED.items():
        renamed = path.removesuffix(old) + new
        if path.endswith(f".{old}") and path not in wanted and renamed in wanted:
            return renamed
    return path
