"""Names of leaves in files of earlier versions."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from maxlib import nn

Entry = TypeVar("Entry")
# The groups of a stack; in 0.1.0.dev0 numbers of layers by name.
StoredGrouping = nn.stack.Grouping | Mapping[str, int]
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


def layers_by_slot(grouping: StoredGrouping) -> dict[str, list[tuple[int, int | None]]]:
    """Returns the layers of each slot of a stack, as `nn.stack.layers_by_slot` does.

    Args:
        grouping: The groups of a stack. Those of 0.1.0.dev0 are `lead` layers with the period `lead_period`, then
            `prefix` single layers, repeats of `period` layers (body), and single layers (suffix).
    """
    if not isinstance(grouping, Mapping):
        return nn.stack.layers_by_slot(grouping)
    lead, lead_period = grouping.get("lead", 0), grouping.get("lead_period", 1)
    prefix, period = grouping["prefix"], grouping["period"]
    start = lead + prefix
    end = start + (grouping["num_layers"] - start) // period * period
    repeated = {"lead": (0, lead, lead_period), "body": (start, end, period)}
    alone = {"prefix": range(lead, start), "suffix": range(end, grouping["num_layers"])}
    slots: dict[str, list[tuple[int, int | None]]] = {}
    for name, (first, last, step) in repeated.items():
        for slot in range(min(step, last - first)):
            slots[f"{name}.{slot}"] = [(i, row) for row, i in enumerate(range(first + slot, last, step))]
    for name, layers in alone.items():
        slots |= {f"{name}.{slot}": [(i, None)] for slot, i in enumerate(layers)}
    return slots
