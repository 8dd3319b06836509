"""Short causal depthwise convolution, as recurrent layers apply it before their state."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib._utils.varying import vary_alike
from maxlib._xla_workarounds import for_each_token, last_axis_first

AxisName = str | tuple[str, ...]


def short_convolution(
    x: Float[Array, "B T *C"],
    weight: Float[Array, "*C W"],
    *,
    bias: Float[Array, "*C"] | None = None,
    is_start: Bool[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    tail: Float[Array, "B W-1 *C"] | None = None,
    act: Callable[[Array], Array] | None = None,
    axis_name: AxisName | None = None,
) -> tuple[Float[Array, "B T *C"], Float[Array, "B W-1 *C"]]:
    """Convolves each channel with its own W taps: `y[t] = sum_w weight[w] x[t - (W - 1) + w]`, in float32.

    Taps that reach into another document, or before the first token of a row without a `tail`, read zero. The gated
    convolution of LFM2 is `c * short_convolution(b * x, weight)[0]`.

    Args:
        x: Input; its channels may have several axes, such as heads and their width.
        weight: Taps of each channel; the last one multiplies the current token.
        bias: Added to the result.
        is_start: True for the first token of a document; None if every row continues `tail`.
        valid: False for padding; None if every token is real.
        tail: The last W - 1 real inputs before this call; None for zeros.
        act: Applied to the result; None for none. The backward pass keeps only the inputs and computes both again.
        axis_name: Mesh axis over which the sequence is split, inside `jax.shard_map`; devices hold consecutive parts.

    Returns:
        The result, in the dtype of `x`, and the tail for the next call, in the dtype of `tail`.

    Raises:
        ValueError: When shapes do not agree.
    """
    width = weight.shape[-1]
    shape = (x.shape[0], width - 1, *x.shape[2:])
    _check(x, weight, bias, tail, shape)
    tail = jnp.zeros(shape, x.dtype) if tail is None else tail
    if axis_name is not None:
        before, tail = _across(x, tail, is_start, valid, axis_name)
    else:
        before, tail = tail, _next_tail(x, tail, is_start, valid)
    # Number of earlier tokens of the same document within this call.
    age = _age(is_start, width) if is_start is not None else None
    # Cheap to compute again; kept for the backward pass, it would take several times the memory of the inputs.
    run = jax.checkpoint(_activated, static_argnums=0, prevent_cse=False)
    return run(act, before.astype(x.dtype), x, weight, bias, age), tail


def _activated(act: Callable | None, before: Array, x: Array, weight: Array, bias: Array | None, age: Array | None):
    """Returns `act` of the convolution of `x`, with the tail `before` it."""
    # [B, W - 1 + T, *C], token t at t + W - 1.
    inputs = jnp.concatenate([before, x], axis=1)
    y = _convolve(*vary_alike((inputs, weight, age)))
    y = y if bias is None else y + for_each_token(jnp.asarray(bias, y.dtype), y.shape)
    y = y.astype(x.dtype)
    return y if act is None else act(y)


@jax.custom_vjp
def _convolve(inputs: Array, weight: Array, age: Array | None) -> Array:
    """Sums the taps on `B W-1+T *C`, masked by `age`, `B T`; returns `B T *C`, float32 or wider."""
    taps, seq = _taps(weight, inputs.dtype), inputs.shape[1] - weight.shape[-1] + 1
    parts = (_masked(_shifted(inputs, len(taps) - 1 - back, seq), age, back) for back in range(len(taps)))
    return _weighted_sum(taps, parts)


def _convolve_backward(saved: tuple[Array, Array, Array | None], gradient: Array):
    # Written out because XLA for CPUs is many times slower on the pads and sums that autodiff makes of slices.
    inputs, weight, age = saved
    taps, seq, tail = _taps(weight, inputs.dtype), gradient.shape[1], weight.shape[-1] - 1
    # Through the tap `back`, input s reaches token t = s + back - (W - 1), which is at s + back in `spread`. The
    # gradient was cast from the dtype of the inputs, so nothing is lost. XLA for TPUs stores it shifted by each tap.
    spread = jnp.pad(gradient.astype(inputs.dtype), [(0, 0), (tail, tail)] + [(0, 0)] * (gradient.ndim - 2))
    ages = None if age is None else jnp.pad(age, [(0, 0), (tail, tail)], constant_values=-1)

    def through(back: int) -> Array:
        age = None if ages is None else _shifted(ages, back, seq + tail)
        return _masked(_shifted(spread, back, seq + tail), age, back)

    products = (_masked(_shifted(inputs, tail - back, seq), age, back) * gradient for back in range(len(taps)))
    of_taps = jnp.stack([jnp.sum(product, axis=(0, 1)) for product in products][::-1], axis=-1)
    return _weighted_sum(taps, map(through, range(len(taps)))).astype(inputs.dtype), of_taps.astype(weight.dtype), None


_convolve.defvjp(lambda *args: (_convolve(*args), args), _convolve_backward)


def _taps(weight: Array, dtype: Any) -> list[Array]:
    """Returns the taps, `*C` each, in float32 or wider: first the one on the token itself, then those before."""
    wide = last_axis_first(weight.astype(jnp.promote_types(dtype, jnp.float32)))  # *C W -> W *C
    return [wide[i] for i in reversed(range(len(wide)))]


def _shifted(a: Array, begin: int, size: int) -> Array:
    return jax.lax.slice_in_dim(a, begin, begin + size, axis=1)


def _masked(x: Array, age: Array | None, back: int) -> Array:
    """Sets what would come from another document to zero."""
    return x if age is None or back == 0 else jnp.where(_wide(age >= back, x), x, 0)


def _weighted_sum(taps: list[Array], parts: Iterable[Array]) -> Array:
    weighted = (for_each_token(tap, part.shape) * part for tap, part in zip(taps, parts, strict=True))
    return functools.reduce(jnp.add, weighted)


def _wide(mask: Array, x: Array) -> Array:
    """Appends an axis of size one to `B T` for each channel axis."""
    return mask.reshape(*mask.shape, *[1] * (x.ndim - 2))


def _age(is_start: Array, width: int) -> Array:
    """Counts the tokens since the last start; `width` or more for a document that began before this call."""
    place = jnp.arange(is_start.shape[1])[None, :]
    return place - jax.lax.cummax(jnp.where(is_start, place, -width), axis=1)


def _next_tail(x: Array, tail: Array, is_start: Array | None, valid: Array | None) -> Array:
    """Returns the last W - 1 real inputs so far, with zeros for those of an earlier document."""
    (rows, seq), length = x.shape[:2], tail.shape[1]
    place = jnp.arange(seq)[None, :]
    # Number of tokens up to the last real one, [B].
    stop = jnp.full(rows, seq) if valid is None else jnp.max(jnp.where(valid, place + 1, 0), axis=1)
    first = jnp.full(rows, -length) if is_start is None else jnp.max(jnp.where(is_start, place, -length), axis=1)
    inputs = jnp.concatenate([tail, x.astype(tail.dtype)], axis=1)
    # Slot s holds token stop - (W - 1) + s, which is at stop + s in `inputs`.
    slots = stop[:, None] + jnp.arange(length)[None, :]
    last_inputs = jax.vmap(lambda row, at: row[at])(inputs, slots)
    return jnp.where(_wide(slots - length >= first[:, None], x), last_inputs, 0)


def _across(x: Array, tail: Array, is_start, valid, axis_name: AxisName) -> tuple[Array, Array]:
    """Returns the tail before this device's part of the sequence, and the tail after the last device's part."""
    length = tail.shape[1]
    local = _next_tail(x, jnp.zeros_like(tail), is_start, valid)
    # The number of tail slots filled by this part's tokens, and whether a document begins in it; if so, nothing of the
    # earlier parts remains.
    real = jnp.full(x.shape[0], x.shape[1]) if valid is None else valid.sum(axis=1)
    begins = jnp.zeros(x.shape[0], bool) if is_start is None else is_start.any(axis=1)
    parts = jax.lax.all_gather((local, jnp.minimum(real, length), begins), axis_name)
    parts, tail = vary_alike((parts, tail))
    last, before = jax.lax.scan(_join, tail, parts)
    return jax.lax.dynamic_index_in_dim(before, jax.lax.axis_index(axis_name), keepdims=False), last


def _join(tail: Array, part: tuple[Array, Array, Array]) -> tuple[Array, Array]:
    """Returns the tail after a part, and the tail before it."""
    local, filled, begins = part
    length = tail.shape[1]
    slots = jnp.arange(length)[None, :] + filled[:, None]
    moved = jax.vmap(lambda row, at: row[at])(tail, jnp.minimum(slots, length - 1))
    is_local, is_earlier = slots >= length, (slots < length) & ~begins[:, None]
    return jnp.where(_wide(is_local, local), local, jnp.where(_wide(is_earlier, local), moved, 0)), tail


def _check(x, weight, bias, tail, shape) -> None:
    channels = x.shape[2:]
    if x.ndim < 3 or weight.shape[:-1] != channels:
        raise ValueError(
            f"short_convolution: x must have the axes B T and the channels of weight, got {x.shape} and {weight.shape}"
        )
    if bias is not None and bias.shape != channels:
        raise ValueError(f"short_convolution: bias must have the shape {channels}, got {bias.shape}")
    if tail is not None and tail.shape != shape:
        raise ValueError(f"short_convolution: tail must have the shape {shape}, got {tail.shape}")
