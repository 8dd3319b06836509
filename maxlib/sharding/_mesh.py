"""Device meshes with the axis names of the presets."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, ClassVar

import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

# Ordered from least to most communication, because devices adjacent on the last axes have the fastest links. Tensor
# parallelism sums activations in every layer; a pipeline sends them once per tick.
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
    **unknown: int,
) -> Mesh:
    """Makes a mesh over devices. One of the degrees may be -1, which uses all remaining devices.

    Args:
        data: Replicas, which split the batch.
        fsdp: Number of parameter shards (FSDP); also splits the batch.
        tensor: Number of parts of heads, inner widths and the vocabulary.
        context: Number of parts of a sequence.
        expert: Number of parts of the experts.
        stage: Number of pipeline stages.
        dcn: Degrees across slices (TPU) or hosts (GPU), which are connected by a slower network, such as `{"data":
            -1}`. The other degrees are then those within one slice, and the size of an axis is the product of both.
        devices: The devices to use (default: all); they may belong to an abstract topology.
        **unknown: Catches misspelt axis names for the error message.

    Raises:
        ValueError: for an unknown axis (the message suggests the closest one), when the product of the degrees is not
            the number of devices, or when devices of several TPU slices are used without `dcn`.
    """
    check_mesh_axes(unknown, "make_mesh")
    asked = {"data": data, "fsdp": fsdp, "tensor": tensor, "context": context, "expert": expert, "stage": stage}
    check_mesh_axes(dcn or {}, "dcn")
    if devices is None and dcn is None:
        _check_enough_devices(asked)
    devices = list(jax.devices() if devices is None else devices)
    _check_slices(devices, dcn)
    groups = _count_groups(devices) if dcn else 1
    what = "hosts" if len(_slices(devices)) == 1 else "slices"
    inside, across = MeshShape.of({**asked, "dcn": dcn}).sizes(len(devices), groups, what)
    if dcn:
        placed = mesh_utils.create_hybrid_device_mesh(
            tuple(inside.values()),
            tuple(across.values()),
            devices,
            process_is_granule=len(_slices(devices)) == 1,
            allow_split_physical_axes=True,
        )
    else:
        placed = mesh_utils.create_device_mesh(tuple(inside.values()), devices, allow_split_physical_axes=True)
    return Mesh(placed, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Degrees of a mesh whose devices are not known yet; `Layout.on` makes the mesh.

    Args:
        degrees: Pairs of a mesh axis and its degree; one of the degrees may be -1.
        dcn: Pairs for the slower network between slices or hosts.

    Raises:
        ValueError: for an unknown axis; the message suggests the closest one.
    """

    axis_names: ClassVar[tuple[str, ...]] = MESH_AXES
    degrees: tuple[tuple[str, int], ...]
    dcn: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        inside, across = self._by_axis
        check_mesh_axes(inside, "mesh")
        check_mesh_axes(across, "dcn")
        for axis, degree in (*self.degrees, *self.dcn):
            if isinstance(degree, bool) or not hasattr(degree, "__index__"):
                raise TypeError(f"the degree of mesh axis {axis!r} must be an integer, got {degree!r}")

    def sizes(self, devices: int, groups: int = 1, what: str = "slices") -> tuple[dict[str, int], dict[str, int]]:
        """Returns the degrees of all axes within a group of devices, and those across groups, without -1.

        Args:
            devices: The number of devices.
            groups: The number of slices or hosts that the slower network connects.
            what: "slices" or "hosts", for the message.

        Raises:
            ValueError: when the degrees do not fit these numbers.
        """
        inside, across = self._by_axis
        across = _resolve_free_degree({axis: across.get(axis, 1) for axis in MESH_AXES}, groups, what)
        inside = _resolve_free_degree({axis: inside.get(axis, 1) for axis in MESH_AXES}, devices // groups, "devices")
        return inside, across

    @property
    def _by_axis(self) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the degrees within a slice, and those across slices, by mesh axis."""
        return dict(self.degrees), dict(self.dcn)  # stored as pairs, which are hashable

    @classmethod
    def of(cls, degrees: Mapping[str, Any]) -> "MeshShape":
        """Reads the arguments of `make_mesh`, such as `{"fsdp": -1, "dcn": {"data": 2}}`."""
        inside = {axis: degree for axis, degree in degrees.items() if axis != "dcn"}
        return cls(tuple(inside.items()), tuple((degrees.get("dcn") or {}).items()))

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """Makes the mesh over devices; see `make_mesh`."""
        inside, across = self._by_axis
        return make_mesh(**inside, dcn=across or None, devices=devices)

    def abstract(self) -> AbstractMesh:
        """Makes an abstract mesh without devices, for descriptions.

        Raises:
            ValueError: when a degree is -1: resolving -1 needs the device count.
        """
        inside, across = self._by_axis
        if -1 in (*inside.values(), *across.values()):
            raise self.needs_devices_error()
        sizes = tuple(inside.get(axis, 1) * across.get(axis, 1) for axis in MESH_AXES)
        return AbstractMesh(sizes, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))

    @property
    def shape(self) -> Mapping[str, int]:
        """Raises ValueError, because sizes are only known once there are devices."""
        raise self.needs_devices_error()

    def needs_devices_error(self) -> ValueError:
        """Returns the error for a use that needs devices."""
        return ValueError(
            f"the mesh {dict(self.degrees)} has no devices yet: call layout.on(jax.devices()), or pass a mesh from "
            "sharding.make_mesh"
        )


def check_mesh_axes(names: Iterable[str], what: str, axes: Sequence[str] = MESH_AXES) -> None:
    """Raises ValueError for an unknown mesh axis, and suggests the closest one."""
    for name in names:
        if name not in axes:
            close = difflib.get_close_matches(name, axes, 1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"{what}: no mesh axis is named {name!r}{meant}; the axes are {', '.join(axes)}")


def parse_degrees(*words: str) -> dict[str, int]:
    """Reads the degrees of a mesh from a command line, such as `fsdp=-1,tensor=4`.

    Args:
        words: Texts with one or several `axis=number`, separated by commas.

    Raises:
        ValueError: for another form, an unknown axis, or an axis that is named twice.
    """
    parts = [part for word in words for part in word.split(",") if part]
    if wrong := [part for part in parts if not re.fullmatch(r"\w+=-?\d+", part)]:
        raise ValueError(f"expected axis=number, such as fsdp=-1; got {wrong[0]!r}")
    names = [part.partition("=")[0] for part in parts]
    check_mesh_axes(names, ",".join(parts))
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"a mesh must name an axis once; got {twice.pop()} twice, in {' '.join(parts)}")
    return {name: int(degree) for name, _, degree in (part.partition("=") for part in parts)}


def _slices(devices: list[Any]) -> set[int]:
    """Returns the TPU slices that the devices are in; a single one for other devices."""
    return {getattr(device, "slice_index", 0) for device in devices}


def _count_groups(devices: list[Any]) -> int:
    """Counts the groups connected by a slower network: slices, or the hosts of a single slice."""
    slices = _slices(devices)
    return len(slices) if len(slices) > 1 else len({device.process_index for device in devices})


def _check_slices(devices: list[Any], dcn: Mapping[str, int] | None) -> None:
    """Raises ValueError if devices of several TPU slices are used without `dcn`."""
    if not dcn and len(slices := _slices(devices)) > 1 and devices[0].platform == "tpu":
        raise ValueError(
            f"the devices span {len(slices)} slices joined by a slower network; choose the axis that spans slices, for "
            "example make_mesh(fsdp=-1, dcn={'data': -1})"
        )


def _check_enough_devices(asked: dict[str, int]) -> None:
    """Raises ValueError if a mesh needs more devices than a program of one process has; says how to simulate them."""
    needed, count = prod(degree for degree in asked.values() if degree > 0), jax.device_count()
    if needed > count and jax.process_count() == 1:
        shown = {name: degree for name, degree in asked.items() if degree != 1}
        cpu = "" if jax.default_backend() == "cpu" else "jax.config.update('jax_platforms', 'cpu') and "
        raise ValueError(
            f"the mesh {shown} needs {needed} devices or more, but JAX has {count}. To simulate them on the CPU, call "
            f"{cpu}jax.config.update('jax_num_cpu_devices', {needed}) directly after `import jax`"
        )


def _resolve_free_degree(degrees: dict[str, int], count: int, what: str) -> dict[str, int]:
    """Replaces -1 so that the product of the degrees is `count`.

    Args:
        degrees: From mesh axis to degree, at most one of them -1.
        count: The number of devices.
        what: "devices", "slices" or "hosts", for the message.

    Raises:
        ValueError: when no such number exists.
    """
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
