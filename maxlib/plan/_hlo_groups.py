"""Finds the mesh axes of a collective in a compiled program."""

import math
import re

import numpy as np


def axes_of_group(rest: str, mesh: dict[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes in which the devices of one group differ, `("?",)` if its groups cannot be read.

    Args:
        rest: The attributes of the instruction.
        mesh: From mesh axis to size, in the order of the mesh.
    """
    ids = _group(rest, math.prod(mesh.values()))
    if ids is None:
        return ("?",)
    places = np.array(np.unravel_index(ids, tuple(mesh.values())))
    differ = (places != places[:, :1]).any(axis=1)
    return tuple(axis for axis, is_over in zip(mesh, differ, strict=True) if is_over)


def _group(rest: str, count: int) -> list[int] | None:
    """Returns the device ids of the first group, in any of the notations of XLA; None if there is none."""
    if pairs := re.search(r"source_target_pairs=\{([\d,{} ]*)\}", rest):
        match = [tuple(map(int, pair)) for pair in re.findall(r"\{(\d+),(\d+)\}", pairs[1] + "}")]
        return next((list(pair) for pair in match if pair[0] != pair[1]), [0])  # to itself only
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return [int(n) for n in match[1].split(",")]
    if match := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        ids = _turned(int(match[1]) * int(match[2]), match[3], match[4])
        return ids.reshape(int(match[1]), int(match[2]))[0].tolist()
    order = r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    if match := re.search(r"replica_groups=mesh\[([^\]]*)\]" + order + r" \{([^}]*)\}", rest):
        return _named_group(match[1], match[4], _turned(count, match[2], match[3]))
    return list(range(count)) if re.search(r"replica_groups=\{\}", rest) else None


def _turned(count: int, sizes: str | None, order: str | None) -> np.ndarray:
    """Returns device ids in the order of an iota with these sizes, transposed."""
    ids = np.arange(count)
    ids = ids if sizes is None else ids.reshape([int(n) for n in sizes.split(",")])
    return ids if order is None else ids.transpose([int(n) for n in order.split(",")])


def _named_group(sizes: str, named: str, devices: np.ndarray) -> list[int] | None:
    known = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", sizes)}
    chosen = re.findall(r"'([^']+)'(?!:)", named)
    if not known or not set(chosen) <= set(known) or ":" in named:
        return None
    ids = devices.reshape(tuple(known.values()))
    return ids[tuple(slice(None) if name in chosen else 0 for name in known)].flatten().tolist()
