"""What layers with a recurrent state or a short convolution share: caches, split sequences, and initial values."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.nn._initial_values import normal
from maxlib.nn._linear import draw_key
from maxlib.nn._pytree import pytree
from maxlib.nn.cache import LayerCache
from maxlib.nn.decoder._context import Context
from maxlib.nn.mixer import SplitSequence, Traffic
from maxlib.sharding import constrain, current, shard_map_by_name
from maxlib.sharding.layers import AllGatherArg, mesh_axes

# Axis names of arrays with heads: of tokens, and of a state.
HEADS = ("batch", "seq", "act_heads", None)
STATE = ("batch", "act_heads", None, None)
Named = tuple[Any, Any]
"""An array, or None, and the names of its axes, a tuple or an `AllGatherArg`."""


@pytree
class StateCache(LayerCache):
    """Cache of a recurrence. Its size does not depend on the number of tokens, and it cannot be rewound.

    Attributes:
        tails: The last W - 1 inputs of each of the convolutions, `B W-1 heads width`.
        state: The state, `B N _ _`, float32 or wider.
    """

    kind: ClassVar[str | None] = "state"

    tails: tuple[Float[Array, "B U _ _"], ...]
    state: Float[Array, "B N _ _"]

    @classmethod
    def empty(
        cls, batch: int, taps: int, channels: Sequence[tuple[int, int]], state: tuple[int, ...], dtype: Any
    ) -> "StateCache":
        """Makes an empty cache.

        Args:
            batch: Number B of rows.
            taps: Taps W of the convolutions.
            channels: Heads and their width for each convolution.
            state: Shape of the state of a row.
            dtype: Dtype of the convolutions' inputs; the state is a sum over the whole document, so it is float32, or
                wider if `dtype` is.
        """
        tails = tuple(jnp.zeros((batch, taps - 1, *shape), dtype) for shape in channels)
        return cls(tails, jnp.zeros((batch, *state), jnp.promote_types(dtype, jnp.float32)))


class Convolved(NamedTuple):
    """An input of a recurrence that passes through a short convolution and SiLU first.

    Attributes:
        x: `B T heads width`, and the names of its axes.
        taps: The filters, `heads width W`.
        bias: `heads width`, or None.
    """

    x: Named
    taps: Named
    bias: Named = (None, None)


def convolved_recurrence(
    run: Callable[..., tuple[Array, Array]],
    inputs: Sequence[Convolved],
    others: Sequence[Named],
    ctx: Context,
    cache: StateCache | None,
) -> tuple[Array, StateCache | None]:
    """Convolves inputs and runs a recurrence, on each device's rows, heads and tokens.

    Args:
        run: `run(*convolved inputs, *others, is_start=, valid=, axis_name=, initial_state=) -> (out, state)`.
        inputs: The inputs to convolve; the first one has the heads of the output.
        others: Further arrays of `run`.
        ctx: Documents and padding.
        cache: Convolution inputs and state of earlier tokens, or None.

    Returns:
        The output, and the new cache.
    """
    count, ends = len(inputs), len(inputs) + len(others)

    def op(*arrays, axis_name):
        (*convolved, starts, valid), masks = arrays, {"axis_name": axis_name}
        masks |= {"is_start": starts, "valid": valid}
        xs, further, weights = convolved[:count], convolved[count:ends], convolved[ends:]
        taps, biases, tails, (state,) = (weights[i * count : (i + 1) * count] for i in range(4))
        # Each channel becomes a weighted sum over the last W tokens of its document.
        pairs = [
            ops.short_convolution(x, w, bias=bias, act=jax.nn.silu, tail=tail, **masks)
            for x, w, bias, tail in zip(xs, taps, biases, tails, strict=True)
        ]
        xs, tails = zip(*pairs, strict=True)
        out, state = run(*xs, *further, **masks, initial_state=state)
        return out, *tails, state

    arrays = [*(y.x for y in inputs), *others, *(y.taps for y in inputs), *(y.bias for y in inputs)]
    states = (None,) * (count + 1) if cache is None else (*cache.tails, cache.state)
    names = [(batch, None, *channels) for batch, _, *channels in (y.x[1] for y in inputs)]
    out, new = over_sequence(op, arrays, list(zip(states, [*names, STATE], strict=True)), ctx)
    return out, None if new is None else StateCache(tuple(new[:-1]), new[-1])


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
