"""Layouts (a mesh and the strategies that use it), and the layout in use."""

import dataclasses
import difflib
import functools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.sharding import _rules
from maxlib.sharding._axes import Name, Table, check_axes, mesh_axes_of
from maxlib.sharding._experts import ExpertParallel
from maxlib.sharding._layer_axes import is_stacked, own_axes
from maxlib.sharding._mesh import MeshDegrees
from maxlib.sharding._offload import HOST, Offload
from maxlib.sharding._pipeline import Pipeline
from maxlib.sharding._presets import FSDP_TP
from maxlib.sharding._strategy import Strategy, join, parts_of, rules_of

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """A mesh and the strategy that uses it; the one argument of everything that places arrays.

    Layouts are hashable, and the one in use is part of `jit`'s cache key. A mesh axis of several devices that no rule
    and no strategy names is a warning: its devices would repeat each other's work.

    Args:
      mesh: a mesh of devices; with an abstract one programs can be traced, not run. The degrees of one as a mapping,
        `{"fsdp": -1, "tensor": 4}`, are a layout for any devices: plans take it, and `layout.on(devices)` places it.
      strategy: strategies joined by `|`, or a table of plain rules; stored as a `Strategy`.

    Raises:
      TypeError: when `mesh` is not a mesh, or `strategy` neither a strategy nor a table.
      ValueError: when a rule names an axis that is not declared or that the mesh does not have, or when strategies
        do not go together, or not with the devices.
    """

    mesh: Any  # AnyMesh | MeshDegrees, or a mapping that becomes one
    strategy: Strategy | Table = FSDP_TP

    def __post_init__(self):
        if isinstance(self.mesh, Mapping):
            object.__setattr__(self, "mesh", MeshDegrees.of(self.mesh))
        if not isinstance(self.mesh, AnyMesh | MeshDegrees):
            raise TypeError(f"a layout's mesh must be a mesh, got {self.mesh!r}; sharding.make_mesh(fsdp=-1) makes one")
        object.__setattr__(self, "strategy", join(self.strategy))
        for name, place in self.rules.items():
            _check_axes_of(self.mesh, name, place)
        for one in self.strategies if isinstance(self.mesh, AnyMesh) else ():
            one.check(self.mesh, self.strategies)
        if isinstance(self.mesh, Mesh) and (idle := self._idle_axes()):
            warnings.warn(
                f"nothing is split over {' and '.join(idle)} of the mesh {dict(self.mesh.shape)}: these devices repeat each "
                "other's work. Join a strategy that uses them, such as FSDP | TP, or make the mesh without them",
                stacklevel=3,
            )

    def _idle_axes(self) -> list[str]:
        """Returns the mesh axes of more than one device that no rule and no strategy names."""
        named = {axis for place in self.rules.values() for axis in mesh_axes_of(place)}
        for strategy in self.strategies:
            fields = dataclasses.fields(strategy) if dataclasses.is_dataclass(strategy) else ()
            named |= {value for field in fields if isinstance(value := getattr(strategy, field.name), str)}
        return [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in named]

    def on(self, devices: Sequence[Any]) -> "Layout":
        """Returns a layout of given degrees with a mesh over devices.

        Args:
          devices: such as `jax.devices()`, or those of a described topology.

        Raises:
          ValueError: when the degrees do not fit the devices, or when the layout has a mesh already.
        """
        if not isinstance(self.mesh, MeshDegrees):
            raise ValueError(f"this layout has a mesh already: {self.mesh}")
        return Layout(self.mesh.make(devices), self.strategy)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.strategy))

    def __hash__(self) -> int:
        return self._hash

    def __or__(self, other: Strategy | Table) -> "Layout":
        """Returns this layout with more strategies or rules."""
        return Layout(self.mesh, join(self.strategy, other))

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Lists the strategies that were joined, in the order in which they apply."""
        return parts_of(self.strategy)

    @functools.cached_property
    def rules(self) -> Table:
        """Rules from axis name to a mesh axis, several, `IfFree`, or None; axes without a rule are whole."""
        return rules_of(join(self.strategy))

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, if the mesh has more than one stage."""
        found = self._find(Pipeline)
        return found if found is not None and self.mesh.shape[found.axis] > 1 else None

    @property
    def experts(self) -> ExpertParallel | None:
        """The expert parallelism, if there is one."""
        return self._find(ExpertParallel)

    @property
    def offload(self) -> Offload:
        """The arrays that are stored in the host's memory; none by default."""
        return self._find(Offload) or Offload()

    def _find(self, kind: type) -> Any:
        return next((one for one in self.strategies if isinstance(one, kind)), None)

    def axis_size(self, name: str) -> int:
        """Returns the number of parts into which the axis `name` is split."""
        return _rules.parts(self.rules.get(name), self.mesh)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that split the axis `name`."""
        return tuple(axis for axis in mesh_axes_of(self.rules.get(name)) if self.mesh.shape[axis] > 1)

    def spec(self, *names: Name, what: str = "array") -> P:
        """Returns the partition spec of an array whose dimensions have these names.

        Args:
          names: one for each dimension, None for one that is whole.
          what: description of the array, for error messages.

        Raises:
          ValueError: for a name that is not declared, or when two names use the same mesh axis.
        """
        return _rules.spec(names, self.rules, what=what)

    def parameter_spec(self, names: tuple[str | None, ...], shape: tuple[int, ...], *, path: str = "array") -> P:
        """Returns the partition spec of a parameter: that of the rules, changed by strategies such as `Pipeline`.

        Args:
          names: one for each dimension, None for one that is whole; `()` for a parameter without names.
          shape: its shape.
          path: its dotted path in the model.

        Raises:
          ValueError: when the number of names is neither 0 nor the rank; and as `spec` does.
        """
        if names and len(names) != len(shape):
            raise ValueError(f"{path}: its axes {names} must name each dimension of its shape {shape}, None for some")
        own = self.spec(*names, what=path)
        place = lambda own, one: one.place_parameter(own, names, shape, path, self.mesh)
        return functools.reduce(place, self.strategies, own)

    def optimizer_spec(self, names: tuple[str | None, ...], shape: tuple[int, ...], *, path: str = "array") -> P:
        """Returns the partition spec of the optimizer's arrays for a parameter: its moments, and the gradient it reads.

        This is the parameter's own spec, unless a strategy (`ShardOptimizer`) splits it further.

        Args:
          names: the parameter's axis names.
          shape: its shape.
          path: its dotted path in the model.
        """
        own = self.parameter_spec(names, shape, path=path)
        return functools.reduce(lambda own, one: one.place_optimizer(own, shape, self.mesh), self.strategies, own)

    def sharding(self, path: str, variable: nnx.Variable) -> NamedSharding:
        """Returns the sharding of a parameter, by its axis names; in the host's memory if the layout offloads it.

        Args:
          path: its dotted path in the model.
          variable: the parameter, with `axes` in its metadata.

        Raises:
          ValueError: when a mesh axis does not divide a dimension; the message names the parameter.
        """
        names, shape = variable.get_metadata().get("axes", ()), variable.get_value().shape
        own = self.parameter_spec(names, shape, path=path)
        _, uneven = _rules.drop_uneven(own, shape, self.mesh)
        if uneven:
            name = names[uneven[0]]
            raise ValueError(
                f"{path}: axis {name!r} of size {shape[uneven[0]]} does not divide over {own[uneven[0]]!r} of the mesh "
                f"{dict(self.mesh.shape)}; change the mesh, or take rules with {name!r}: None"
            )
        is_layers = is_stacked(names) and len(own_axes(names)) > 1  # matrices; vectors such as scales of norms stay
        return NamedSharding(self.mesh, own, memory_kind=HOST if is_layers and self.offload.layers else None)


def _check_axes_of(mesh: Any, name: str, place: Any) -> None:
    """Raises ValueError when a rule is for an array axis that nobody declared, or names a mesh axis that is missing."""
    check_axes((name,), f"rule {name!r} -> {place!r}")
    for axis in mesh_axes_of(place):
        if axis not in mesh.axis_names:
            close = difflib.get_close_matches(axis, mesh.axis_names, 1)
            meant = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(
                f"rule {name!r} -> {place!r} names the mesh axis {axis!r}, but the mesh has {mesh.axis_names}{meant}; "
                "build it with sharding.make_mesh, or take rules that fit it"
            )


# Part of jit's cache key: a plain context variable would let a second layout reuse the first one's program.
_context = jax.make_user_context(None)
_stage = jax.make_user_context(False)


@contextmanager
def use(layout: Layout) -> Iterator[None]:
    """Makes a layout the one in use, as a context manager: `constrain` and the layers' kernels follow it inside.

    With a pipeline, work outside the stages splits the batch over them, unless another rule uses their mesh axis.

    Args:
      layout: the layout. With an abstract mesh, programs can be traced inside, not run.
    """
    mesh = layout.mesh
    if isinstance(mesh, MeshDegrees):
        raise mesh.without_devices()
    entered = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with entered, _context(_running(layout)):
        yield


@functools.lru_cache(maxsize=256)
def _running(layout: Layout) -> Layout:
    """Returns the layout of a running program, without devices: meshes of the same shape share programs."""
    mesh = layout.mesh.abstract_mesh if isinstance(layout.mesh, Mesh) else layout.mesh
    # Only rules that change are added, as plain rules: an unchanged layout stays equal to itself in jit's cache key.
    rules = functools.reduce(lambda rules, one: one.apply_running(rules), layout.strategies, layout.rules)
    changed = {name: place for name, place in rules.items() if layout.rules.get(name) != place}
    running = Layout(mesh, layout.strategy)
    return running | changed if changed else running


def current() -> Layout | None:
    """Returns the layout in use, on an abstract mesh; None outside `use`."""
    layout: Layout | None = _context.value
    if layout is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()  # inside `shard_map` some of its axes are manual
    return layout if layout.mesh == mesh else _on_mesh(layout, mesh)


@functools.lru_cache(maxsize=256)
def _on_mesh(layout: Layout, mesh: AbstractMesh) -> Layout:
    return Layout(mesh, layout.strategy)


@contextmanager
def in_a_stage() -> Iterator[None]:
    """Takes the stages out of the rules for rows: inside a stage, the rows are those of its own microbatch."""
    layout = _context.value
    axis = layout.pipeline.axis
    several = {name: place for name, place in layout.rules.items() if isinstance(place, tuple) and axis in place}
    # {"batch": ("data", "fsdp", "stage")} -> {"batch": ("data", "fsdp")}
    without = {name: tuple(one for one in place if one != axis) for name, place in several.items()}
    with _context(layout | without), _stage(True):
        yield


def is_in_a_stage() -> bool:
    """Tells whether the code is being traced inside a stage of a pipeline (`in_a_stage`)."""
    return bool(_stage.value)


@contextmanager
def in_parts(axes: tuple[str, ...]) -> Iterator[None]:
    """Takes mesh axes out of the rule for the batch: inside, a batch is the part of one device of these axes."""
    layout = _context.value
    batch = tuple(axis for axis in mesh_axes_of(layout.rules.get("batch")) if axis not in axes)
    with _context(layout | {"batch": batch}):
        yield


def replicated_over() -> tuple[str, ...]:
    """Returns the mesh axes of more than one device that split the batch and nothing else; none without a layout."""
    # Weights are copied over these axes, so gradients could be summed once per step. They must be the batch's first
    # axes, as a part is a run of consecutive devices.
    if (layout := current()) is None:
        return ()
    batch = layout.mesh_axes("batch")
    others = {axis for name in layout.rules if name != "batch" for axis in layout.mesh_axes(name)}
    axes = tuple(axis for axis in batch if axis not in others)
    return axes if axes == batch[: len(axes)] else ()
