"""Device meshes with the axis names that the rule presets use."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh


def make_mesh(
    *, data: int = 1, fsdp: int = 1, tensor: int = 1, context: int = 1, devices: Sequence[Any] | None = None
) -> Mesh:
    """A mesh over `devices` (default: all). One of the degrees may be -1: it takes what the others leave.

    Raises ValueError when the degrees do not multiply to the number of devices.
    """
    count = len(jax.devices() if devices is None else devices)
    degrees = _fill({"data": data, "fsdp": fsdp, "tensor": tensor, "context": context}, count)
    shape = tuple(degrees.values())
    kinds = (AxisType.Auto,) * len(shape)
    if devices is not None:
        return Mesh(np.asarray(devices).reshape(shape), tuple(degrees), axis_types=kinds)
    return jax.make_mesh(shape, tuple(degrees), axis_types=kinds)


def _fill(degrees: dict[str, int], count: int) -> dict[str, int]:
    free = [name for name, degree in degrees.items() if degree == -1]
    if len(free) > 1 or any(degree < 1 and degree != -1 for degree in degrees.values()):
        raise ValueError(f"mesh degrees must be at least 1, with at most one -1; got {degrees}")
    known = int(np.prod([degree for degree in degrees.values() if degree != -1]))
    if free and count % known == 0:
        degrees = degrees | {free[0]: count // known}
        known = count
    if known != count:
        raise ValueError(
            f"the mesh {degrees} needs {'a multiple of ' if free else ''}{known} devices, but there are {count}; "
            "change a degree, let one be -1, or pass devices="
        )
    return degrees
