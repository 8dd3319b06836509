"""Activations and weights placed by their axis names, as the layout in use says."""

from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import Name, check_axes, mesh_axes_of
from maxlib.sharding._layout import current
from maxlib.sharding._rules import drop_uneven, partition


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the mesh axes of more than one device that split the axis `name`; none without a layout.

    Raises:
        ValueError: for a name that nobody declared.
    """
    check_axes((name,), "mesh_axes")
    return () if (layout := current()) is None else layout.mesh_axes(name)


def axis_size(name: str) -> int:
    """Returns into how many parts the layout in use splits the axis `name`; 1 without one.

    Raises:
        ValueError: for a name that nobody declared.
    """
    check_axes((name,), "axis_size")
    return 1 if (layout := current()) is None else layout.axis_size(name)


def axis_of(name: str) -> str | None:
    """Returns the one mesh axis over which a kernel talks that splits `name`; None if nothing does.

    Raises:
        ValueError: for several, and for a name that nobody declared.
    """
    if len(split := mesh_axes(name)) > 1:
        raise ValueError(f"{name!r} can be split over one mesh axis only, but its rule names {split}")
    return split[0] if split else None


def constrain(x: jax.Array, *names: Name) -> jax.Array:
    """Places an activation by its axis names; without a layout in use it returns `x` as it is.

    Of its mesh axes a dimension takes the first ones that divide it: a batch of one, at decoding, stays whole.

    Args:
        x: the activation.
        names: one for each axis; None for one that is whole.

    Raises:
        ValueError: for another number of names than axes, and for a name that nobody declared, with or without a
            layout.
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"constrain needs one name (or None) per axis: got {names} for shape {x.shape}. Is the axis of the batch missing?"
        )
    if (layout := current()) is None:
        check_axes(names, "constrain")
        return x
    own, _ = drop_uneven(layout.spec(*names, what=f"activation {x.shape}"), x.shape, layout.mesh)
    return jax.lax.with_sharding_constraint(x, own)


def gather_once(weight: jax.Array, *names: Name) -> jax.Array:
    """Gathers `weight`, in the dtype in which it travels, over the mesh axes that split the batch.

    What the partitioner gathers by itself it gathers again for a use that is far away in the program, as the backward
    pass of a layer is. Gradients stay where the partitioner wants them.
    """
    if (layout := current()) is None:
        check_axes(names, "gather_once")
        return weight
    batch = mesh_axes_of(layout.rules.get("batch"))
    own, _ = drop_uneven(layout.spec(*names, what=f"weight {weight.shape}"), weight.shape, layout.mesh)
    kept = partition([tuple(axis for axis in mesh_axes_of(place) if axis not in batch) or None for place in own])
    return weight if kept == own else _moved(weight, kept)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _moved(x: jax.Array, to: P) -> jax.Array:
    """Behind a barrier: else the compiler moves what was cast as float32, and casts it there."""
    return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(x), to)


@_moved.defjvp
def _(to, primals, tangents):
    return _moved(*primals, to), *tangents
