"""Device meshes with the axis names that the rule presets use."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

# From what talks least to what talks most: the last ones get the nearest neighbours.
MESH_AXES = ("stage", "data", "fsdp", "expert", "context", "tensor")


def make_mesh(
    *,
    data: int = 1,
    fsdp: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
    stage: int = 1,
    dcn: Mapping[str, int] | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Makes a mesh over devices. One of the degrees may be -1: it takes what the others leave.

    Args:
        data: replicas, which split the batch.
        fsdp: parts of parameters, which split the batch too.
        tensor: parts of heads, inner widths and the vocabulary.
        context: parts of a sequence.
        expert: parts of a mixture's experts.
        stage: stages of a pipeline.
        dcn: degrees across slices (TPU) or hosts (GPU), which a slower network joins, such as `{"data": -1}`; the other
            degrees are then those within one slice, and an axis has the product of its two.
        devices: to take (default: all); may be those of a described topology.

    Raises:
        ValueError: when the degrees do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    asked = dict(data=data, fsdp=fsdp, tensor=tensor, context=context, expert=expert, stage=stage)
    per_host, groups = _groups(devices, dcn)
    across = fill({axis: (dcn or {}).get(axis, 1) for axis in MESH_AXES}, groups, "slices")
    inside = fill({axis: asked[axis] for axis in MESH_AXES}, len(devices) // groups, "devices")
    if dcn:
        placed = mesh_utils.create_hybrid_device_mesh(
            tuple(inside.values()),
            tuple(across.values()),
            devices,
            process_is_granule=per_host,
            allow_split_physical_axes=True,
        )
    else:
        placed = mesh_utils.create_device_mesh(tuple(inside.values()), devices, allow_split_physical_axes=True)
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _groups(devices: list[Any], dcn: Mapping[str, int] | None) -> tuple[bool, int]:
    """Tells whether the slower network joins hosts (else slices), and how many of them `dcn` spreads over."""
    if unknown := set(dcn or {}) - set(MESH_AXES):
        raise ValueError(f"dcn names {sorted(unknown)}, but the axes of a mesh are {MESH_AXES}")
    slices = {getattr(device, "slice_index", 0) for device in devices}
    hosts = {device.process_index for device in devices}
    if not dcn and len(slices) > 1 and devices[0].platform == "tpu":
        raise ValueError(
            f"the devices lie in {len(slices)} slices, which a slower network joins: say which axis crosses it, "
            "for example make_mesh(fsdp=-1, dcn={'data': -1})"
        )
    per_host = len(slices) == 1
    return per_host, len(hosts if per_host else slices) if dcn else 1


def fill(degrees: dict[str, int], count: int, what: str) -> dict[str, int]:
    """Replaces -1 so that the degrees multiply to `count`. Raises ValueError when they cannot."""
    free = [name for name, degree in degrees.items() if degree == -1]
    shown = {name: degree for name, degree in degrees.items() if degree != 1}
    if len(free) > 1 or any(degree < 1 and degree != -1 for degree in degrees.values()):
        raise ValueError(f"mesh degrees must be at least 1, with at most one -1; got {shown}")
    known = prod(degree for degree in degrees.values() if degree != -1)
    if free and count % known == 0:
        return degrees | {free[0]: count // known}
    if free or known != count:
        raise ValueError(
            f"the mesh {shown} needs {'a multiple of ' if free else ''}{known} {what}, but there are {count}; "
            "change a degree, let one be -1, or pass devices="
        )
    return degrees
