"""The backward kernels: one for dq, and one for dk and dv. No atomics, so results are the same in every run.

Both recompute a tile's probabilities from the log-sum-exp. With `delta`, the row sums of d_out * out minus d_lse:
d_logits = probs * (d_out v - delta), dq = scale d_logits k, dk = scale d_logits^T q, dv = probs^T d_out.

`queries` visits tiles as the forward kernel does. `keys` is its transpose, also within a tile: keys are rows, queries
are columns. The query heads that share a key head are rows of one block, so that the matmul sums their gradients.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from maxlib.kernels.attention.logits import Logits
from maxlib.kernels.attention.mosaic_tpu.launch import Work, launch, passing, staying
from maxlib.kernels.attention.mosaic_tpu.logits import dot, hide
from maxlib.kernels.attention.mosaic_tpu.visits import Tile
from maxlib.kernels.attention.tiles import causal_tiles


class Rows(NamedTuple):
    """Queries and what belongs to them, in blocks. `lse` is in base 2, `+inf` for empty rows and padding."""

    q: Any  # B K Q R Hk
    d_out: Any  # B K Q R Hv
    lse: Any  # B K Q 1 R
    delta: Any  # B K Q 1 R
    start: Any  # B 1 Q 1 R
    end: Any  # B 1 Q 1 R

    def work(self, v, *, with_keys: int, with_values: int) -> Work:
        """Estimates a lane's work: `with_keys` matmuls per tile as wide as keys, `with_values` as wide as values."""
        (B, _, Q, R, Hk), (C, c, Hv) = self.q.shape, v.shape[2:]
        return Work(B * causal_tiles(Q, C), R * c * (with_keys * Hk + with_values * Hv), exps=R * c)


def queries(
    rows: Rows, k: Float[Array, "B K C c Hk"], v: Float[Array, "B K C c Hv"], table, *, logits: Logits, vmem: int
) -> Float[Array, "B K Q R Hk"]:
    """Computes the gradient of the queries."""
    (dq,) = launch(
        "dq",
        functools.partial(_queries_kernel, logits=logits),
        table,
        lanes=k.shape[1],
        given=[*map(staying, rows), *map(passing, (k, v))],
        out=[staying(jax.ShapeDtypeStruct(rows.q.shape, rows.q.dtype))],
        scratch=[rows.q.shape[3:]],
        work=rows.work(v, with_keys=2, with_values=1),
        vmem=vmem,
    )
    return dq


def _queries_kernel(tile: Tile, *refs, logits: Logits):
    rows, (k, v, dq, total) = Rows(*refs[:6]), refs[6:]

    @pl.when(tile.first)
    def _():
        total[...] = jnp.zeros_like(total)

    def step(mask):
        bent = logits.bend(dot(rows.q[...], k[...], 1, 1))  # [R, Hk] [c, Hk]^T -> [R, c]
        probs = jnp.exp2(mask(bent * logits.factor) - rows.lse[...].T)  # lse [1, R] -> [R, 1]
        d_probs = dot(rows.d_out[...], v[...], 1, 1)
        d_products = logits.slope(bent, probs * (d_probs - rows.delta[...].T))
        total[...] += dot(d_products.astype(k.dtype), k[...], 1, 0)

    def mask(x):
        return hide(x, rows.start[...].T, rows.end[...].T, tile.column * k.shape[0], axis=1)

    pl.when(tile.full)(lambda: step(lambda x: x))
    pl.when(tile.masked)(lambda: step(mask))

    @pl.when(tile.last)
    def _():
        dq[...] = (total[...] * logits.scale).astype(dq.dtype)


def keys(
    rows: Rows, k: Float[Array, "B K C c Hk"], v: Float[Array, "B K C c Hv"], table, *, logits: Logits, vmem: int
) -> tuple[Float[Array, "B K C c Hk"], Float[Array, "B K C c Hv"]]:
    """Computes the gradients of keys and values."""
    dk, dv = launch(
        "dk_dv",
        functools.partial(_keys_kernel, logits=logits),
        table,
        lanes=k.shape[1],
        given=[*map(staying, (k, v)), *map(passing, rows)],
        out=[staying(jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)],
        scratch=[x.shape[3:] for x in (k, v)],
        work=rows.work(v, with_keys=2, with_values=2),
        vmem=vmem,
    )
    return dk, dv


def _keys_kernel(tile: Tile, k, v, *refs, logits: Logits):
    rows, (dk, dv, dk_total, dv_total) = Rows(*refs[:6]), refs[6:]

    @pl.when(tile.first)
    def _():
        dk_total[...] = jnp.zeros_like(dk_total)
        dv_total[...] = jnp.zeros_like(dv_total)

    def step(mask):
        bent = logits.bend(dot(k[...], rows.q[...], 1, 1))  # transposed: [c, Hk] [R, Hk]^T -> [c, R]
        probs = jnp.exp2(mask(bent * logits.factor) - rows.lse[...])
        # [c, R] [R, Hv] -> [c, Hv]: R includes the query heads of this key head, which are summed thereby.
        dv_total[...] += dot(probs.astype(v.dtype), rows.d_out[...], 1, 0)
        d_probs = dot(v[...], rows.d_out[...], 1, 1)
        d_products = logits.slope(bent, probs * (d_probs - rows.delta[...]))
        dk_total[...] += dot(d_products.astype(k.dtype), rows.q[...], 1, 0)

    def mask(x):
        return hide(x, rows.start[...], rows.end[...], tile.row * k.shape[0], axis=0)

    pl.when(tile.full)(lambda: step(lambda x: x))
    pl.when(tile.masked)(lambda: step(mask))

    @pl.when(tile.last)
    def _():
        dk[...] = (dk_total[...] * logits.scale).astype(dk.dtype)
        dv[...] = dv_total[...].astype(dv.dtype)
