"""Per-token log-probabilities, for losses that are functions of them: preferences, policies, distillation."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxlib.ops._cross_entropy.api import check_chunk, check_shapes, check_targets, is_learned, where_valid
from maxlib.ops._cross_entropy.chunked import chunked_per_token
from maxlib.ops._cross_entropy.terms import AxisName, Options


class LogProbs(NamedTuple):
    """Result of `fused_linear_log_probs`: one value per token, 0 (False) where the target is ignored."""

    log_prob: Float[Array, "*B"]
    """Log-probability of the target at the temperature, float32 (float64 from float64)."""
    correct: Bool[Array, "*B"]
    """True if no other token has a higher logit than the target."""
    entropy: Float[Array, "*B"] | None = None
    """Entropy of the distribution in nats; None unless requested."""


def fused_linear_log_probs(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "*B"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    ignore_index: int | None = None,
    chunk: int | None = None,
    axis_name: AxisName | None = None,
) -> LogProbs:
    """Computes `log_softmax(cap(hidden @ weight.T) / temperature)[targets]`, a chunk of tokens at a time.

    `log_prob` and `entropy` are differentiable with respect to `hidden` and `weight`; the backward pass computes the
    logits of each chunk again, so temporary memory is `chunk * V` logits and one float32 `V D`, as for
    `fused_linear_cross_entropy`. If the factor of each token is known in advance, that function needs one matmul less.

    Args:
        hidden: the model's output after its final norm, with any leading axes.
        weight: the unembedding, in Hugging Face's orientation.
        targets: the next tokens, of the shape of `hidden` without its last axis.
        temperature: divisor of the logits after the soft-cap. For a policy, use the temperature of its sampler.
        softcap: logits become `softcap * tanh(logits / softcap)`.
        entropy: True also computes the entropy `-sum_v p_v log p_v` of the same distribution.
        ignore_index: tokens with this target, -1 or -100 give 0 and have no gradient, even if `hidden` is not finite.
            Any other target outside `[0, V)` gives NaN inside `jit`.
        chunk: tokens per chunk; results differ only by rounding.
        axis_name: inside `jax.shard_map`, the mesh axis (or axes) over which the rows of `weight` are split, as in
            `fused_linear_cross_entropy`.

    Raises:
        ValueError: shapes disagree, an option is out of range, or (outside `jit`) a target is.
    """
    check_shapes(hidden, weight, targets, None)
    check_chunk(chunk)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None; got {softcap}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}. For greedy choices see `correct`")
    if axis_name is None:
        check_targets(targets, weight.shape[0], ignore_index)
    options = Options(softcap, 0.0, 0.0, axis_name, float(temperature), entropy)
    valid = is_learned(targets, ignore_index)
    rows = jnp.where(valid[..., None], hidden, 0).reshape(-1, hidden.shape[-1])  # (prod(B), D)
    ids = jnp.where(valid, targets, 0).astype(jnp.int32).reshape(-1)
    terms = chunked_per_token(rows, weight, ids, chunk, options)
    found = None if terms.entropy is None else where_valid(terms.entropy, valid)
    return LogProbs(where_valid(terms.log_prob, valid), where_valid(terms.correct, valid), found)
