"""`jax.shard_map` by axis names: runs an op on each device's part of its arrays."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import AxisRules, check_axes, mesh_axes_of
from maxlib.sharding._layout import current
from maxlib.sharding._rules import drop_uneven, resolve, spec

LANES = 128  # entries in a row of a TPU's vector register
Names = tuple[str | None, ...]


@dataclasses.dataclass(frozen=True)
class AllGatherArg:
    """An argument that is stored with one sharding and used with another.

    Each device all-gathers the missing parts. The gradient is reduce-scattered: each device gets its part of the sum,
    and no device has the whole sum.

    Args:
        kept: Axis names of the stored argument.
        wanted: Axis names of the argument inside the op.
    """

    kept: Names
    wanted: Names


def gathers_odd_parts(names: AllGatherArg, shape: Sequence[int]) -> bool:
    """Returns True if the last dimension is gathered in parts that are not whole TPU registers.

    Args:
        names: The axis names of the argument.
        shape: Its whole shape.
    """
    # Parts of whole registers (128 entries) are stored next to each other as they arrive; others need another copy.
    if (layout := current()) is None:
        return False
    kept, wanted = _places(names, lambda axes: spec(axes, layout.rules))

    def size(axes):
        return math.prod(layout.mesh.shape[axis] for axis in axes)

    last = len(shape) - 1
    lacking = _axes(kept, last)[len(_axes(wanted, last)) :]  # those over which it is gathered
    return size(lacking) > 1 and shape[last] // size(_axes(kept, last)) % LANES != 0


def shard_map_by_name(
    op: Callable[..., Any],
    in_names: Sequence[Names | AllGatherArg | None],
    out_names: Any,
    *,
    changes: AxisRules | None = None,
) -> Callable[..., Any]:
    """Wraps `op` in `jax.shard_map`, with arrays split by axis names under the active layout.

    Without a layout it calls `op` directly. An `IfFree` rule gets the mesh axes that no other axis of any array of this
    call uses. A name only keeps the mesh axes that divide it in every argument, so that all parts match.

    Args:
        op: The function to run on each device's parts.
        in_names: A tuple of axis names or `AllGatherArg` for each argument; None for an argument that is None.
        out_names: A pytree of name tuples, one for each result.
        changes: Rules that replace the active ones for this call.

    Returns:
        A function of the whole arrays.

    Raises:
        ValueError: when the function is called, for a name that is not declared.
    """

    def run(*args):
        names = _flat(in_names, out_names)
        check_axes(names, "shard_map_by_name")
        if (layout := current()) is None:
            return op(*args)
        mesh = layout.mesh
        # One decision per name for the whole call: for example, queries and keys must be split by heads in the same
        # way.
        rules = _dividing(args, in_names, mesh, resolve(names, {**layout.rules, **(changes or {})}))

        def place(names):
            return spec(names, rules)

        pairs = enumerate(zip(args, in_names, strict=True))
        # shard_map only takes arrays: insert arguments that are None again inside.
        present = [(i, a, _places(n, place)) for i, (a, n) in pairs if a is not None and n is not None]
        in_specs = tuple(kept for _, _, (kept, _) in present)
        out_specs = jax.tree.map(place, out_names, is_leaf=_is_names)

        def local(*parts):
            full = list(args)
            for (i, _, places), part in zip(present, parts, strict=True):
                full[i] = _gather(part, *places)
            return op(*full)

        # Custom kernels do not declare the axes over which their results vary, so the check (vma) would reject them.
        mapped = jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped(*[a for _, a, _ in present])

    return run


def _places(names: Names | AllGatherArg, place: Callable[[Names], P]) -> tuple[P, P]:
    """Returns the spec of an argument at the call, and its spec inside the op."""
    if not isinstance(names, AllGatherArg):
        return place(names), place(names)
    kept, wanted = place(names.kept), place(names.wanted)
    rank = len(names.kept)
    # An all-gather joins parts over the last mesh axes of a dimension: ("tensor", "fsdp") can be gathered to
    # ("tensor",), but ("fsdp", "tensor") cannot. In that case XLA reshards the argument before the call.
    begins = all(_axes(kept, d)[: len(_axes(wanted, d))] == _axes(wanted, d) for d in range(rank))
    return (kept if begins else wanted), wanted


def _gather(x: jax.Array, kept: P, wanted: P) -> jax.Array:
    """All-gathers each dimension over the mesh axes of `kept` that are not in `wanted`."""
    for d in range(len(kept)):
        lacking = tuple(axis for axis in _axes(kept, d)[len(_axes(wanted, d)) :] if lax.axis_size(axis) > 1)
        if lacking:
            # TPUs gather over the last dimension by moving it to the front. For a weight sliced from a stack, XLA would
            # transpose the whole stack; gathering over the second to last dimension avoids this copy.
            last = d > 0 and d == x.ndim - 1
            x = jnp.swapaxes(x, d, d - 1) if last else x
            x = lax.all_gather(x, lacking, axis=d - last, tiled=True)
            x = jnp.swapaxes(x, d, d - 1) if last else x
    return x


def _axes(place: P, d: int) -> tuple[str, ...]:
    """Returns the mesh axes of dimension `d`; a spec may be shorter than the array's rank."""
    return mesh_axes_of(place[d] if d < len(place) else None)


def _each(names: Names | AllGatherArg | None) -> list[Names]:
    """Lists the name tuples of an argument: zero, one or two."""
    if names is None:
        return []
    return [names.kept, names.wanted] if isinstance(names, AllGatherArg) else [names]


def _flat(in_names, out_names) -> list[Any]:
    """Lists all names of arguments and results."""
    groups = [axes for names in in_names for axes in _each(names)] + jax.tree.leaves(out_names, is_leaf=_is_names)
    return [name for names in groups for name in names]


def _is_names(x: Any) -> bool:
    return isinstance(x, tuple) and all(name is None or isinstance(name, str) for name in x)


def _dividing(args, in_names, mesh, rules):
    """Returns the rules without mesh axes that fail to divide their dimension in some argument."""
    rules = dict(rules)
    for arg, names in zip(args, in_names, strict=True):
        if arg is not None:
            for axes in _each(names):
                fitting, uneven = drop_uneven(spec(axes, rules), arg.shape, mesh)
                rules.update({axes[d]: fitting[d] for d in uneven})
    return rules
