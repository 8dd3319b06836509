"""Attention to keys and to compressed keys under one softmax.

Shapes: B rows, T tokens, S keys, C entries, K chosen entries, N heads of width H.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import ops
from maxlib.nn.attention._index_loss import HIDDEN
from maxlib.nn.attention._indexer import ALL_KEYS, HEADS, QUERIES, WEIGHTS, Chosen, over_queries, taken
from maxlib.ops import MaskHint, StaticMask
from maxlib.sharding import shard_map_by_name
from maxlib.sharding.layers import axis_size

GATHER_FROM = 4  # times as many entries as are chosen
_KEYS = ("batch", None, None, None)


def attend_jointly(
    q: Float[Array, "B T N H"],
    keys: Float[Array, "B S 1 H"],
    bounds: Sequence[Int[Array, "B T"]],
    sinks: Float[Array, " N"],
    entries: Float[Array, "B C H"] | None,
    chosen: Chosen | None,
    *,
    scale: float,
    mask_hint: MaskHint | None = None,
    alone: bool = False,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"] | None]:
    """Attends to keys and entries, which are also values, under one softmax; each device computes its own queries and
    heads.

    Args:
        q: Queries.
        keys: Keys of tokens, of all heads.
        bounds: First key of each query, and one past its last.
        sinks: A score of each head that takes part in the softmax and has no value.
        entries: Compressed keys; None without.
        chosen: Those that each query attends to.
        scale: Factor on scores.
        mask_hint: What kernels may know of the bounds.
        alone: True if each row is one document, whose first entry every query may see.
        implementation: As in `ops.attention`.

    Returns:
        The output, and the share of entries in the probabilities of each head; None without entries.
    """
    static, segments = (None, None) if mask_hint is None else mask_hint
    if static is not None and axis_size("q_seq") > 1:
        static = dataclasses.replace(static, aligned=False)  # local query i is not aligned with key i

    def local(q, keys, start, end, sinks, of_queries, of_keys, entries, *chosen):
        ids = None if of_queries is None else (of_queries, of_keys)
        # Values are the keys, in their whole width.
        out, lse = ops.attention(
            q,
            keys,
            q.shape[-1],
            k_start=start,
            k_end=end,
            sinks=sinks,
            scale=scale,
            mask_hint=None if static is None else MaskHint(static, ids),
            implementation=implementation,
            return_lse=True,
        )
        if entries is None:
            return (out,)
        hint = StaticMask("any") if alone else None
        far, far_lse = attend_entries(
            q, entries, Chosen(*chosen), scale=scale, mask_hint=hint, implementation=implementation
        )
        # Two softmaxes are one, weighted by their sums: a token without entries has -inf, and a share of 1.
        far_share = jax.nn.sigmoid(far_lse - lse)
        share = far_share[..., None]
        return ((1 - share) * out + share * far).astype(out.dtype), far_share

    arrays: list[Any] = [q, keys, *bounds, sinks, *(segments or (None, None))]
    of_segments = (None, None) if segments is None else (QUERIES, _KEYS[:2])
    names: list[Any] = [HEADS, _KEYS, QUERIES, QUERIES, ("attn_heads",), *of_segments]
    if entries is None or chosen is None or not entries.shape[1]:  # the window only, or fewer tokens than an entry
        return *shard_map_by_name(local, [*names, None], (HEADS,))(*arrays, None), None
    arrays += [entries, chosen.start, chosen.end, chosen.best]
    names += [ALL_KEYS, QUERIES, QUERIES, None if chosen.best is None else (*QUERIES, None)]
    return shard_map_by_name(local, names, (HEADS, WEIGHTS))(*arrays)


def attend_entries(
    q: Float[Array, "B T N H"],
    entries: Float[Array, "B C H"],
    chosen: Chosen,
    *,
    scale: float,
    mask_hint: StaticMask | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attends to entries, which are keys and values of all heads.

    Chosen ones are gathered where they are few among many: products then fall with their share, while one query after
    the other reads its own.

    Args:
        q: Queries.
        entries: All entries.
        chosen: Those that each query attends to.
        scale: Factor on scores.
        mask_hint: Static description of the bounds.
        implementation: As in `ops.attention`.

    Returns:
        The output, and the log-sum-exp of the scores.
    """
    if chosen.best is not None and entries.shape[1] >= GATHER_FROM * chosen.best.shape[2]:
        return _gathered(q, entries, chosen, scale)
    bias = None
    if chosen.best is not None:
        # [B, T, C] -> [B, 1, T, C]: the same for all heads.
        bias = jnp.where(chosen.among_all(entries.shape[1]), 0.0, HIDDEN)[:, None]
    return ops.attention(
        q,
        entries[:, :, None],
        q.shape[-1],
        k_start=chosen.start,
        k_end=chosen.end,
        bias=bias,
        scale=scale,
        mask_hint=mask_hint,
        implementation=implementation,
        return_lse=True,
    )


def _gathered(q: Array, entries: Array, chosen: Chosen, scale: float) -> tuple[Array, Array]:
    """Attends to gathered entries, chunk by chunk of queries; the backward pass gathers again."""
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    # The gradients of an entry from several chunks are added up in float32.
    wide = entries.astype(dtype) if q.shape[1] > 1 else entries

    def step(carry, chunk):
        q, chosen = chunk
        keys = taken(wide, chosen.best, q.dtype)
        scores = scale * jnp.einsum("btnh,btkh->btnk", q, keys, preferred_element_type=dtype)
        seen = chosen.among_best()[:, :, None]
        scores = jnp.where(seen, scores, HIDDEN)
        some = seen.any(axis=-1)
        lse = jax.nn.logsumexp(scores, axis=-1)
        probs = jnp.where(seen, jnp.exp(scores - lse[..., None]), 0.0).astype(q.dtype)
        out = jnp.einsum("btnk,btkh->btnh", probs, keys)
        return carry, (out, jnp.where(some, lse, -jnp.inf))

    assert chosen.best is not None
    width = (q.shape[2] + q.shape[3]) * chosen.best.shape[2]
    return over_queries(jax.checkpoint(step), None, (q, chosen), per_query=width)[1]
