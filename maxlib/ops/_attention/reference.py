"""Reference attention: the specification against which every other implementation is tested, and their arguments."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.ops._attention.masks import MaskHint

Results = tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]
"""The output, and the log-sum-exp of each row's logits; None where an implementation does not differentiate it."""


class AttentionInputs(NamedTuple):
    """Arguments of an implementation of attention, which `ops.attention` has checked.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        start: Index of the first key that each query attends to.
        end: One past the index of the last key; it may be out of range.
        scale: Factor on the products of queries and keys.
        softcap: Bound of the logits, or None.
        sinks: An extra logit per head, without a value.
        bias: Added to the logits.
        mask_hint: Static description of the intervals, for implementations that take it.
    """

    q: Float[Array, "B T N Hk"]
    k: Float[Array, "B S K Hk"]
    v: Float[Array, "B S K Hv"]
    start: Int[Array, "B T"]
    end: Int[Array, "B T"]
    scale: float
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    bias: Float[Array, "#B #N T S"] | None = None
    mask_hint: MaskHint | None = None


def reference(x: AttentionInputs) -> Results:
    """Returns the output and the log-sum-exp of each row's logits (sink included; `-inf` for empty rows)."""
    q, k, v, sinks = x.q, x.k, x.v, x.sinks
    S, K, compute = *k.shape[1:3], jnp.promote_types(q.dtype, jnp.float32)
    # Group the query heads of each key head instead of repeating keys: N = K * G.
    queries = rearrange(q.astype(compute), "B T (K G) H -> B T K G H", K=K)
    logits = x.scale * jnp.einsum("BTKGH,BSKH->BKGTS", queries, k.astype(compute))
    logits = rearrange(logits, "B K G T S -> B (K G) T S")
    if x.softcap is not None:
        logits = x.softcap * jnp.tanh(logits / x.softcap)
    if x.bias is not None:
        logits = logits + x.bias.astype(compute)
    keys = jnp.arange(S)[None, None]
    visible = (x.start[..., None] <= keys) & (keys < x.end[..., None])  # B T S
    logits = jnp.where(visible[:, None], logits, -jnp.inf)
    sink = jnp.full((), -jnp.inf, compute) if sinks is None else sinks.astype(compute)
    # The sink is an extra logit of the softmax without a value: it only enters the maximum and the total.
    sink = jnp.broadcast_to(sink.reshape(1, -1, 1, 1), (*logits.shape[:3], 1))

    # The peak only changes the range of the exponentials, so it needs no gradient. Rows without a visible key must
    # avoid infinities: a NaN in the discarded branch of `where` would still reach the gradient.
    peak = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sink))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True) + jnp.exp(sink - peak)
    safe = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
    probs = rearrange(checkpoint_name(weights / safe, "attention_pattern"), "B (K G) T S -> B K G T S", K=K)
    out = rearrange(jnp.einsum("BKGTS,BSKH->BTKGH", probs, v.astype(compute)), "B T K G H -> B T (K G) H")
    return out.astype(q.dtype), rearrange(lse[..., 0], "B N T -> B T N")
