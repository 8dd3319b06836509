"""The public losses and log-probabilities: they check their arguments and remove ignored tokens."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from maxlib.ops._cross_entropy.chunked import chunked, chunked_per_token
from maxlib.ops._cross_entropy.terms import AxisName, Options

IGNORED = -1, -100  # maxlib's targets without a loss, and those of Hugging Face's labels


class CrossEntropy(NamedTuple):
    """Result of `fused_linear_cross_entropy`: float32, differentiable, and 0 (False) where the target is ignored."""

    loss: Float[Array, ""]
    """Sum over tokens of `weights * token_loss`; differentiate this field, which is the fastest."""
    token_loss: Float[Array, "*B"]
    """Smoothed negative log-probability plus `z_loss * lse**2`, in nats."""
    log_prob: Float[Array, "*B"]
    """Log-probability of the target, without smoothing or z-loss."""
    lse: Float[Array, "*B"]
    """Log-sum-exp of the logits."""
    correct: Bool[Array, "*B"]
    """True if no other token has a higher logit than the target."""


class LogProbs(NamedTuple):
    """Result of `fused_linear_log_probs`: one value per token, 0 (False) where the target is ignored."""

    log_prob: Float[Array, "*B"]
    """Log-probability of the target at the temperature, float32 (float64 from float64)."""
    correct: Bool[Array, "*B"]
    """True if no other token has a higher logit than the target."""
    entropy: Float[Array, "*B"] | None = None
    """Entropy of the distribution in nats; None unless requested."""


def fused_linear_cross_entropy(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "*B"],
    *,
    weights: Float[Array, "*B"] | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    chunk: int | None = None,
    axis_name: AxisName | None = None,
) -> CrossEntropy:
    """Computes the cross-entropy of `hidden @ weight.T` against `targets`, a chunk of tokens at a time.

    The forward pass also computes the gradients of `.loss`, so logits are computed once; gradients of per-token fields
    compute them again. To train, put the normalisation into `weights` (`mask / mask.sum()`) and differentiate `.loss`.
    Matmuls run in the dtype of `hidden`. Logits and the gradient of `weight` accumulate in float32; gradients have the
    dtype of their argument. Temporary memory is `chunk * V` logits and one float32 `V D`. On TPU v6e, rows narrower
    than 2048 take a block of the vocabulary at a time: its logits stay in vector memory, and are computed twice.

        hidden, weight, targets = jnp.ones((2, 8, 64)), jnp.ones((1000, 64)), jnp.zeros((2, 8), jnp.int32)
        weights = jnp.full((2, 8), 1 / 16)  # a mean
        loss = ops.fused_linear_cross_entropy(hidden, weight, targets, weights=weights).loss

    Args:
        hidden: The model's output after its final norm, with any leading axes.
        weight: The unembedding, in Hugging Face's orientation.
        targets: The next tokens, of the shape of `hidden` without its last axis. -1 and -100 are ignored: they add
            exactly 0 to the loss and to every gradient, even if `hidden` is not finite. Any other target outside
            `[0, V)` is an error outside `jit`, and inside makes the loss and the gradients NaN.
        weights: Factor per token in `.loss`, 1 by default; to get a mean, divide by the number of targets here.
        softcap: Logits become `softcap * tanh(logits / softcap)`.
        z_loss: Factor of the squared log-sum-exp (PaLM, arXiv:2204.02311).
        label_smoothing: Probability mass spread evenly over the vocabulary.
        chunk: Tokens per chunk, by default 4096 on NVIDIA GPUs and 1024 elsewhere; at most 4096 where a block's logits
            stay in vector memory. Larger chunks are faster and need more memory; results differ only by rounding.
        axis_name: Inside `jax.shard_map`, the mesh axis (or axes) over which the rows of `weight` are split; `hidden`
            and `targets` are equal along it, and so are the results. Other axes are not named here: sum `.loss` over
            them.

    Raises:
        ValueError: Shapes disagree, an option is out of range, or (outside `jit`) a target is.
    """
    _check_shapes(hidden, weight, targets, weights)
    _check_options(softcap, z_loss, label_smoothing, chunk)
    if axis_name is None:
        _check_targets(targets, weight.shape[0])
    options = Options(softcap, z_loss, label_smoothing, axis_name)
    valid = is_learned(targets)
    weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights.astype(jnp.float32)
    # [*B, D] -> [M, D]. Ignored rows become zeros with weight 0, so that a NaN in them does not reach a gradient.
    rows = jnp.where(valid[..., None], hidden, 0).reshape(-1, hidden.shape[-1])
    ids, weights = jnp.where(valid, targets, 0).astype(jnp.int32), jnp.where(valid, weights, 0)
    loss, terms = chunked(rows, weight, ids.reshape(-1), weights.reshape(-1), chunk, options)
    per_token = terms.token_loss, terms.log_prob, terms.lse, terms.correct
    return CrossEntropy(loss, *(_where_valid(x, valid) for x in per_token))


def fused_linear_log_probs(
    hidden: Float[Array, "*B D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "*B"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int | None = None,
    axis_name: AxisName | None = None,
) -> LogProbs:
    """Computes `log_softmax(cap(hidden @ weight.T) / temperature)[targets]`, a chunk of tokens at a time.

    `log_prob` and `entropy` are differentiable with respect to `hidden` and `weight`; the backward pass computes the
    logits of each chunk again, so temporary memory is `chunk * V` logits and one float32 `V D`, as for
    `fused_linear_cross_entropy`. If the factor of each token is known in advance, that function needs one matmul less.

    Args:
        hidden: The model's output after its final norm, with any leading axes.
        weight: The unembedding, in Hugging Face's orientation.
        targets: The next tokens, of the shape of `hidden` without its last axis. Tokens with the target -1 or -100
            give 0 and have no gradient, even if `hidden` is not finite; any other target outside `[0, V)` gives NaN
            inside `jit`.
        temperature: Divisor of the logits after the soft-cap. For a policy, use the temperature of its sampler.
        softcap: Logits become `softcap * tanh(logits / softcap)`.
        entropy: True also computes the entropy `-sum_v p_v log p_v` of the same distribution.
        chunk: Tokens per chunk; results differ only by rounding.
        axis_name: Inside `jax.shard_map`, the mesh axis (or axes) over which the rows of `weight` are split, as in
            `fused_linear_cross_entropy`.

    Raises:
        ValueError: Shapes disagree, an option is out of range, or (outside `jit`) a target is.
    """
    _check_shapes(hidden, weight, targets, None)
    check_chunk(chunk)
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None; got {softcap}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive; got {temperature}. For greedy choices see `correct`")
    if axis_name is None:
        _check_targets(targets, weight.shape[0])
    options = Options(softcap, 0.0, 0.0, axis_name, float(temperature), entropy)
    valid = is_learned(targets)
    rows = jnp.where(valid[..., None], hidden, 0).reshape(-1, hidden.shape[-1])  # (prod(B), D)
    ids = jnp.where(valid, targets, 0).astype(jnp.int32).reshape(-1)
    terms = chunked_per_token(rows, weight, ids, chunk, options)
    entropies = None if terms.entropy is None else _where_valid(terms.entropy, valid)
    return LogProbs(_where_valid(terms.log_prob, valid), _where_valid(terms.correct, valid), entropies)


def is_learned(targets: Any) -> Any:
    """Returns True for each target that is not ignored, also for those outside the vocabulary, whose loss is NaN.

    Args:
        targets: Integers of any shape, as an array of JAX or of NumPy.
    """
    if jnp.issubdtype(targets.dtype, jnp.unsignedinteger):
        targets = targets.astype(jnp.int32)  # JAX compares -1 with an unsigned integer as its largest number
    return (targets != IGNORED[0]) & (targets != IGNORED[1])


def _where_valid(x: Array, valid: Bool[Array, "*B"]) -> Array:
    """Reshapes per-token results to the shape of the targets, 0 (False) at ignored targets."""
    return jnp.where(valid, x.reshape(valid.shape), jnp.zeros((), x.dtype))


def _check_shapes(hidden, weight, targets, weights) -> None:
    """Raises ValueError unless these are `*B D`, `V D`, integers `*B`, and None or `*B`."""
    if weight.ndim != 2 or hidden.ndim < 1 or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be '*B D' and weight 'V D' with the same D; got hidden {hidden.shape}, weight {weight.shape}"
        )
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(
            f"targets must have the shape '*B' of hidden '*B D', here {hidden.shape[:-1]}; got {targets.shape}"
        )
    if not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be integers; got {targets.dtype}")
    if weights is not None and weights.shape != targets.shape:
        raise ValueError(f"weights must have the shape '*B' of targets, {targets.shape}; got {weights.shape}")


def _check_options(softcap, z_loss, label_smoothing, chunk) -> None:
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive or None; got {softcap}")
    if z_loss < 0:
        raise ValueError(f"z_loss must not be negative; got {z_loss}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing must be in [0, 1]; got {label_smoothing}")
    check_chunk(chunk)


def check_chunk(chunk: int | None) -> None:
    """Raises ValueError for a chunk without tokens."""
    if chunk is not None and chunk < 1:
        raise ValueError(f"chunk must be at least 1 token; got {chunk}")


def _check_targets(targets, vocab: int) -> None:
    """Raises ValueError for a target outside the vocabulary, if targets are concrete and fully addressable."""
    if isinstance(targets, Tracer) or not getattr(targets, "is_fully_addressable", True):
        return
    host = np.asarray(targets)
    bad = host[is_learned(host) & ((host < 0) | (host >= vocab))]
    if bad.size:
        raise ValueError(
            f"targets must be in [0, {vocab}), or -1 (or -100) to be ignored; {bad.size} are not, the first is {bad[0]}"
        )
