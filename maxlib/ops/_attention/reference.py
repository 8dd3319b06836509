"""Reference attention: the specification against which every other implementation is tested."""

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.ad_checkpoint import checkpoint_name

from maxlib.ops._attention.inputs import AttentionInputs, Results


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
