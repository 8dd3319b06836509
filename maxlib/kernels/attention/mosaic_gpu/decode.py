"""Few queries against a long cache: one block of threads per part of the keys and key head.

One query per head would leave most processors idle and most of each tile empty. Therefore the query heads that share a
key head become the queries of one tile, and the visited blocks of keys are distributed in turn over several blocks of
threads, so that each has work however much of the cache is filled. The parts are merged by their log-sum-exps.
"""

import einops
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib.kernels.attention.logits import LOG2_E, Logits
from maxlib.kernels.attention.merge import merge_parts
from maxlib.kernels.attention.mosaic_gpu import config
from maxlib.kernels.attention.mosaic_gpu.forward import forward
from maxlib.kernels.attention.mosaic_gpu.latents import latents


def decode(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    *,
    logits: Logits,
    tiles: config.Tiles,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes the output and the log-sum-exp of every row, without sinks, with the forward kernel."""
    (B, T, N, _), (S, K) = q.shape, v.shape[1:3]
    P = config.decode_parts(B * K, S)
    # Each key head is a row of the kernel's batch, as caches are stored heads first: XLA drops their transposition.
    k, v = (einops.rearrange(x, "B S K H -> (B K) S 1 H") for x in (k, v))
    # The G = N / K heads of a key head are rows of one tile: [B, T, N, Hk] -> [B K, R, 1, Hk] with R = T * G.
    rows = einops.rearrange(q, "B T (K G) H -> (B K) (T G) 1 H", K=K)
    R = rows.shape[1]
    rows = jnp.pad(rows, ((0, 0), (0, -R % 8), (0, 0), (0, 0)))
    bounds = (einops.repeat(ends, "B T -> (B K) (T G)", K=K, G=N // K) for ends in (start, end))
    start, end = (jnp.pad(ends, ((0, 0), (0, -R % tiles.rows)), mode="edge") for ends in bounds)
    no_sinks = jnp.full(1, -jnp.inf)
    out, lse = forward(rows, k, v, start, end, no_sinks, logits=logits, tiles=tiles, parts=P, name="decode")
    out, lse = out[:, :R].astype(jnp.float32), jnp.swapaxes(lse, 1, 2)[:, :R] / LOG2_E
    out, lse = merge_parts(_parts_first(out, P), _parts_first(lse, P))  # [P, B K, R, 1, Hv] -> [B K, R, 1, Hv]
    out, lse = (einops.rearrange(x, "(B K) (T G) 1 H -> B T (K G) H", T=T, K=K) for x in (out, lse[..., None]))
    return out.astype(q.dtype), lse[..., 0]


def _parts_first(x, parts: int):
    return einops.rearrange(x, "(B P) R ... -> P B R ...", P=parts)


def decode_latents(
    q: Float[Array, "B T N Hk"],
    keys: Float[Array, "B S Hk"],
    start: Int[Array, "B T"],
    end: Int[Array, "B T"],
    *,
    value_dim: int,
    logits: Logits,
    tiles: config.HopperLatentTiles,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Computes the same for latents (MLA): one key head, whose first `value_dim` channels are the values."""
    (B, T, N, _), S = q.shape, keys.shape[1]
    R = T * N
    rows = jnp.pad(einops.rearrange(q, "B T N H -> B (T N) H"), ((0, 0), (0, -R % 8), (0, 0)))
    # [2, B, T] -> [2, B, R], a multiple of 64 rows
    bounds = jnp.repeat(jnp.stack([start, end]), N, axis=2)
    bounds = jnp.pad(bounds, ((0, 0), (0, 0), (0, -R % config.ROWS)), mode="edge")
    P = config.latent_parts(B * bounds.shape[2] // config.ROWS, S)
    visits = _visits(start, end, tiles.columns)
    out, lse = latents(rows, keys, bounds, visits, value_dim=value_dim, logits=logits, tiles=tiles, parts=P)
    out, lse = out[:, :R].astype(jnp.float32), lse[:, :R] / LOG2_E
    out, lse = merge_parts(_parts_first(out, P), _parts_first(lse, P))  # [P, B, R, Hv] -> [B, R, Hv]
    return out.reshape(B, T, N, value_dim).astype(q.dtype), lse.reshape(B, T, N)


def _visits(start: Int[Array, "B T"], end: Int[Array, "B T"], columns: int) -> Int[Array, "B 4"]:
    """Describes the blocks of keys that any query of a row visits, as `tiles.walk` does.

    All tiles of a row visit the same ones. Without queries' blocks to compare, this is one small program for XLA.
    """
    seen, none = start < end, jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(seen, start, none), axis=1) // columns
    stop = -(-jnp.max(jnp.where(seen, end, 0), axis=1) // columns)
    # A block is full if every query sees all of it.
    full_first, full_stop = -(-jnp.max(start, axis=1) // columns), jnp.min(end, axis=1) // columns
    # A row that sees nothing processes one masked block.
    some = jnp.any(seen, axis=1)
    counts = jnp.where(some, stop - first, 1), jnp.maximum(full_stop - full_first, 0)
    return jnp.stack([jnp.where(some, first, 0), counts[0], full_first, counts[1]], axis=1)
