"""What layers with a recurrent state or a short convolution share: split sequences, traffic, and initial values."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from maxlib.nn._initial_values import normal
from maxlib.nn._linear import draw_key
from maxlib.nn.decoder._context import Context
from maxlib.nn.mixer import SplitSequence, Traffic
from maxlib.sharding import constrain, current, shard_map_by_name
from maxlib.sharding.layers import AllGatherArg, mesh_axes

# Axis names of arrays with heads: of tokens, of the last inputs of a convolution, and of a state.
HEADS = ("batch", "seq", "act_heads", None)
TAIL = ("batch", None, "act_heads", None)
STATE = ("batch", "act_heads", None, None)
Named = tuple[Any, Any]
"""An array, or None, and the names of its axes, a tuple or an `AllGatherArg`."""


def over_sequence(
    op: Callable[..., Any],
    arrays: Sequence[Named],
    states: Sequence[Named],
    ctx: Context,
    *,
    out: tuple[str | None, ...] = HEADS,
) -> tuple[Array, list[Array] | None]:
    """Runs a recurrence on each device's rows, heads and tokens.

    Args:
        op: `op(*arrays, *states, is_start, valid, axis_name=) -> (y, *new states)` on one device's parts.
        arrays: Inputs and weights; the first one has tokens.
        states: What the cache has, None without one.
        ctx: Documents and padding.
        out: Axis names of `y`; the third one is that of heads or channels.

    Returns:
        `y`, and the new states; None without a cache.
    """
    axis, seq = _sequence_axis(arrays[0][0].shape[1], channels=str(out[2]))

    def here(names: Any) -> Any:
        return names if isinstance(names, AllGatherArg) else tuple(seq if name == "seq" else name for name in names)

    cached = any(state is not None for state, _ in states)
    # Without packing and without a cache, the state needs no resets.
    starts = ctx.is_start if ctx.packed or cached else None
    every = [*arrays, *states, (starts, out[:2]), (ctx.valid, out[:2])]
    names = [None if array is None else here(names) for array, names in every]
    mapped = shard_map_by_name(functools.partial(op, axis_name=axis), names, (here(out), *(n for _, n in states)))
    y, *new = mapped(*(array for array, _ in every))
    return constrain(y, *out), new if cached else None


def _sequence_axis(tokens: int, *, channels: str) -> tuple[str | tuple[str, ...] | None, str | None]:
    """Returns the mesh axis over which a row's tokens are split within an op, and the name of their array axis.

    Both are None if each device has whole rows: without a layout, or if the number of tokens does not divide.

    Args:
        tokens: Number of tokens of a row.
        channels: Name of the axis of heads or channels; the op uses its mesh axes for them, not for tokens.
    """
    axes = tuple(axis for axis in mesh_axes("seq") if axis not in mesh_axes(channels))
    layout = current()
    if layout is None or not axes or tokens % math.prod(layout.mesh.shape[axis] for axis in axes):
        return None, None
    return (axes[0] if len(axes) == 1 else axes), "seq"


def gathered_weight(weight: nnx.Param) -> Named:
    """Returns a filter, `heads H W`, and its axis names: gathered over everything but heads."""
    return jnp.asarray(weight[...]), AllGatherArg(weight.get_metadata()["axes"], ("act_heads", None, None))


def wide(x: Array) -> Array:
    """Casts to float32, unless `x` is wider."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def gather_traffic(split: SplitSequence, size: float) -> Traffic:
    """Returns the bytes that devices gather in a training step, given those of a row on one device."""
    total = split.rows * split.parts * size
    return {"all-gather": (split.passes - 1) * total, "reduce-scatter": total}


def taps(shape: tuple[int, ...], axes: tuple[str, ...], rngs: nnx.Rngs) -> nnx.Param:
    """Draws the filters of a convolution, `channels W`, with variance one over the number of taps.

    Args:
        shape: Sizes of the channels' axes, and W.
        axes: Names of the channels' axes.
        rngs: Source of initial values.

    Raises:
        ValueError: when W is below 2.
    """
    if shape[-1] < 2:
        raise ValueError(f"conv_width must be at least 2, got {shape[-1]}")
    init = normal(shape[-1] ** -0.5)
    return nnx.Param(init(draw_key(rngs), shape, jnp.float32), axes=(*axes, "tap"))


def rates(num_heads: int, rngs: nnx.Rngs) -> tuple[nnx.Param, nnx.Param]:
    """Draws the logarithm of rates in [1, 16] and the bias of time steps in [0.001, 0.1], as for Mamba-2 (Dao & Gu
    2024, arXiv:2405.21060).
    """
    # Rates are uniform, steps log-uniform: some heads forget within a few tokens, others remember thousands.
    rates, steps = jax.random.uniform(draw_key(rngs), (2, num_heads))
    step = jnp.exp(math.log(1e-3) + steps * (math.log(0.1) - math.log(1e-3)))
    # softplus(dt_bias) = step
    bias = step + jnp.log(-jnp.expm1(-step))
    return nnx.Param(jnp.log(1 + 15 * rates), axes=("heads",)), nnx.Param(bias, axes=("heads",))
