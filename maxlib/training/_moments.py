"""Moments of optimizers in bfloat16, and in eight bits: float8 with a scale for each block."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

BLOCK = 128  # values on the last axis that share a scale
LEAST = 16  # smaller blocks would need as many bytes for scales as they save
LARGEST = 240.0  # what a block's largest magnitude becomes; float8_e4m3fn ends at 448
_NOISE_BITS = 20  # of float32's 23 bits of mantissa, float8_e4m3fn has three


class LowState(NamedTuple):
    """State of `bfloat16_moments` and `eight_bit_moments`.

    Attributes:
        inner: State of the wrapped optimizer, with moments in fewer bits.
        updates: Number of updates, which seeds the noise.
    """

    inner: Any
    updates: Int[Array, ""]


class Scaled(NamedTuple):
    """A moment in eight bits.

    Attributes:
        codes: Values divided by their scales; of a second moment the square roots.
        scales: One for each block of the last axis.
    """

    codes: Array
    scales: Float[Array, "..."]


def bfloat16_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` so that it computes in float32 and holds its moments in bfloat16.

    Parameters may be bfloat16 too (`nn.cast`). Stored values are rounded stochastically, with the correct mean: changes
    below 1/256 add up, while rounding to nearest would lose them in every step. The random numbers depend only on the
    number of the update, so runs repeat bit for bit. The update is computed from the rounded values, so transformations
    that scale updates belong inside.

    Args:
        optimizer: The optimizer to wrap.
    """

    def narrow(path: Any, x: Array, key: Array) -> Array:
        return _round_stochastically(x, key)

    def widen(path: Any, x: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x

    return _low_moments(optimizer, narrow, widen)


def eight_bit_moments(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` so that it computes in float32 and holds its moments in eight bits, in float8_e4m3fn.

    Blocks of up to 128 values on the last axis have a scale in float32, so a moment takes 1.03 bytes. A second moment
    (`nu`) is stored as its square root, which spans half as many orders of magnitude. As in `bfloat16_moments`, values
    are rounded stochastically, and parameters may be bfloat16. Moments whose last axis has no block of at least 16
    values stay in float32.

    Args:
        optimizer: The optimizer to wrap.
    """

    def narrow(path: Any, x: Array, key: Array) -> Any:
        return _scaled(x, key, is_square=_is_square(path)) if _block(x) >= LEAST else x

    def widen(path: Any, x: Any) -> Any:
        return _restored(x, is_square=_is_square(path)) if isinstance(x, Scaled) else x

    return _low_moments(optimizer, narrow, widen)


def _low_moments(
    optimizer: optax.GradientTransformation,
    narrow: Callable[[Any, Array, Array], Any],
    widen: Callable[[Any, Any], Any],
) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` so that it computes in float32 and holds its moments in another form.

    Parameters in bfloat16 are rounded stochastically.

    Args:
        optimizer: The optimizer to wrap.
        narrow: Returns the form in which a moment is held, from its path in the state, its value and a random key.
        widen: Returns a leaf of the state for the optimizer, from its path and what is held there.
    """
    inner = in_float32(optimizer)

    def held(state: Any, params: Any, key: Array) -> Any:
        is_moment, (leaves, tree) = _moment_test(params), jax.tree.flatten_with_path(state)
        keys = jax.random.split(key, max(len(leaves), 1))
        return jax.tree.unflatten(
            tree, [narrow(path, x, keys[i]) if is_moment(path, x) else x for i, (path, x) in enumerate(leaves)]
        )

    def init(params):
        return LowState(held(inner.init(params), params, jax.random.key(0)), jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, **extra):
        assert params is not None  # the step passes them
        key = jax.random.fold_in(jax.random.key(0), state.updates)
        wide = jax.tree_util.tree_map_with_path(widen, state.inner, is_leaf=lambda x: isinstance(x, Scaled))
        changes, wide = inner.update(updates, wide, params, **extra)
        low = held(wide, params, jax.random.fold_in(key, 0))
        return _rounded_changes(params, changes, jax.random.fold_in(key, 1)), LowState(low, state.updates + 1)

    return optax.GradientTransformationExtraArgs(init, update)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wraps `optimizer` to get parameters and gradients in float32 for any dtype, so that its moments are float32."""
    inner = optax.with_extra_args_support(optimizer)

    def wide(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    def update(updates, state, params=None, **extra):
        return inner.update(wide(updates), state, params if params is None else wide(params), **extra)

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(wide(params)), update)


def _moment_test(params: Mapping[str, Any]) -> Callable[[Any, Any], bool]:
    """Returns a function of the path and value of a leaf in an optimizer's state: True for a moment of a parameter."""
    shapes = {path: x.shape for path, x in params.items() if not isinstance(x, optax.MaskedNode)}

    def is_moment(path: Any, leaf: Any) -> bool:
        # A moment is stored under its parameter's path and has its shape.
        known = [shapes.get(str(getattr(part, "key", ""))) for part in path]
        return leaf.shape in known and jnp.issubdtype(leaf.dtype, jnp.floating)

    return is_moment


def _round_stochastically(x: Float[Array, "..."], key: Array) -> Array:
    """Rounds stochastically to bfloat16: adds noise below the last kept bit, then truncates."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    kept = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(x), kept, x).astype(jnp.bfloat16)


def _rounded_changes(params: Any, changes: Any, key: Array) -> Any:
    """Rounds the updated parameter stochastically to bfloat16 and returns the difference as the update."""

    def rounded(parameter: Array, change: Array, key: Array) -> Array:
        if parameter.dtype != jnp.bfloat16:
            return change
        exact = parameter.astype(jnp.float32)
        return _round_stochastically(exact + change, key).astype(jnp.float32) - exact

    leaves, tree = jax.tree.flatten(params)
    return jax.tree.map(rounded, params, changes, jax.tree.unflatten(tree, jax.random.split(key, len(leaves))))


def _is_square(path: Any) -> bool:
    """Returns True for the path of a second moment in an optimizer's state."""
    return any(getattr(key, "name", None) == "nu" for key in path)


def _block(x: Array) -> int:
    return math.gcd(x.shape[-1], BLOCK) if x.ndim else 1


def _scaled(x: Array, key: Array, *, is_square: bool) -> Scaled:
    x = jnp.sqrt(x) if is_square else x
    blocks = x.reshape(*x.shape[:-1], -1, _block(x))
    scales = jnp.max(jnp.abs(blocks), axis=-1) / LARGEST
    codes = blocks / jnp.where(scales > 0, scales, 1.0)[..., None]
    # Noise below the last bit that is kept, then truncation: the mean of the result is the value.
    bits = jax.lax.bitcast_convert_type(codes, jnp.uint32)
    noise = jax.random.bits(key, codes.shape, jnp.uint32) >> (32 - _NOISE_BITS)
    mask = jnp.uint32(0xFFFFFFFF << _NOISE_BITS & 0xFFFFFFFF)
    rounded = jax.lax.bitcast_convert_type((bits + noise) & mask, jnp.float32)
    rounded = jnp.where(jnp.abs(codes) < float(jnp.finfo(jnp.float8_e4m3fn).smallest_normal), codes, rounded)
    return Scaled(rounded.astype(jnp.float8_e4m3fn).reshape(x.shape), scales)


def _restored(x: Scaled, *, is_square: bool) -> Float[Array, "..."]:
    codes = x.codes.astype(jnp.float32)
    blocks = codes.reshape(*codes.shape[:-1], x.scales.shape[-1], -1) * x.scales[..., None]
    values = blocks.reshape(codes.shape)
    return jnp.square(values) if is_square else values
