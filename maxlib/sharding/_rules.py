"""Layers name the axes of their arrays; a rules table says on which mesh axes those names live."""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from maxlib.sharding._pipeline_chunks import chunks
from maxlib.sharding._presets import ExpertExchange, IfFree, Memory, Name, Pipeline, Place, Rules

AnyMesh = Mesh | AbstractMesh
_MEMORIES = ("optimizer_memory", "layers_memory")
_PLACES = (str, tuple, list, IfFree)
_KINDS = {"layers": Pipeline, "act_expert": (*_PLACES, ExpertExchange)} | dict.fromkeys(_MEMORIES, Memory)
_LEAD = re.compile(r"(^|\.)lead\.\d+\.")  # of a stack: layers that run before the first stage

# Part of jit's cache key: a plain context variable would let a second mesh reuse the first one's program.
_context = jax.make_user_context(None)


def _freeze(rules: Rules) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(v) if isinstance(v, list) else v) for name, v in sorted(rules.items()))


@contextmanager
def use(mesh: AnyMesh, rules: Rules) -> Iterator[None]:
    """Inside, `constrain` and the layers' kernels follow `rules` on `mesh`; outside there is no mesh at all.

    On an abstract mesh programs can be traced, not run. With a `Pipeline`, what is not in a stage is split over the
    stages by rows of the batch, unless a rule gives them something else to split.
    """
    check(mesh, rules)
    entered = jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh)
    with entered, _context(_freeze(_rows_over_stages(rules))):
        yield


def _rows_over_stages(rules: Rules) -> Rules:
    pipeline = rules.get("layers")
    others = [place for name, place in rules.items() if name not in ("layers", "optimizer")]
    if not isinstance(pipeline, Pipeline) or any(pipeline.axis in _as_tuple(place) for place in others):
        return rules
    return {**rules, "batch": (*_as_tuple(rules.get("batch")), pipeline.axis)}


@contextmanager
def in_a_stage() -> Iterator[None]:
    """Inside, the stages of the pipeline in use share no rows: each has those of its own microbatch."""
    _, rules = current() or (None, {})
    axis = rules["layers"].axis
    without = lambda place: tuple(one for one in place if one != axis) if isinstance(place, tuple) else place
    with _context(_freeze({name: without(place) for name, place in rules.items()})):
        yield


def current() -> tuple[Any, dict[str, Any]] | None:
    """The (abstract) mesh and the rules in use, or None."""
    if _context.value is None:
        return None
    return jax.sharding.get_abstract_mesh(), dict(_context.value)


def check(mesh: AnyMesh, rules: Rules) -> None:
    """Raises ValueError when a rule names an axis that `mesh` does not have or a memory that its devices lack, or says
    what only another can, such as a `Pipeline`; TypeError for names in place of mesh or rules."""
    if isinstance(mesh, str):
        raise TypeError(f"mesh must be a mesh, got {mesh!r}; sharding.make_mesh(fsdp=-1) makes one of all devices")
    if isinstance(rules, str):
        raise TypeError(f"rules must be a table, got {rules!r}; sharding.preset({rules!r}) makes one of a name")
    for name, place in rules.items():
        _check_kind(name, place)
        if isinstance(place, Memory):
            _check_memory(mesh, rules, name)
        for axis in _as_tuple(place):
            if axis not in mesh.axis_names:
                raise ValueError(
                    f"rule {name!r} -> {place!r} names the mesh axis {axis!r}, but the mesh has {mesh.axis_names}; "
                    "build it with sharding.make_mesh, or take rules that fit it"
                )


def _check_kind(name: str, place: Any) -> None:
    if place is not None and not isinstance(place, _KINDS.get(name, _PLACES)):
        raise ValueError(
            "a rule names mesh axes, but for a few: a Pipeline such as Pipeline('stage', microbatches=8) is what the rule "
            "layers says, an ExpertExchange what act_expert may say, a Memory is what the rules "
            f"{' and '.join(_MEMORIES)} say, and nothing else; got {name!r} -> {place!r}"
        )


def _check_memory(mesh: AnyMesh, rules: Rules, name: str) -> None:
    if isinstance(rules.get("layers"), Pipeline):
        raise ValueError(
            f"{name!r}: what is taken from the host layer by layer cannot be cut into a pipeline's stages too"
        )
    if isinstance(mesh, Mesh):
        device: Any = next(iter(mesh.local_devices or mesh.devices.flat))
        kinds = sorted(memory.kind for memory in device.addressable_memories())
        if (kind := memory_kind(name, rules)) not in kinds:
            raise ValueError(
                f"rule {name!r} wants the memory {kind!r}, but {device.device_kind} has only {kinds}: leave {name!r} out "
                "of the rules"
            )


def memory_kind(name: str, rules: Rules) -> str | None:
    """What a `Memory` rule says; None is the devices' own."""
    memory = rules.get(name)
    return memory.kind if isinstance(memory, Memory) else None


def mesh_axes(name: str) -> tuple[str, ...]:
    """The mesh axes of more than one device over which the rules in use split the axis `name`; none without rules."""
    if (now := current()) is None:
        return ()
    mesh, rules = now
    return tuple(axis for axis in _as_tuple(rules.get(name)) if mesh.shape[axis] > 1)


def replicated_over() -> tuple[str, ...]:
    """The mesh axes of more than one device over which the rules in use split the batch and nothing that is trained;
    none where another axis of the batch comes first."""
    batch, rules = mesh_axes("batch"), (current() or (None, {}))[1]
    others = {axis for name in rules if name not in ("batch", "optimizer") for axis in mesh_axes(name)}
    axes = tuple(axis for axis in batch if axis not in others)
    return axes if axes == batch[: len(axes)] else ()


@contextmanager
def in_parts(axes: tuple[str, ...]) -> Iterator[None]:
    """Inside, the rules in use split a batch that is a part already: what lies on one device of these mesh axes."""
    _, rules = current() or (None, {})
    batch = tuple(axis for axis in _as_tuple(rules.get("batch")) if axis not in axes)
    with _context(_freeze({**rules, "batch": batch})):
        yield


def _as_tuple(place: Place | IfFree | Pipeline | ExpertExchange | Memory) -> tuple[str, ...]:
    if isinstance(place, Memory):
        return ()
    if isinstance(place, IfFree):
        place = place.axes
    elif isinstance(place, Pipeline | ExpertExchange):
        place = place.axis
    return () if place is None else (place,) if isinstance(place, str) else tuple(place)


def resolve(names: Iterable[Name], rules: Rules) -> dict[Any, Any]:
    """What `rules` say about these axes when they meet: a `IfFree` keeps the mesh axes that nobody else takes."""
    found = {name: _rule(name, rules) for name in names if name is not None}
    taken = {axis for place in found.values() if not isinstance(place, IfFree) for axis in _as_tuple(place)}
    spare = lambda place: tuple(axis for axis in _as_tuple(place) if axis not in taken) or None
    return {name: spare(place) if isinstance(place, IfFree) else place for name, place in found.items()}


def _rule(name: Name, rules: Rules) -> Any:
    if isinstance(name, IfFree):
        return IfFree(_as_tuple(rules.get(str(name.axes))))
    place = None if name is None else rules.get(name)
    return place.axis if isinstance(place, ExpertExchange) else place


def spec(names: tuple[Name, ...], rules: Rules, *, ndim: int | None = None, what: str = "array") -> P:
    """The partition spec of an array whose trailing dimensions bear `names`.

    A dimension before them, a stack's repeat axis, is split if the rule "layers" names a `Pipeline`. Raises ValueError
    when two names of one array land on one mesh axis; `what` says in the message which array it was.
    """
    settled = resolve(names, rules)
    places = [settled[name] if name is not None else None for name in names]
    used: dict[str, Name] = {}
    for name, place in zip(names, places, strict=True):
        for axis in _as_tuple(place):
            if axis in used:
                raise ValueError(
                    f"{what}: its axes {names} put {used[axis]!r} and {name!r} both on the mesh axis {axis!r}; "
                    f"an array can use a mesh axis once, so change one of the rules {dict(rules)}"
                )
            used[axis] = name
    lead = 0 if ndim is None or not names else ndim - len(names)
    repeats = [*_as_tuple(rules.get("layers"))] if lead == 1 else [None] * lead
    return _partition((repeats or [None]) + places if lead else places)


def _partition(places: list[Any]) -> P:
    """As XLA reports shardings, without what is whole at the end: jit compiles anew for P("x", None) after P("x")."""
    while places and places[-1] is None:
        places = places[:-1]
    return P(*places)


def parameter_spec(
    names: tuple[Name, ...], shape: tuple[int, ...], rules: Rules, mesh: Any, *, path: str = "array"
) -> P:
    """Where the parameter at `path`, of this shape, lives, as `spec` says.

    But for a stack whose stages do not hold equal, consecutive parts of it (`Pipeline.repeats`, or layers that the
    stages do not divide): its layers stay together, and the stages share the longest dimension that they divide. A
    stack's `lead` belongs to no stage.
    """
    rules = {**rules, "layers": None} if _LEAD.search(path) else rules
    pipeline = rules.get("layers")
    if not isinstance(pipeline, Pipeline) or not names or len(shape) != len(names) + 1:
        return spec(names, rules, ndim=len(shape), what=path)
    stages = mesh.shape[pipeline.axis]
    if stages == 1 or chunks(shape[0], stages, pipeline.repeats).in_order:
        return spec(names, rules, ndim=len(shape), what=path)
    own = spec(names, {**rules, "layers": None}, ndim=len(shape), what=path)
    return _split_further(own, shape, (pipeline.axis,), mesh)


def optimizer_spec(
    names: tuple[str | None, ...], shape: tuple[int, ...], rules: Rules, mesh: Any, *, path: str = "array"
) -> P:
    """Where the optimizer keeps what is like the parameter at `path` (moments, and the gradient it reads).

    That is the parameter's own place; the rule `optimizer` names mesh axes that split it further, along the longest
    dimension that they divide (ZeRO-1 is `{"optimizer": "data"}`).
    """
    own = parameter_spec(names, shape, rules, mesh, path=path)
    return _split_further(own, shape, _as_tuple(rules.get("optimizer")), mesh)


def _split_further(own: P, shape: tuple[int, ...], axes: tuple[str, ...], mesh: Any) -> P:
    """With those mesh axes that are not in use yet on the longest dimension that they divide."""
    used = {axis for place in own for axis in _as_tuple(place)}
    more = tuple(axis for axis in axes if axis not in used and mesh.shape[axis] > 1)
    places = [*own] + [None] * (len(shape) - len(own))
    part = [size // _size(mesh, place) for size, place in zip(shape, places, strict=True)]
    fitting = [d for d in range(len(shape)) if part[d] % prod(mesh.shape[axis] for axis in more) == 0]
    if more and fitting:
        longest = max(fitting, key=lambda d: part[d])
        places[longest] = (*_as_tuple(places[longest]), *more)
    return _partition(places)


def drop_uneven(partition: P, shape: tuple[int, ...], mesh: Any) -> tuple[P, list[int]]:
    """`partition` without the mesh axes that do not divide a dimension, and the indices of those dimensions.

    Of several axes the first ones stay that divide it.
    """
    places = [_dividing(_as_tuple(place), size, mesh) for place, size in zip(partition, shape, strict=False)]
    uneven = [d for d, place in enumerate(partition) if places[d] != _as_tuple(place)]
    return P(*[places[d] or None if d in uneven else place for d, place in enumerate(partition)]), uneven


def _dividing(axes: tuple[str, ...], size: int, mesh: Any) -> tuple[str, ...]:
    while size % _size(mesh, axes):
        axes = axes[:-1]
    return axes


def _size(mesh: Any, place: Any) -> int:
    size = 1
    for axis in _as_tuple(place):
        size *= mesh.shape[axis]
    return size


def axis_size(name: str) -> int:
    """Into how many parts the rules in use split the axis `name`; 1 without rules."""
    if (now := current()) is None:
        return 1
    mesh, rules = now
    return _size(mesh, rules.get(name))


def axis_of(name: str) -> str | None:
    """The one mesh axis over which a kernel talks that splits `name`, by the rules in use; None if nothing does."""
    if len(split := mesh_axes(name)) > 1:
        raise ValueError(f"{name!r} can be split over one mesh axis only, but its rule names {split}")
    return split[0] if split else None


def constrain(x: jax.Array, *names: Name) -> jax.Array:
    """Places an activation by its axis names; without `use(...)` it returns `x` as it is.

    Of its mesh axes a dimension takes the first ones that divide it: a batch of one, at decoding, stays whole.
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"constrain needs one name (or None) per axis: got {names} for shape {x.shape}. Is the axis of the batch missing?"
        )
    if (now := current()) is None:
        return x
    mesh, rules = now
    partition, _ = drop_uneven(spec(names, rules, what=f"activation {x.shape}"), x.shape, mesh)
    return jax.lax.with_sharding_constraint(x, partition)


def gather_once(weight: jax.Array, *names: Name) -> jax.Array:
    """`weight`, in the dtype in which it travels, whole over the mesh axes that split the batch, by its axis names.

    What the partitioner gathers by itself it gathers again for a use that is far away in the program, as the backward
    pass of a layer is. Gradients stay where the partitioner wants them.
    """
    if (now := current()) is None:
        return weight
    mesh, rules = now
    batch = _as_tuple(rules.get("batch"))
    own, _ = drop_uneven(spec(names, rules, what=f"weight {weight.shape}"), weight.shape, mesh)
    kept = [tuple(axis for axis in _as_tuple(place) if axis not in batch) or None for place in own]
    return weight if _partition(kept) == own else _moved(weight, _partition(kept))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _moved(x: jax.Array, to: P) -> jax.Array:
    """Behind a barrier: else the compiler moves what was cast as float32, and casts it there."""
    return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), to)


@_moved.defjvp
def _(to, primals, tangents):
    return _moved(*primals, to), *tangents
