"""What both kernels do with a tile of raw products of queries and keys, held in registers."""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxlib.ops._attention.logits import Logits


def probabilities(logits: Logits, bent, hide, lse, axis: int):
    """A tile's probabilities. `hide` masks; `lse` loads one number per query, and queries run along `axis`.

    Numbers are loaded when they are needed, not before: registers are scarce.
    """
    return jnp.exp2(hide(bent * logits.factor - lax.broadcast_in_dim(lse(), bent.shape, [axis])))


def settle(ready, pending):
    """Waits for the accumulator `pending`; nothing that uses `ready` moves in front of the wait.

    The compiler turns matmuls that overlap into a sequence when it finds their input registers written in between.
    """
    return lax.optimization_barrier((ready, pending[...]))


def spread(x, like, axis: int = 0):
    """One number per row (or per column, with axis 1) spread over a tile."""
    return lax.broadcast_in_dim(x, like.shape, [axis])


def hide(logits, ends, first_key, axis: int):
    """`-inf` where a key is not seen; keys run along `axis`, the queries' intervals along the other one."""
    keys = first_key + plgpu.broadcasted_iota(jnp.int32, logits.shape, axis, layout=plgpu.Layout.WGMMA)
    start, end = (lambda x=x: lax.broadcast_in_dim(x(), logits.shape, [1 - axis]) for x in ends)
    logits = jnp.where(start() <= keys, logits, -jnp.inf)
    return jnp.where(keys < end(), logits, -jnp.inf)
