"""Names of leaves in files of earlier versions."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from maxlib import nn

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


def layers_by_slot(grouping: nn.stack.Grouping | Mapping[str, int]) -> dict[str, list[tuple[int, int | None]]]:
    """Returns the layers of each slot of a stack, as `nn.stack.layers_by_slot` does.

    Args:
        grouping: The groups of a stack; or, as 0.1.0.dev0 stored them, numbers of layers by name: `lead` layers with
            the period `lead_period`, `prefix` single layers, then repeats of `period` layers, and single layers.
    """
    if not isinstance(grouping, Mapping):
        return nn.stack.layers_by_slot(grouping)
    lead, lead_period, prefix, period = (
        grouping.get(name, n) for name, n in (("lead", 0), ("lead_period", 1), ("prefix", 0), ("period", 1))
    )
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
