"""Attention sinks, applied after attention so that kernels need no support for them."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_sinks(
    out: Float[Array, "B T N Hv"], lse: Float[Array, "B T N"], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Adds one logit per head that takes weight and has no value (GPT-OSS, https://arxiv.org/abs/2508.10925).

    The result is exact, and differentiable in `out`, `lse` and `sinks`.

    Args:
      out: output of attention without sinks.
      lse: log-sum-exp of its logits.
      sinks: the additional logit of each head.

    Returns:
      The output and the log-sum-exp with the sinks included.
    """
    # A softmax with one more logit is the old one times exp(lse) / (exp(lse) + exp(sink)) = sigmoid(lse - sink). It is
    # computed as an exponential, because the gradient of the sigmoid would lose the digits of a small sink.
    sink = jnp.broadcast_to(sinks.astype(lse.dtype)[None, None], lse.shape)
    # An empty row under a sink of -inf has the lowest number instead: neither it nor its gradient is NaN.
    lowest = jnp.finfo(lse.dtype).min
    seen = jnp.maximum(lse, lowest)
    total = jnp.logaddexp(seen, sink)
    keep = jnp.exp(seen - total)
    return (out * keep[..., None]).astype(out.dtype), jnp.where(total == lowest, -jnp.inf, total)
