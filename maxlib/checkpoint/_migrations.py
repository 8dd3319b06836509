"""Names that leaves had in files of earlier versions."""

from collections.abc import Collection, Mapping
from typing import TypeVar

Entry = TypeVar("Entry")
# Ends of paths: old -> new, with the version that still wrote the old one.
RENAMED = {"router.correction": "router.expert_bias"}  # 0.1.0.dev0


def current_names(stored: Mapping[str, Entry], wanted: Collection[str]) -> dict[str, Entry]:
    """Gives what was stored under an old name its new one, where a model wants that and does not know the old one.

    Args:
        stored: Entries by the path that the file has.
        wanted: Paths of the present model.
    """
    return {_current(path, wanted): entry for path, entry in stored.items()}


def _current(path: str, wanted: Collection[str]) -> str:
    for old, new in RENAMED.items():
        renamed = path.removesuffix(old) + new
        if path.endswith(f".{old}") and path not in wanted and renamed in wanted:
            return renamed
    return path
