"""Attention sinks as a step after attention, so that no kernel needs to know about them."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_sinks(
    out: Float[Array, "B T N Hv"], lse: Float[Array, "B T N"], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Adds one logit per head that takes weight and gives no value (GPT-OSS).

    Exact, and differentiable wherever the attention is differentiable in `out` and `lse`: a softmax with one more logit
    is the old one times `sigmoid(lse - sink)`. (Written as an exponential, whose gradient does not lose the digits of a
    small sink.)
    """
    sink = jnp.broadcast_to(sinks.astype(lse.dtype)[None, None], lse.shape)
    seen = jnp.where(jnp.isfinite(lse), lse, jnp.finfo(lse.dtype).min)  # an empty row minus a sink of -inf is no NaN
    keep = jnp.exp(seen - jnp.logaddexp(seen, sink))
    return (out * keep[..., None]).astype(out.dtype), jnp.logaddexp(lse, sink)
