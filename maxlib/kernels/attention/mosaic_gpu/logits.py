"""Operations on a tile of raw products of queries and keys in registers, for the forward and backward kernels."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlib.kernels.attention.logits import Logits
from maxlib.kernels.attention.mosaic_gpu.config import ROWS


def probabilities(logits: Logits, bent, hide, lse, axis: int):
    """Computes a tile's probabilities, exp2(logit - lse), both in base 2.

    `hide` masks; `lse` loads one number per query, and queries run along `axis`. It is a function, so that the numbers
    are loaded only when they are needed: registers are scarce.
    """
    return jnp.exp2(hide(bent * logits.factor - lax.broadcast_in_dim(lse(), bent.shape, [axis])))


def settle(ready, pending, between: Callable[[], None]):
    """Computes `ready`, calls `between`, and only then waits for the accumulator `pending`, which still multiplies.

    `between` has to branch, as `memory.ahead` does. Without a branch the assembler moves the wait for `pending` in
    front of the exponentials of `ready`, so that they no longer run beside the matmul (tests/ops/sass.py counts them).
    What uses the results stays behind the wait: the compiler serialises overlapping matmuls if their input registers
    are written between them.
    """
    ready = lax.optimization_barrier(ready)
    between()
    return lax.optimization_barrier((ready, pending[...]))


def spread(x, like, axis: int = 0):
    """Broadcasts one number per row (or per column, with axis 1) over a tile."""
    return lax.broadcast_in_dim(x, like.shape, [axis])


def hide(logits, ends, first_key, axis: int):
    """Masks a tile with `-inf`, where keys run along `axis` and the queries' intervals along the other axis."""
    keys = first_key + plgpu.broadcasted_iota(jnp.int32, logits.shape, axis, layout=plgpu.Layout.WGMMA)
    start, end = (lambda x=x: lax.broadcast_in_dim(x(), logits.shape, [1 - axis]) for x in ends)
    # One bound after the other, so that only one of them is in registers at a time.
    logits = jnp.where(start() <= keys, logits, -jnp.inf)
    return jnp.where(keys < end(), logits, -jnp.inf)


def per_row(value: float):
    """Returns one number per query, in registers."""
    return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))


def online_softmax(bent, peak, total, factor: float):
    """Returns the tile's exponentials, the new peak and total, and the factor by which sums so far shrink."""
    # m' = max(m, max x); p = 2^(x - m'); total' = total * 2^(m - m') + sum p
    new_peak = jnp.maximum(peak, jnp.max(bent, axis=1) * factor)
    shrink = jnp.exp2(peak - new_peak)
    probs = jnp.exp2(bent * factor - spread(new_peak, bent))
    return probs, new_peak, total * shrink + jnp.sum(probs, axis=1), shrink
