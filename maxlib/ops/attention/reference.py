"""Attention as it is defined, in one screen: the specification every other implementation is tested against."""

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float, Int


def reference(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns the output and the log-sum-exp of each row's logits (sink included; `-inf` for empty rows)."""
    K, S = k.shape[2], k.shape[1]
    compute = jnp.promote_types(q.dtype, jnp.float32)
    logits = jnp.einsum(
        "BTKGH,BSKH->BKGTS", rearrange(q, "B T (K G) H -> B T K G H", K=K), k, preferred_element_type=compute
    )
    logits = rearrange(logits * scale, "B K G T S -> B (K G) T S")
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    if bias is not None:
        logits = logits + bias.astype(compute)
    keys = jnp.arange(S)[None, None, :]
    visible = (k_start[:, :, None] <= keys) & (keys < k_end[:, :, None])  # B T S
    logits = jnp.where(visible[:, None], logits, -jnp.inf)

    peak = jnp.max(logits, axis=-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sink = sinks.astype(compute)[None, :, None, None]
        peak = jnp.maximum(peak, sink)
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(logits - peak)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sink - peak)
    seen = total > 0
    probs = weights / jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, jnp.log(jnp.where(seen, total, 1.0)) + peak, -jnp.inf)
    out = jnp.einsum("BKGTS,BSKH->BTKGH", rearrange(probs, "B (K G) T S -> B K G T S", K=K).astype(v.dtype), v)
    return rearrange(out, "B T K G H -> B T (K G) H"), rearrange(lse[..., 0], "B N T -> B T N")
