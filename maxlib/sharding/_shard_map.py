"""Runs an op on each device's own part of its arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import Table, check_axes, mesh_axes_of
from maxlib.sharding._layout import current
from maxlib.sharding._rules import drop_uneven, resolve, spec

LANES = 128  # entries of a TPU's vector register
Names = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class AllGatherArg:
    """An argument that lies by the names `kept` and is worked on by the names `wanted`.

    A device gathers what it lacks; of the gradient it gets its own part of the sum, never the whole.
    """

    kept: Names
    wanted: Names


def gathers_odd_parts(names: AllGatherArg, shape: Sequence[int]) -> bool:
    """Returns whether a device lacks parts of the last dimension, and they fill no whole registers.

    Parts of whole registers (of 128 entries) lie side by side as they arrive. Others have to be copied.
    """
    if (layout := current()) is None:
        return False
    kept, wanted = _places(names, lambda own: spec(own, layout.rules))
    size = lambda axes: math.prod(layout.mesh.shape[axis] for axis in axes)
    last = len(shape) - 1
    lacking = _axes(kept, last)[len(_axes(wanted, last)) :]
    return size(lacking) > 1 and shape[last] // size(_axes(kept, last)) % LANES != 0


def shard_map_by_name(
    op: Callable[..., Any],
    in_names: Sequence[Names | AllGatherArg | None],
    out_names: Any,
    *,
    changes: Table | None = None,
) -> Callable[..., Any]:
    """Wraps `op` in `jax.shard_map`, its arrays split by axis names as the layout in use says.

    Without a layout it runs `op` itself. An axis with an `IfFree` place takes what no axis of any array here takes. A
    name takes those of its mesh axes only that divide it in every argument, so that all parts match.

    Args:
        op: runs on each device's own parts.
        in_names: of each argument a tuple of axis names, or `AllGatherArg`; None for an argument that is None.
        out_names: a pytree of name tuples.
        changes: replace some of the rules in use, for this call.

    Raises:
        ValueError: when it is called, for a name that nobody declared.
    """

    def run(*args):
        names = _flat(in_names, out_names)
        check_axes(names, "shard_map_by_name")
        if (layout := current()) is None:
            return op(*args)
        mesh = layout.mesh
        rules = _dividing(args, in_names, mesh, resolve(names, {**layout.rules, **(changes or {})}))
        place = lambda names: spec(names, rules)
        pairs = enumerate(zip(args, in_names, strict=True))
        present = [(i, a, _places(n, place)) for i, (a, n) in pairs if a is not None and n is not None]
        in_specs = tuple(kept for _, _, (kept, _) in present)
        out_specs = jax.tree.map(place, out_names, is_leaf=_is_names)

        def local(*parts):
            full = list(args)
            for (i, _, places), part in zip(present, parts, strict=True):
                full[i] = _gather(part, *places)
            return op(*full)

        # Varying-axis checks reject custom kernels, which do not say over which axes their results vary.
        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*[a for _, a, _ in present])

    return run


def _places(names: Names | AllGatherArg, place: Callable[[Names], P]) -> tuple[P, P]:
    """Returns how an argument comes in, and how the op wants it."""
    if not isinstance(names, AllGatherArg):
        return place(names), place(names)
    kept, wanted = place(names.kept), place(names.wanted)
    rank = len(names.kept)
    begins = all(_axes(kept, d)[: len(_axes(wanted, d))] == _axes(wanted, d) for d in range(rank))
    return (kept if begins else wanted), wanted


def _gather(x: jax.Array, kept: P, wanted: P) -> jax.Array:
    for d in range(len(kept)):
        lacking = tuple(axis for axis in _axes(kept, d)[len(_axes(wanted, d)) :] if lax.axis_size(axis) > 1)
        if lacking:
            # Over the last dimension TPUs gather by making it the first: of a stack's layers that would be a copy of
            # all.
            last = d > 0 and d == x.ndim - 1
            x = jnp.swapaxes(x, d, d - 1) if last else x
            x = lax.all_gather(x, lacking, axis=d - last, tiled=True)
            x = jnp.swapaxes(x, d, d - 1) if last else x
    return x


def _axes(place: P, d: int) -> tuple[str, ...]:
    return mesh_axes_of(place[d] if d < len(place) else None)


def _each(names: Names | AllGatherArg | None) -> list[Names]:
    return [] if names is None else [names.kept, names.wanted] if isinstance(names, AllGatherArg) else [names]


def _flat(in_names, out_names) -> list[Any]:
    groups = [one for names in in_names for one in _each(names)] + jax.tree.leaves(out_names, is_leaf=_is_names)
    return [name for names in groups for name in names]


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def _dividing(args, in_names, mesh, rules):
    rules = dict(rules)
    for arg, names in zip(args, in_names, strict=True):
        if arg is not None:
            for one in _each(names):
                fitting, uneven = drop_uneven(spec(one, rules), arg.shape, mesh)
                rules.update({one[d]: fitting[d] for d in uneven})
    return rules
