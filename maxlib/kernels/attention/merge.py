"""Merging of softmaxes over different keys, and with a sink, by their log-sum-exps."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_parts(
    outs: Float[Array, "P *rows Hv"], lses: Float[Array, " P *rows"]
) -> tuple[Float[Array, "*rows Hv"], Float[Array, "*rows"]]:
    """Merges attention over P disjoint parts of the keys; differentiable, also for a row without a visible key.

    Args:
        outs: Output of each part, normalised over its own keys.
        lses: Log-sum-exp of the logits of each part.

    Returns:
        The output and the log-sum-exp over all keys; zeros and `-inf` for a row without a visible key in any part.
    """
    # out = sum_p exp(lse_p) out_p / sum_p exp(lse_p), shifted by the largest lse so that no exponential overflows.
    # It only changes the range of the exponentials, so it needs no gradient.
    peak = jax.lax.stop_gradient(jnp.max(lses, axis=0, keepdims=True))
    peak = jnp.where(jnp.isfinite(peak), peak, 0.0)
    weights = jnp.exp(lses - peak)  # [P, *rows]
    total = weights.sum(axis=0)
    safe = jnp.where(total > 0, total, 1.0)
    out = jnp.sum(weights[..., None] * outs, axis=0) / safe[..., None]
    return out, jnp.where(total > 0, peak[0] + jnp.log(safe), -jnp.inf)


def merge_sinks(
    out: Float[Array, "B T N Hv"], lse: Float[Array, "B T N"], sinks: Float[Array, " N"]
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Adds one logit per head that takes weight and has no value (GPT-OSS, https://arxiv.org/abs/2508.10925).

    The result is exact, and differentiable in `out`, `lse` and `sinks`.

    Args:
        out: Output of attention without sinks.
        lse: Log-sum-exp of its logits.
        sinks: The additional logit of each head.

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


def sinks_gradient(
    sinks: Float[Array, " N"],
    out: Float[Array, "B T N Hv"],
    lse: Float[Array, "B T N"],
    d_out: Float[Array, "B T N Hv"],
) -> Float[Array, " N"]:
    """Returns the gradient of the sinks: a sink takes `exp(sink - lse)` of a row's weights, and has no value.

    Args:
        sinks: The additional logit of each head.
        out: Output with the sinks included.
        lse: Log-sum-exp with the sinks included.
        d_out: Gradient of the output.
    """
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)  # [B, T, N]
    share = jnp.exp(sinks.astype(jnp.float32)[None, None] - lse)
    return -jnp.sum(share * delta, axis=(0, 1)).astype(sinks.dtype)
