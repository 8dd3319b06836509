"""Constrains the sharding of activations and weights by their axis names, under the active layout."""

from functools import partial

import jax
from jax.sharding import PartitionSpec as P

from maxlib._xla_workarounds import cast_before_moving
from maxlib.sharding._axes import Name, check_axes, mesh_axes_of
from maxlib.sharding._layout import current
from maxlib.sharding._rules import drop_uneven, partition


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the mesh axes of size above 1 that split an axis; none without a layout.

    Args:
        name: The axis of an array, such as "batch".

    Raises:
        ValueError: for a name that is not declared.
    """
    check_axes((name,), "mesh_axes")
    return () if (layout := current()) is None else layout.mesh_axes(name)


def axis_size(name: str) -> int:
    """Returns the number of parts into which the active layout splits an axis; 1 without a layout.

    Args:
        name: The axis of an array, such as "batch".

    Raises:
        ValueError: for a name that is not declared.
    """
    check_axes((name,), "axis_size")
    return 1 if (layout := current()) is None else layout.axis_size(name)


def axis_of(name: str) -> str | None:
    """Returns the single mesh axis that splits an axis, for kernels that communicate over it; None if it is not split.

    Args:
        name: The axis of an array, such as "kv_seq".

    Raises:
        ValueError: when several mesh axes split it, or for a name that is not declared.
    """
    if len(split := mesh_axes(name)) > 1:
        raise ValueError(f"{name!r} can be split over one mesh axis only, but its rule names {split}")
    return split[0] if split else None


def constrain(x: jax.Array, *names: Name) -> jax.Array:
    """Constrains an activation's sharding by its axis names; returns `x` unchanged without an active layout.

    A dimension only uses the leading mesh axes that divide it: a batch of one, as in decoding, is not split.

    Args:
        x: The activation.
        names: One for each dimension, None for a dimension that is not split; for example `"batch", "seq",
            "act_embed"`.

    Raises:
        ValueError: when the number of names is not the rank of x, or for a name that is not declared, with or without a
            layout.
    """
    if len(names) != x.ndim:
        raise ValueError(
            f"constrain needs one name (or None) per axis: got {names} for shape {x.shape}. Is the batch axis missing?"
        )
    check_axes(names, "constrain")
    if (layout := current()) is None:
        return x
    spec, _ = drop_uneven(layout.spec(*names, what=f"activation {x.shape}"), x.shape, layout.mesh)
    return jax.lax.with_sharding_constraint(x, spec)


def gather_once(weight: jax.Array, *names: Name) -> jax.Array:
    """All-gathers a weight over the mesh axes that split the batch (FSDP), once for all its uses.

    Args:
        weight: The weight, in the dtype in which to communicate it.
        names: Its axis names, one for each dimension.

    Raises:
        ValueError: for a name that is not declared.
    """
    # By default the partitioner gathers a weight again for each distant use in the program, such as the backward pass
    # of its layer. Only gather over the batch's axes; splits by tensor parallelism remain.
    if (layout := current()) is None:
        check_axes(names, "gather_once")
        return weight
    batch = mesh_axes_of(layout.rules.get("batch"))
    spec, _ = drop_uneven(layout.spec(*names, what=f"weight {weight.shape}"), weight.shape, layout.mesh)
    kept = partition([tuple(axis for axis in mesh_axes_of(place) if axis not in batch) or None for place in spec])
    return weight if kept == partition([*spec]) else _moved(weight, kept)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _moved(x: jax.Array, to: P) -> jax.Array:
    """Reshards x to another spec; the derivative is the identity, so the partitioner chooses the sharding of
    gradients.
    """
    return jax.lax.with_sharding_constraint(cast_before_moving(x), to)


@_moved.defjvp
def _(to, primals, tangents):
    return _moved(*primals, to), *tangents
