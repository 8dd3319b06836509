"""The kernel for few queries against a long cache, which it reads once and without changing its layout.

All heads are computed together: a cache `S K H` is read as a matrix of S K rows, every query head is multiplied with
the rows of every key head, and pairs of different heads are masked. This is K times the products, and still takes less
time than reading the cache. A device with two cores splits the visited keys of each row among them; the parts
are merged by their log-sum-exps.

Letters: P parts, R rows (T queries of N heads), C blocks of keys, c rows of one (keys times their heads).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from maxlib.kernels.attention.logits import LOG2_E, LOWEST, Logits
from maxlib.kernels.attention.merge import merge_parts
from maxlib.kernels.attention.mosaic_tpu import visits
from maxlib.kernels.attention.mosaic_tpu.launch import Block, Work, launch
from maxlib.kernels.attention.mosaic_tpu.logits import dot
from maxlib.kernels.attention.tiles import tiles


def decode(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    *,
    logits: Logits,
    block: int,
    parts: int,
    vmem: int,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes the output and the log-sum-exp of every row, reading `block` keys at a time on each of `parts` cores."""
    (B, T, N, Hk), (S, K, Hv) = q.shape, v.shape[1:]
    R, c = T * N, block * K
    by_row = [q.reshape(B, R, Hk), *(jnp.repeat(x, N, axis=1)[..., None] for x in (start, end))]
    # The key head of each query row, and for each row of a block its key and its key head.
    row_head = jnp.tile(jnp.arange(N, dtype=jnp.int32) // (N // K), T)[:, None]
    place = jnp.arange(c, dtype=jnp.int32)[None]
    given = [
        *(Block(x, (None, *x.shape[1:]), lambda part, tile: (tile.batch, 0, 0), B) for x in by_row),
        *(Block(x, x.shape, lambda part, tile: (0, 0), 1) for x in (row_head, place // K, place % K)),
        *(
            Block(x.reshape(B, S * K, -1), (None, c, x.shape[-1]), lambda part, tile: (tile.batch, tile.column, 0))
            for x in (k, v)
        ),
    ]
    out = [
        Block(jax.ShapeDtypeStruct((parts, B, R, width), jnp.float32), (None, None, R, width), _of_part, B)
        for width in (Hv, 1)
    ]
    visited, _ = tiles(start, end, S, T, block)
    shared = visits.shares(visited, parts)
    out, lse = launch(
        "decode",
        functools.partial(_kernel, logits=logits, block=block, S=S),
        visits.table(shared, jnp.zeros_like(shared)),
        lanes=parts,
        given=given,
        out=out,
        scratch=[(R, 1), (R, 1), (R, Hv)],
        work=Work(B * visited.shape[-1] / parts, products=R * c * (Hk + Hv), exps=R * c),  # of a full cache
        vmem=vmem,
    )
    out, lse = merge_parts(out, lse[..., 0])
    return out.reshape(B, T, N, Hv).astype(q.dtype), lse.reshape(B, T, N)


def _of_part(part, tile):
    return part, tile.batch, 0, 0


class _Refs(NamedTuple):
    """Inputs, results and buffers of one tile. A row is one query of one head."""

    q: Any  # R Hk
    start: Any  # R 1
    end: Any
    row_head: Any  # R 1: the key head of each row
    key_of: Any  # 1 c: key and key head of each row of the block
    head_of: Any
    k: Any  # c Hk
    v: Any  # c Hv
    out: Any  # R Hv
    lse: Any  # R 1
    peak: Any  # R 1: softmax so far
    total: Any
    acc: Any  # R Hv


def _kernel(tile: visits.Tile, *refs, logits: Logits, block: int, S: int):
    q, start, end, row_head, key_of, head_of, k, v, out, lse, peak, total, acc = _Refs(*refs)

    @pl.when(tile.first)
    def _():
        peak[...] = jnp.full_like(peak, LOWEST)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    @pl.when(tile.masked)
    def _():
        first_key = tile.column * block
        bent = logits.bend(dot(q[...], k[...].astype(q.dtype), 1, 1))
        key = first_key + key_of[...]
        # A row attends only to the keys of its own key head; the other products of the dense matmul are discarded.
        seen = (row_head[...] == head_of[...]) & (start[...] <= key) & (key < end[...])
        bent = jnp.where(seen, bent, -jnp.inf)
        new_peak = jnp.maximum(peak[...], jnp.max(bent, axis=1, keepdims=True) * logits.factor)
        shrink = jnp.exp2(peak[...] - new_peak)
        probs = jnp.exp2(bent * logits.factor - new_peak)
        values = v[...].astype(q.dtype)
        if S % block:  # memory after the end of the array may hold anything, also NaN, and 0 * NaN is NaN
            row = lax.broadcasted_iota(jnp.int32, (v.shape[0], 1), 0)
            values = jnp.where(row < (S - first_key) * (v.shape[0] // block), values, 0)
        peak[...] = new_peak
        total[...] = total[...] * shrink + jnp.sum(probs, axis=1, keepdims=True)
        acc[...] = acc[...] * shrink + dot(probs.astype(q.dtype), values, 1, 0)

    @pl.when(tile.last)
    def _():
        seen = total[...] > 0
        safe = jnp.where(seen, total[...], 1.0)
        out[...] = acc[...] / safe
        lse[...] = jnp.where(seen, peak[...] / LOG2_E + jnp.log(safe), -jnp.inf)
