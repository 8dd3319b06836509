"""The loss of one block of logits and its gradient: the formulas that both implementations use."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

AxisName = str | tuple[str, ...]


class Options(NamedTuple):
    """Static parameters of the loss, as in `fused_linear_cross_entropy` and `fused_linear_log_probs`."""

    softcap: float | None
    z_loss: float
    label_smoothing: float
    axis_name: AxisName | None
    temperature: float = 1.0
    entropy: bool = False


class Terms(NamedTuple):
    """Per-token results; `entropy` is None unless `Options.entropy` is set."""

    token_loss: Float[Array, " M"]
    log_prob: Float[Array, " M"]
    lse: Float[Array, " M"]
    correct: Bool[Array, " M"]
    entropy: Float[Array, " M"] | None = None


class Cotangents(NamedTuple):
    """Gradients of the final result with respect to those of `Terms` that have one."""

    token_loss: Float[Array, " M"]
    log_prob: Float[Array, " M"]
    lse: Float[Array, " M"]
    entropy: Float[Array, " M"] | None = None


def logits_of(rows: Float[Array, "M D"], weight: Float[Array, "V D"], options: Options) -> Float[Array, "M V"]:
    """Computes the inputs of the softmax: `rows @ weight.T`, soft-capped, then divided by the temperature."""
    dtype = jnp.promote_types(rows.dtype, jnp.float32)
    logits = jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=dtype)
    logits = logits if options.softcap is None else options.softcap * jnp.tanh(logits / options.softcap)
    return logits if options.temperature == 1 else logits / options.temperature


def terms_of(logits: Float[Array, "M V"], targets: Int[Array, " M"], options: Options) -> Terms:
    """Computes the per-token terms of a block of logits, whose V columns may be one device's share of the vocabulary.

    With smoothing, `token_loss = lse - (1 - eps) z_target - eps mean(z)`; the z-loss adds `z_loss * lse^2`.
    """
    # Every sum or maximum over the vocabulary is first local, then over the devices of `axis`. The target's logit is on
    # exactly one device; the others contribute 0.
    axis = options.axis_name
    local = columns_of(targets, logits.shape[1], axis)
    here = (local >= 0) & (local < logits.shape[1])
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, logits.shape[1] - 1)[:, None], axis=1)[:, 0]
    top = _pmax(jax.lax.stop_gradient(jnp.max(logits, axis=1)), axis)
    shifted = logits - top[:, None]  # M V, at most 0
    exps = jnp.exp(shifted)
    mean = jnp.sum(logits, axis=1) if options.label_smoothing else None
    weighted = jnp.sum(exps * shifted, axis=1) if options.entropy else None
    sums = Sums(top, jnp.sum(exps, axis=1), jnp.where(here, picked, 0), mean, weighted)
    return _terms_of_sums(sums, targets, vocab_size(logits.shape[1], axis), options)


class Sums(NamedTuple):
    """Sums over columns of logits z, for each token; None if the options do not need one.

    Args:
        top: The largest logit, or a larger number.
        total: Sum of `exp(z - top)`.
        target: The target's logit, 0 if it is elsewhere.
        logits: Sum of the logits.
        weighted: Sum of `exp(z - top) (z - top)`.
    """

    top: Float[Array, " M"]
    total: Float[Array, " M"]
    target: Float[Array, " M"]
    logits: Float[Array, " M"] | None = None
    weighted: Float[Array, " M"] | None = None


def _terms_of_sums(sums: Sums, targets: Int[Array, " M"], vocab: int, options: Options) -> Terms:
    """Computes the per-token terms from each device's sums, whose `top` is the largest logit of all devices."""
    axis, eps, top = options.axis_name, options.label_smoothing, sums.top
    target_logit, total = _psum(sums.target, axis), _psum(sums.total, axis)
    # A target outside the vocabulary is on no device. NaN here reaches its loss, its log-probability and all gradients.
    lse = jnp.where((targets >= 0) & (targets < vocab), top + jnp.log(total), jnp.nan)
    token_loss = lse - target_logit
    if sums.logits is not None:
        token_loss = lse - (1 - eps) * target_logit - eps * _psum(sums.logits, axis) / vocab
    if options.z_loss:
        token_loss = token_loss + options.z_loss * lse**2
    entropy = None
    if sums.weighted is not None:  # H = lse - sum_v p_v z_v, with both sides shifted by the largest logit
        entropy = jnp.log(total) - _psum(sums.weighted, axis) / total
    return Terms(token_loss, target_logit - lse, lse, target_logit >= top, entropy)


def add_block(
    sums: Sums, logits: Float[Array, "M V"], columns: Int[Array, " M"], size: Int[Array, ""], options: Options
) -> Sums:
    """Adds a block of logits to the sums over those before it, which have no entropy.

    Args:
        sums: The sums; their `top` is `-inf` before the first block.
        logits: The block.
        columns: Column of each token's target, counted from the block's first one.
        size: Number of columns that count, the first ones; the others are padding.
        options: Static parameters of the loss.
    """
    column = jnp.arange(logits.shape[1])[None, :]
    top = jnp.maximum(sums.top, jnp.max(jnp.where(column < size, logits, -jnp.inf), axis=1))
    exps = jnp.where(column < size, jnp.exp(logits - top[:, None]), 0)
    total = sums.total * jnp.exp(sums.top - top) + jnp.sum(exps, axis=1)
    target = sums.target + jnp.sum(jnp.where((column == columns[:, None]) & (column < size), logits, 0), axis=1)
    if sums.logits is None:
        return Sums(top, total, target)
    return Sums(top, total, target, sums.logits + jnp.sum(jnp.where(column < size, logits, 0), axis=1))


def terms_of_blocks(sums: Sums, targets: Int[Array, " M"], vocab: int, options: Options) -> Terms:
    """Computes the per-token terms from the sums over all blocks of each device."""
    top = _pmax(sums.top, options.axis_name)
    sums = sums._replace(top=top, total=sums.total * jnp.exp(sums.top - top))
    return _terms_of_sums(sums, targets, vocab, options)


def logits_gradient(
    logits: Float[Array, "M V"],
    columns: Int[Array, " M"],
    vocab: int,
    terms: Terms,
    grads: Cotangents,
    options: Options,
) -> Float[Array, "M V"]:
    """Computes the gradient with respect to `rows @ weight.T`, before the soft-cap and the temperature.

    All results except the entropy are functions of the log-sum-exp, the target's logit and the mean logit, so three
    factors per token are enough. The gradient of the entropy is `dH/dz = -p (log p + H)`.

    Args:
        logits: Some columns of the logits.
        columns: Column of each token's target, counted from the first of these.
        vocab: Size of the whole vocabulary.
        terms: The per-token terms.
        grads: Their cotangents.
        options: Static parameters of the loss.
    """
    eps = options.label_smoothing
    # d lse / dz = p (the probabilities), d z_target / dz = one-hot, d mean / dz = 1 / V.
    of_lse = grads.token_loss * (1 + 2 * options.z_loss * terms.lse) - grads.log_prob + grads.lse
    # The sign: token_loss = lse - z_target, but log_prob = z_target - lse.
    of_target = grads.log_prob - (1 - eps) * grads.token_loss
    is_target = jnp.arange(logits.shape[1])[None, :] == columns[:, None]
    log_p, of_p = logits - terms.lse[:, None], of_lse[:, None]  # M V and M 1
    if terms.entropy is not None and grads.entropy is not None:
        of_p = of_p - grads.entropy[:, None] * (log_p + terms.entropy[:, None])  # M V
    out = of_p * jnp.exp(log_p) + jnp.where(is_target, of_target[:, None], 0)
    if eps:
        out = out - (eps / vocab) * grads.token_loss[:, None]
    if options.softcap is not None:  # tanh' = 1 - tanh^2, and tanh = logits * temperature / softcap
        out = out * (1 - (logits * (options.temperature / options.softcap)) ** 2)
    return out if options.temperature == 1 else out / options.temperature


def vocab_size(vocab: int, axis: AxisName | None) -> int:
    """Returns the size of the whole vocabulary, given that of one device of `axis`."""
    return vocab * (1 if axis is None else jax.lax.axis_size(axis))


def columns_of(targets: Int[Array, " M *K"], vocab: int, axis: AxisName | None) -> Int[Array, " M *K"]:
    """Converts targets to columns of this device's part of the vocabulary; other devices' are outside `[0, vocab)`."""
    return targets if axis is None else targets - vocab * jax.lax.axis_index(axis)


def _psum(x: Array, axis: AxisName | None) -> Array:
    return x if axis is None else jax.lax.psum(x, axis)


def _pmax(x: Array, axis: AxisName | None) -> Array:
    return x if axis is None else jax.lax.pmax(x, axis)
