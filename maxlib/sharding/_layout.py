"""Layouts (a mesh and the strategies that use it), and the active layout."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.sharding import _rules
from maxlib.sharding._axes import AxisRules, Name, check_axes, is_stacked, mesh_axes_of, own_axes
from maxlib.sharding._mesh import MeshShape, check_mesh_axes
from maxlib.sharding._parallelism import HOST, ExpertParallel, FullyShard, Offload
from maxlib.sharding._pipeline import Pipeline
from maxlib.sharding._presets import FSDP_TP
from maxlib.sharding._sequence import ContextParallel, by_rules
from maxlib.sharding._strategy import Strategy, join, parts_of, rules_of

AnyMesh = Mesh | AbstractMesh


@dataclasses.dataclass(frozen=True)
class Layout:
    """A device mesh and its parallelism strategy: the single argument of every function that places arrays.

    Layouts are hashable, and the active one is part of `jit`'s cache key. A mesh axis of several devices that no rule
    and no strategy uses causes a warning, because its devices would repeat each other's work.

        layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP | sharding.OFFLOAD_OPTIMIZER)
        planned = sharding.Layout({"fsdp": -1, "context": 4}, sharding.FSDP | sharding.CP_RING)

    Args:
        mesh: A mesh of devices; programs can be traced with an abstract mesh, but not run. Or axis sizes such as
            `{"fsdp": -1, "tensor": 4}`, bound to devices later by `layout.on(devices)`; plans accept this form.
        strategy: Strategies combined with `|`, or a table of plain rules; stored as a `Strategy`. By default `FSDP_TP`.

    Raises:
        TypeError: when `mesh` is not a mesh, or `strategy` neither a strategy nor a table.
        ValueError: when a rule names an axis that is not declared or that the mesh does not have, or if strategies
            conflict with each other or with the mesh.
    """

    mesh: Any  # AnyMesh | MeshShape, or a mapping that becomes one
    strategy: Strategy | AxisRules = FSDP_TP

    def __post_init__(self):
        if isinstance(self.mesh, Mapping):
            object.__setattr__(self, "mesh", MeshShape.of(self.mesh))
        if not isinstance(self.mesh, AnyMesh | MeshShape):
            raise TypeError(
                f"a layout's mesh must be a mesh, got {self.mesh!r}; a layout is a mesh and a strategy, such as "
                "sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP)"
            )
        object.__setattr__(self, "strategy", join(self.strategy))
        for name, axes in self.rules.items():
            what = f"rule {name!r} -> {axes!r}"
            check_axes((name,), what)
            check_mesh_axes(mesh_axes_of(axes), what, self.mesh.axis_names)
        if isinstance(self.mesh, AnyMesh):
            for strategy in self.strategies:
                strategy.check(self.mesh, self.strategies)
        if isinstance(self.mesh, Mesh) and (idle := self._idle_axes()):
            warnings.warn(
                f"nothing is split over {' and '.join(idle)} of the mesh {dict(self.mesh.shape)}: these devices repeat "
                "each "
                "other's work. Add a strategy that uses them, such as FSDP | TP, or make the mesh without them",
                stacklevel=3,
            )

    def _idle_axes(self) -> list[str]:
        """Returns the mesh axes of size above 1 that no rule and no strategy uses."""
        named = {axis for axes in self.rules.values() for axis in mesh_axes_of(axes)}
        for strategy in self.strategies:
            fields = dataclasses.fields(strategy) if dataclasses.is_dataclass(strategy) else ()
            named |= {value for field in fields if isinstance(value := getattr(strategy, field.name), str)}
        return [axis for axis, size in self.mesh.shape.items() if size > 1 and axis not in named]

    def on(self, devices: Sequence[Any]) -> "Layout":
        """Returns this layout of axis sizes with a mesh over devices.

        Args:
            devices: Such as `jax.devices()`, or those of a described topology.

        Raises:
            ValueError: when the sizes do not fit the devices, or the layout already has a mesh.
        """
        if not isinstance(self.mesh, MeshShape):
            raise ValueError(f"this layout already has a mesh: {self.mesh}")
        return Layout(self.mesh.make(devices), self.strategy)

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.strategy))

    def __hash__(self) -> int:
        return self._hash

    def __or__(self, other: Strategy | AxisRules) -> "Layout":
        """Returns this layout with more strategies or rules."""
        return Layout(self.mesh, join(self.strategy, other))

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """Lists the combined strategies, in the order in which they apply."""
        return parts_of(self.strategy)

    @functools.cached_property
    def rules(self) -> AxisRules:
        """Rules from axis name to one or several mesh axes, `IfFree`, or None; axes without a rule are not split."""
        return rules_of(join(self.strategy))

    @property
    def pipeline(self) -> Pipeline | None:
        """The pipeline, if the mesh has more than one stage."""
        pipeline = self._find(Pipeline)
        return pipeline if pipeline is not None and self.mesh.shape[pipeline.axis] > 1 else None

    @property
    def gather_dtype(self) -> str | None:
        """Dtype to which weights are rounded for all-gathers (`FullyShard`); None does not round."""
        fsdp = self._find(FullyShard)
        return None if fsdp is None else fsdp.gather_dtype

    @property
    def experts(self) -> ExpertParallel | None:
        """The expert parallelism, if there is one."""
        return self._find(ExpertParallel)

    @property
    def sequence(self) -> ContextParallel | None:
        """How attention gets the keys of other devices if they split its sequences; plain rules count, too."""
        return by_rules(self.mesh_axes)

    @property
    def offload(self) -> Offload:
        """Which arrays are stored in host memory; none by default."""
        return self._find(Offload) or Offload()

    def _find(self, kind: type) -> Any:
        return next((strategy for strategy in self.strategies if isinstance(strategy, kind)), None)

    def axis_size(self, name: str) -> int:
        """Returns the number of parts into which the axis `name` is split."""
        return _rules.parts(self.rules.get(name), self.mesh)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of size above 1 that split the axis `name`."""
        return tuple(axis for axis in mesh_axes_of(self.rules.get(name)) if self.mesh.shape[axis] > 1)

    def spec(self, *names: Name, what: str = "array") -> P:
        """Returns the partition spec of an array whose dimensions have these names.

        Args:
            names: One for each dimension, None for a dimension that is not split.
            what: Description of the array, for error messages.

        Raises:
            ValueError: for a name that is not declared, or when two names use the same mesh axis.
        """
        return _rules.spec(names, self.rules, what=what)

    def parameter_spec(self, names: tuple[str | None, ...], shape: tuple[int, ...], *, path: str = "array") -> P:
        """Returns the partition spec of a parameter: the spec of the rules, changed by strategies such as `Pipeline`.

        Args:
            names: One for each dimension, None for one that is not split; `()` for a parameter without names.
            shape: Its shape.
            path: Its dotted path in the model.

        Raises:
            ValueError: when the number of names is neither 0 nor the rank; and as for `spec`.
        """
        if names and len(names) != len(shape):
            raise ValueError(
                f"{path}: axes {names} must have one entry per dimension of shape {shape}; use None for an unnamed one"
            )
        spec = self.spec(*names, what=path)
        for strategy in self.strategies:
            spec = strategy.parameter_spec(spec, names, shape, path, self.mesh)
        return spec

    def optimizer_spec(self, names: tuple[str | None, ...], shape: tuple[int, ...], *, path: str = "array") -> P:
        """Returns the partition spec of the optimizer's arrays for a parameter: its moments, and the gradient it reads.

        This is the parameter's own spec, unless a strategy (`ShardOptimizer`) splits it further.

        Args:
            names: The parameter's axis names.
            shape: Its shape.
            path: Its dotted path in the model.
        """
        spec = self.parameter_spec(names, shape, path=path)
        for strategy in self.strategies:
            spec = strategy.optimizer_spec(spec, shape, self.mesh)
        return spec

    def sharding(self, path: str, variable: nnx.Variable) -> NamedSharding:
        """Returns the sharding of a parameter by its axis names; in host memory if the layout offloads it.

        Args:
            path: Its dotted path in the model.
            variable: The parameter, with `axes` in its metadata.

        Raises:
            ValueError: when a mesh axis does not divide a dimension; the message names the parameter.
        """
        names, shape = variable.get_metadata().get("axes", ()), variable.get_value().shape
        spec = self.parameter_spec(names, shape, path=path)
        _, uneven = _rules.drop_uneven(spec, shape, self.mesh)
        if uneven:
            name, size, axes = names[uneven[0]], shape[uneven[0]], mesh_axes_of(spec[uneven[0]])
            raise ValueError(
                f"{path}: dimension {name!r} (size {size}) is not divisible by mesh {'axes' if len(axes) > 1 else 'axis'} "
                f"{' x '.join(map(repr, axes))} (size {math.prod(self.mesh.shape[axis] for axis in axes)}); change the mesh "
                f"or add the rule {{{name!r}: None}}"
            )
        # Only offload matrices; norm scales and other vectors stay on the device.
        on_host = self.offload.layers and is_stacked(names) and len(own_axes(names)) > 1
        return NamedSharding(self.mesh, spec, memory_kind=HOST if on_host else None)


def check_layout(layout: Any) -> None:
    """Raises TypeError unless `layout` is a `Layout`, or None.

    Args:
        layout: What was passed where a layout belongs, such as a mesh or a strategy alone.
    """
    if layout is None or isinstance(layout, Layout):
        return
    what = (
        "the mesh" if isinstance(layout, AnyMesh) else "the strategy" if isinstance(layout, Strategy) else "the value"
    )
    raise TypeError(
        f"layout must be a sharding.Layout, a mesh with a strategy, such as "
        f"sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP); got {what} {layout!r:.80} alone"
    )


# Part of jit's cache key: with a plain context variable a second layout would reuse the first one's program.
_context = jax.make_user_context(None)
_stage = jax.make_user_context(False)


@contextmanager
def use(layout: Layout) -> Iterator[None]:
    """Activates a layout, as a context manager: `constrain` and the layers' kernels follow it in the body.

    With a pipeline, computation outside the stages splits the batch over them, unless another rule uses their mesh
    axis.

        layout = sharding.Layout(sharding.make_mesh(fsdp=-1), sharding.FSDP)
        model = sharding.init_sharded(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)), layout)
        with sharding.use(layout):
            hidden = jax.jit(lambda model, tokens: model(tokens).hidden)(model, tokens)

    Args:
        layout: The layout. With an abstract mesh, programs can be traced but not run.
    """
    check_layout(layout)
    mesh = layout.mesh
    if isinstance(mesh, MeshShape):
        raise mesh.needs_devices_error()
    entered = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with entered, _context(_running(layout)):
        yield


@functools.lru_cache(maxsize=256)
def _running(layout: Layout) -> Layout:
    """Returns the layout of a running program without devices, so that meshes of the same shape share programs."""
    mesh = layout.mesh.abstract_mesh if isinstance(layout.mesh, Mesh) else layout.mesh
    # Only add changed rules, as plain rules, so that an unchanged layout stays equal in jit's cache key.
    rules = layout.rules
    for strategy in layout.strategies:
        rules = strategy.rules_in_jit(rules)
    changed = {name: axes for name, axes in rules.items() if layout.rules.get(name) != axes}
    running = Layout(mesh, layout.strategy)
    return running | changed if changed else running


def current() -> Layout | None:
    """Returns the active layout, on an abstract mesh; None outside `use`."""
    layout: Layout | None = _context.value
    if layout is None:
        return None
    mesh = jax.sharding.get_abstract_mesh()  # inside `shard_map` some of its axes are manual
    return layout if layout.mesh == mesh else _on_mesh(layout, mesh)


@functools.lru_cache(maxsize=256)
def _on_mesh(layout: Layout, mesh: AbstractMesh) -> Layout:
    return Layout(mesh, layout.strategy)


@contextmanager
def inside_stage() -> Iterator[None]:
    """Removes the stage axis from the batch rules: inside a stage, rows are those of its microbatch."""
    layout = _context.value
    stage = layout.pipeline.axis
    several = {name: axes for name, axes in layout.rules.items() if isinstance(axes, tuple) and stage in axes}
    # {"batch": ("data", "fsdp", "stage")} -> {"batch": ("data", "fsdp")}
    without = {name: tuple(axis for axis in axes if axis != stage) for name, axes in several.items()}
    with _context(layout | without), _stage(True):
        yield


def is_inside_stage() -> bool:
    """Returns True if code is being traced inside a pipeline stage (`inside_stage`)."""
    return bool(_stage.value)


@contextmanager
def inside_data_shard(axes: tuple[str, ...]) -> Iterator[None]:
    """Removes `axes` from the batch rule: in the body, the batch is one device's part along them."""
    layout = _context.value
    batch = tuple(axis for axis in mesh_axes_of(layout.rules.get("batch")) if axis not in axes)
    with _context(layout | {"batch": batch}):
        yield


def replicated_over() -> tuple[str, ...]:
    """Returns the mesh axes of size above 1 that only split the batch; none without a layout."""
    # Weights are replicated over these axes, so gradients can be summed once per step. They must be the batch's first
    # axes, because parts are consecutive: if a batch is split over (data, fsdp) and weights are replicated over data,
    # part i is the consecutive rows of data index i; with (fsdp, data) its rows would be scattered.
    if (layout := current()) is None:
        return ()
    batch = layout.mesh_axes("batch")
    others = {axis for name in layout.rules if name != "batch" for axis in layout.mesh_axes(name)}
    axes = tuple(axis for axis in batch if axis not in others)
    return axes if axes == batch[: len(axes)] else ()
