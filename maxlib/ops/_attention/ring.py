"""Ring attention: keys are split over devices and sent around a ring; queries stay (Liu et al., arXiv:2310.01889).

Each device receives every part of the keys once, computes attention over that part with any implementation, and merges
the results by their log-sum-exps. The backward pass sends the keys around once more, together with the sums of dk and
dv, so no device ever holds more than two parts. Tiles outside the intervals are skipped.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from maxlib.kernels.attention.merge import merge_parts, merge_sinks
from maxlib.ops._attention.api import attention
from maxlib.ops._attention.masks import MaskHint, StaticMask


class _Ring(NamedTuple):
    """Static parameters; `pieces` as in `ring_attention`, `options` for `ops.attention`."""

    axis: str
    pieces: int
    mask: StaticMask | None
    options: tuple[tuple[str, Any], ...]


def ring_attention(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    mask_hint: MaskHint | None = None,
    axis_name: str,
    pieces: int = 1,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T N Hv"]:
    """Computes `attention` inside `jax.shard_map`, where every device of `axis_name` holds some queries and some keys.

    Differentiable once (reverse mode) in q, k, v and sinks.

    Args:
        q: This device's queries.
        k: This device's part of the keys.
        v: This device's part of the values.
        k_start: First key of each query, as an index into the whole key array of all devices.
        k_end: One past the last key of each query.
        mask_hint: As in `attention`, for the whole sequence; segments are those of this device's queries and keys.
        axis_name: Mesh axis over which keys are split.
        pieces: 1 if device `i` of `n` holds the `i`-th part of the keys. 2 if it holds the `i`-th and the `i`-th last
            of `2 n` parts (`sharding.layers.zigzag`), which gives all devices the same work under a causal mask.
        scale: As in `attention`.
        softcap: As in `attention`.
        sinks: As in `attention`.
        implementation: As in `attention`; it runs on each part.

    Returns:
        The output for this device's queries, over the keys of all devices.

    Raises:
        ValueError: When `pieces` is neither 1 nor 2, or does not divide the device's number of keys.
    """
    if pieces not in (1, 2) or k.shape[1] % pieces:
        raise ValueError(
            f"ring_attention: pieces must be 1 or 2 and divide this device's keys, got {pieces} and {k.shape[1]}"
        )
    static, segment_ids = (None, None) if mask_hint is None else mask_hint
    static = None if static is None else dataclasses.replace(static, aligned=False)
    options = {"scale": scale, "softcap": softcap, "implementation": implementation}
    ring = _Ring(axis_name, pieces, static, tuple(options.items()))
    out, lse = _attend(ring, q, k, v, k_start, k_end, segment_ids or ())
    return out if sinks is None else merge_sinks(out, lse, sinks)[0]


def _attend(ring: _Ring, q, k, v, k_start, k_end, segment_ids):
    """Returns the output and the log-sum-exp over the keys of all devices."""

    def meet(step, carry):
        k, v, ids, out, lse = carry  # ids: segments of the keys, (B S,) or ()
        following = _pass_on(ring, (k, v, ids))  # this transfer overlaps with the attention below
        part = _part(ring, step, q, k, v, k_start, k_end, (*segment_ids[:1], *ids))
        out, lse = _merged([(out, lse), part])
        return *following, out, lse

    wide = jnp.promote_types(q.dtype, jnp.float32)
    none = jnp.zeros((*q.shape[:-1], v.shape[-1]), wide), jnp.full(q.shape[:-1], -jnp.inf, wide)
    *_, out, lse = _around(ring, meet, (k, v, segment_ids[1:], *none))
    return out.astype(q.dtype), lse


def _forward(ring: _Ring, *args):
    out, lse = _attend(ring, *args)
    return (out, lse), (*args, out, lse)


def _backward(ring: _Ring, residuals, cotangents):
    q, k, v, k_start, k_end, segment_ids, out, lse = residuals
    wide = lse.dtype
    d_out, d_lse = (x.astype(wide) for x in cotangents)
    delta = jnp.sum(d_out * out.astype(wide), axis=-1) - d_lse  # [B, T, N], as in FlashAttention

    def meet(step, carry):
        k, v, ids, dq, dk, dv = carry
        following = _pass_on(ring, (k, v, ids))

        def attend(q, k, v):
            return _part(ring, step, q, k, v, k_start, k_end, (*segment_ids[:1], *ids))

        (out_p, lse_p), pull = jax.vjp(attend, q, k, v)
        # out = sum_p w_p out_p with w_p = exp(lse_p - lse), so d_out_p = w_p d_out. The weights depend on all parts,
        # which gives d_lse_p = w_p (d_out . out_p - delta).
        weight = jnp.exp(jnp.where(lse_p > -jnp.inf, lse_p - lse, -jnp.inf))
        d_out_p = weight[..., None] * d_out
        d_lse_p = jnp.sum(d_out_p * out_p.astype(wide), axis=-1) - weight * delta
        gradients = pull((d_out_p.astype(out_p.dtype), d_lse_p))
        dq, dk, dv = (total + x.astype(wide) for total, x in zip((dq, dk, dv), gradients, strict=True))
        return *following, dq, *_pass_on(ring, (dk, dv))  # dk and dv travel with their keys

    zeros = [jnp.zeros(x.shape, wide) for x in (q, k, v)]
    *_, dq, dk, dv = _around(ring, meet, (k, v, segment_ids[1:], *zeros))
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


def _around(ring: _Ring, meet, carry: tuple[Any, ...]) -> tuple[Any, ...]:
    """Runs all n steps of the ring; afterwards every array that was sent around is back on its device."""
    return lax.fori_loop(0, lax.axis_size(ring.axis), meet, carry)


def _pass_on(ring: _Ring, arrays):
    """Sends the arrays to the next device of the ring."""
    n = lax.axis_size(ring.axis)
    return lax.ppermute(arrays, ring.axis, [(i, (i + 1) % n) for i in range(n)])


def _part(ring: _Ring, step, q, k, v, k_start, k_end, segment_ids) -> tuple[Array, Array]:
    """Computes attention over the keys that this device holds in `step`, and its log-sum-exp."""
    n, size = lax.axis_size(ring.axis), k.shape[1] // ring.pieces
    # After `step` transfers to the next device, this device holds the keys of the device `step` places before it.
    owner = (lax.axis_index(ring.axis) - step) % n
    parts = []
    for piece, first in enumerate((owner, 2 * n - 1 - owner)[: ring.pieces]):
        # Convert global bounds to indices into this piece. They may be out of range, because a window counts from its
        # end.
        start, end = (bound - first * size for bound in (k_start, k_end))
        keys, values, *ids = (
            lax.slice_in_dim(x, piece * size, (piece + 1) * size, axis=1) for x in (k, v, *segment_ids[1:])
        )
        segments: Any = (*segment_ids[:1], *ids) or None  # of the queries, and of these keys
        hint = None if ring.mask is None else MaskHint(ring.mask, segments)
        options = dict(ring.options)
        parts.append(attention(q, keys, values, k_start=start, k_end=end, mask_hint=hint, return_lse=True, **options))
    return parts[0] if len(parts) == 1 else _merged(parts)


def _merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """Returns one softmax over the keys of all parts, in float32 or wider."""
    outs, lses = zip(*parts, strict=True)
    return merge_parts(jnp.stack([out.astype(lses[0].dtype) for out in outs]), jnp.stack(lses))
