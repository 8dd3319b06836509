"""The training loss of policies, for models, and the published methods as options of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float

from maxlib import ops
from maxlib.inference import Sampler
from maxlib.inference._sampling import check_scored
from maxlib.post_training import policies
from maxlib.post_training._preference_losses import no_reference, referenced
from maxlib.post_training.policies import CISPO, KL, Clip, Correction, FixedLengthMean, Ratio
from maxlib.training._objectives.objective import Objective, Stats, scores, unwrap

_READS = "advantages", "old_log_probs", "reference_log_probs", "sampler", "sampler_log_probs"


@referenced(reads=_READS)
def policy_loss(
    head: Any,
    hidden: Float[Array, "B T D"],
    batch: dict[str, Any],
    *,
    surrogate: Clip | CISPO = Clip(),
    ratio: Ratio = "token",
    mean: policies.Mean = "sequence",
    kl_term: KL | None = None,
    entropy: float = 0.0,
    correction: Correction | None = None,
    temperature: float = 1.0,
) -> tuple[Float[Array, ""], Stats]:
    """Computes the loss of sampled completions with advantages; they may be packed.

    Call it as `policy_loss(model, batch, key, *, reference, dtype, remat, **options)`. All terms and metrics are
    weighted by `mean`, so results do not depend on microbatches, devices and packing. Metrics: `entropy`, `ratio`,
    `clip_ratio/low`, `clip_ratio/high`, `clip_ratio/region`, and `kl`, `sampler_weight` if they exist. The value of the
    loss itself is not informative: for an on-policy step it is 0.

    Args:
        head: The model.
        hidden: Its last hidden states.
        batch: `tokens`, `targets` (-1 outside of completions), `advantages` (`B T`, or `B` for one completion a row);
            `old_log_probs`, log-probabilities under the sampling policy: required for every step after the first on the
            same completions, otherwise ρ is 1 and nothing is clipped; `reference_log_probs` for a KL term;
            `sampler_log_probs`, reported by another engine, for a correction; `sampler`, the sampler.
        surrogate: `Clip` or `CISPO`.
        ratio: Unit of ρ: "token", "sequence", "sequence_token" or "sequence_sum" (`policy_ratio`).
        mean: Average over token losses (`mean_weights`).
        kl_term: Divergence from the reference as a part of the loss.
        entropy: Factor of the entropy bonus.
        correction: Importance weights for a sampler with different probabilities.
        temperature: Temperature of the sampler.

    Raises:
        ValueError: when the batch lacks inputs of an option, or its `sampler` has another temperature, or filters; for
            advantages of shape `B` if a row has several completions, which inside `jit` makes the loss NaN.
    """
    if "sampler" in batch:
        check_scored(batch["sampler"], temperature)
    if "advantages" not in batch:
        raise ValueError(f"a policy loss needs batch['advantages'] (group_advantages), got {sorted(batch)}")
    if kl_term is not None and "reference_log_probs" not in batch:
        raise ValueError(no_reference("the KL term"))
    if correction is not None and "sampler_log_probs" not in batch:
        raise ValueError("a correction needs batch['sampler_log_probs'], which the sampler reported")
    segment_ids, mask = batch.get("segment_ids"), ops.is_learned(batch["targets"])
    scored = scores(head, hidden, batch["targets"], temperature=temperature, entropy=True)
    rho = policies.policy_ratio(scored.log_prob, batch.get("old_log_probs"), mask, segment_ids, by=ratio)
    losses, metrics = _token_losses(scored, rho, batch, mask, surrogate, kl_term, entropy, correction)
    weights, count = policies.mean_weights(mask, segment_ids, by=mean)
    # Metrics are means whose weights sum to the count, unlike the weights of a fixed length.
    even = policies.mean_weights(mask, segment_ids)[0] if isinstance(mean, FixedLengthMean) else weights
    total = lambda weights, x: jnp.sum(weights * jnp.where(mask, x, 0))
    sums = {name: total(even, value) for name, value in metrics.items()}
    return total(weights, losses), jax.lax.stop_gradient(Stats(count, sums))


def _token_losses(scored, rho, batch, mask, surrogate, kl_term, entropy, correction) -> tuple[Array, dict[str, Array]]:
    """Computes the loss of each token with all its terms, and the metrics of each token."""
    log_prob = scored.log_prob
    advantages = jnp.where(mask, _by_token(batch["advantages"], mask, batch.get("segment_ids")), 0)
    losses, low, high = surrogate(rho, advantages, log_prob)
    metrics = {"ratio": rho, "entropy": scored.entropy}
    metrics |= {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": low | high}
    if correction is not None:
        trained = batch.get("old_log_probs", jax.lax.stop_gradient(log_prob))
        weight = correction(trained, batch["sampler_log_probs"], mask, batch.get("segment_ids"))
        losses, metrics = losses * weight, metrics | {"sampler_weight": weight}
    if kl_term is not None:  # not multiplied by the sampler's weight
        reference = jnp.where(mask, batch["reference_log_probs"], 0)
        divergence = kl_term(log_prob, reference, rho)
        losses, metrics = losses + kl_term.beta * divergence, metrics | {"kl": divergence}
    return losses - entropy * scored.entropy, metrics


def _by_token(advantages: Array, mask: Array, segment_ids: Array | None) -> Array:
    """Broadcasts each completion's advantage to its tokens."""
    if advantages.ndim > 1:
        return advantages
    wide = jnp.broadcast_to(advantages[:, None], mask.shape)
    if segment_ids is None:
        return wide
    first = jnp.min(jnp.where(mask, segment_ids, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
    several = jnp.max(jnp.where(mask, segment_ids, 0), axis=1, keepdims=True) > first
    if not isinstance(several, Tracer) and several.any():
        raise ValueError(
            "rows hold several completions, but batch['advantages'] one number for each row: give it as B T"
        )
    return jnp.where(several, jnp.nan, wide)


grpo = functools.partial(policy_loss, surrogate=Clip(0.2, 0.2), mean="sequence")
"""GRPO (arXiv:2402.03300). Its mean favors long answers among wrong ones.

    loss = functools.partial(post_training.grpo, temperature=1.0)
    trainer = training.Trainer(model, optimizer=training.adamw(1e-6), loader=loader, loss=loss)
"""
dapo = functools.partial(policy_loss, surrogate=Clip(0.2, 0.28), mean="token")
"""DAPO (arXiv:2503.14476): a higher upper clip, and an average over all tokens of the batch."""
gspo = functools.partial(policy_loss, surrogate=Clip(3e-4, 4e-4), ratio="sequence", mean="sequence")
"""GSPO (arXiv:2507.18071): one ratio for each sequence."""
cispo = functools.partial(policy_loss, surrogate=CISPO(5.0), mean="token")
"""CISPO (arXiv:2506.13585): limits the weight of a token, not its gradient."""
rloo = functools.partial(policy_loss, surrogate=Clip(0.2, 0.2), ratio="sequence_sum", mean="sequence")
"""RLOO (arXiv:2402.14740), with the advantages of `leave_one_out`."""


def dr_grpo(length: int) -> functools.partial:
    """Returns Dr. GRPO (arXiv:2503.20783), with the advantages of `group_advantages(rewards, scale=None)`.

    Args:
        length: The longest completion allowed.
    """
    return functools.partial(policy_loss, surrogate=Clip(0.2, 0.2), mean=FixedLengthMean(length))


def check_sampler(loss: Any, sampler: Sampler) -> None:
    """Checks before a run what the loss checks if the batch has the `sampler`: that it scores what that draws.

    Args:
        loss: A policy loss, possibly wrapped in `functools.partial` and other losses.
        sampler: The sampler of completions.

    Raises:
        ValueError: when temperatures differ, or the sampler filters tokens, so that ratios lack the lost mass.
        TypeError: when `loss` is a function that hides its options.
    """
    inner, options = unwrap(loss)
    if not isinstance(inner, Objective):
        raise TypeError(f"check_sampler needs a policy loss, but the options of {inner!r} are not visible")
    check_scored(sampler, options.get("temperature", 1.0))
