"""The forward kernel: one block of queries stays in memory, its visible blocks of keys and values are streamed.

Letters: Q blocks of queries, R rows of one block (the query heads of a key head, times some queries), C blocks of keys,
c keys of one.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from maxlib.kernels.attention.logits import LOWEST, Logits
from maxlib.kernels.attention.mosaic_tpu.launch import Work, launch, passing, staying
from maxlib.kernels.attention.mosaic_tpu.logits import dot, hide
from maxlib.kernels.attention.mosaic_tpu.visits import Tile
from maxlib.kernels.attention.tiles import causal_tiles


def forward(
    q: Float[Array, "B K Q R Hk"],
    k: Float[Array, "B K C c Hk"],
    v: Float[Array, "B K C c Hv"],
    start: Int[Array, "B 1 Q 1 R"],
    end: Int[Array, "B 1 Q 1 R"],
    table,
    *,
    logits: Logits,
    vmem: int,
) -> tuple[Float[Array, "B K Q R Hv"], Float[Array, "B K Q 1 R"]]:
    """Computes the output, and the log-sum-exp of every row in base 2."""
    (B, K, Q, R, Hk), (C, c, Hv) = q.shape, v.shape[2:]
    out = jax.ShapeDtypeStruct((B, K, Q, R, Hv), q.dtype)
    lse = jax.ShapeDtypeStruct((B, K, Q, 1, R), jnp.float32)
    out, lse = launch(
        "forward",
        functools.partial(_kernel, logits=logits),
        table,
        lanes=K,
        given=[*map(staying, (q, start, end)), *map(passing, (k, v))],
        out=[*map(staying, (out, lse))],
        scratch=[(R, 1), (R, 1), (R, Hv)],
        work=Work(B * causal_tiles(Q, C), products=R * c * (Hk + Hv), exps=R * c),
        vmem=vmem,
    )
    return out, lse


def _kernel(tile: Tile, q, start, end, k, v, out, lse, peak, total, acc, *, logits: Logits):
    @pl.when(tile.first)
    def _():
        peak[...] = jnp.full_like(peak, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def step(mask):
        # Online softmax in base 2: m' = max(m, max x); p = 2^(x - m'); sums so far shrink by 2^(m - m').
        bent = mask(logits.bend(dot(q[...], k[...], 1, 1)))  # [R, Hk] [c, Hk]^T -> [R, c]
        new_peak = jnp.maximum(peak[...], jnp.max(bent, axis=1, keepdims=True) * logits.factor)
        shrink = jnp.exp2(peak[...] - new_peak)
        probs = jnp.exp2(bent * logits.factor - new_peak)
        peak[...] = new_peak
        total[...] = total[...] * shrink + jnp.sum(probs, axis=1, keepdims=True)
        # [R, c] [c, Hv] -> [R, Hv]; probabilities are rounded to the dtype of v for the matrix unit
        acc[...] = acc[...] * shrink + dot(probs.astype(v.dtype), v[...], 1, 0)

    def mask(bent):
        return hide(bent, start[...].T, end[...].T, tile.column * k.shape[0], axis=1)

    # Two copies of the step: full tiles, the majority of a long sequence, skip the mask's comparisons.
    pl.when(tile.full)(lambda: step(lambda bent: bent))
    pl.when(tile.masked)(lambda: step(mask))

    @pl.when(tile.last)
    def _():
        seen = total[...] > 0
        safe = jnp.where(seen, total[...], 1.0)
        out[...] = (acc[...] / safe).astype(out.dtype)
        lse[...] = jnp.where(seen, peak[...] + jnp.log2(safe), -jnp.inf).T
