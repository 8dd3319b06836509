"""Constrains the sharding of activations and weights by their axis names, under the active layout."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
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
    specs = _specs(weight, names)
    return weight if specs is None else _moved(weight, specs[1])


def gather_rounded(weight: jax.Array, *names: Name, dtype: Any) -> jax.Array:
    """All-gathers a weight as `gather_once` does, rounded to 8 bits as `FullyShard.gather_dtype` says.

    Inside `jax.checkpoint` it is gathered again for the backward pass, and no device keeps it.

    Args:
        weight: The weight, as it is stored.
        names: Its axis names, one for each dimension.
        dtype: Dtype of the result.

    Raises:
        ValueError: for a name that is not declared.
    """
    specs, layout = _specs(weight, names), current()
    if specs is None or layout is None or layout.gather_dtype is None:
        return weight.astype(dtype)
    return _rounded_and_moved(weight, *specs, layout.gather_dtype, jnp.dtype(dtype))


def _specs(weight: jax.Array, names: tuple[Name, ...]) -> tuple[P, P] | None:
    """Returns the spec of a weight, and that without the axes of the batch; None if they are the same."""
    if (layout := current()) is None:
        check_axes(names, "gather_once")
        return None
    batch = mesh_axes_of(layout.rules.get("batch"))
    spec, _ = drop_uneven(layout.spec(*names, what=f"weight {weight.shape}"), weight.shape, layout.mesh)
    kept = partition([tuple(axis for axis in mesh_axes_of(place) if axis not in batch) or None for place in spec])
    return None if kept == partition([*spec]) else (spec, kept)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _moved(x: jax.Array, to: P) -> jax.Array:
    """Reshards x to another spec; the derivative is the identity, so the partitioner chooses the sharding of
    gradients.
    """
    return jax.lax.with_sharding_constraint(cast_before_moving(x), to)


@_moved.defjvp
def _(to, primals, tangents):
    return _moved(*primals, to), *tangents


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3, 4))
def _rounded_and_moved(x: jax.Array, stored: P, to: P, narrow: str, dtype: Any) -> jax.Array:
    """Rounds x where it is stored, moves the rounded values, and dequantizes them; the derivative is the identity."""
    before, after = ([*spec, *[None] * (x.ndim - len(spec))] for spec in (stored, to))
    split = [d for d in range(x.ndim) if before[d] != after[d]]
    others = tuple(d for d in range(x.ndim) if d not in split)
    x = x.astype(jnp.float32)
    # [D, F] -> [D, 1], where D is split: no device needs values of another.
    scale = jnp.max(jnp.abs(x), axis=others, keepdims=True) / float(jnp.finfo(narrow).max)
    scale = jnp.where(scale > 0, scale, 1.0)
    # As bytes, because not every backend sends floats of 8 bits as they are.
    bits = jax.lax.bitcast_convert_type((x / scale).astype(narrow), jnp.uint8)
    bits = jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(bits, stored), to)
    # Or the partitioner would split it again, and gather the dequantized weight.
    scale = jax.lax.with_sharding_constraint(scale, P(*(after[d] if d in split else None for d in range(x.ndim))))
    values = jax.lax.bitcast_convert_type(bits, jnp.dtype(narrow)).astype(jnp.float32)
    return jax.lax.with_sharding_constraint((values * scale).astype(dtype), to)


@_rounded_and_moved.defjvp
def _(stored, to, narrow, dtype, primals, tangents):
    return _rounded_and_moved(*primals, stored, to, narrow, dtype), tangents[0].astype(dtype)
