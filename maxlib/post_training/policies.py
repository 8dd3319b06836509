"""Losses of policies. Shapes: B rows, T tokens; sequences are the segments of packed rows.

Notation: ℓ is the log-probability of a sampled token at the sampler's temperature, A its advantage, ρ the ratio of the
policy to the one that sampled, m the mask of completion tokens.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, NamedTuple, Union, cast, get_args

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float

from maxlib import nn, ops
from maxlib._utils.arguments import check_choice
from maxlib.inference import Sampler
from maxlib.post_training._reference import ReferencedLoss, missing_reference
from maxlib.post_training._segments import MAX_LOG_RATIO, Segments, is_filled, segment_sums, spread, token_counts
from maxlib.training.losses import Batch, Stats, score

Ratio = Literal["token", "sequence", "sequence_token", "sequence_sum"]
Mean = Union[Literal["sequence", "token"], "FixedLengthMean"]
Tokens = Float[Array, "B T"]
Mask = Bool[Array, "B T"]
stop = jax.lax.stop_gradient


class Surrogate(NamedTuple):
    """Result of `Clip` and its like: each token's loss, and if its ratio was clipped from below or above."""

    loss: Tokens
    low: Mask
    high: Mask


TokenSurrogate = Callable[[Tokens, Tokens, Tokens], Surrogate]  # of ρ, A and ℓ


@dataclasses.dataclass(frozen=True)
class Clip:
    """-min(ρ A, clip(ρ, 1 - low, 1 + high) A), PPO's clipped objective (arXiv:1707.06347).

    Args:
        low: Distance below 1 at which ρ is clipped.
        high: Distance above 1; DAPO has 0.28 ("clip higher").
        delta: Upper limit of the unclipped ρ, for the two-sided clip (arXiv:2505.07291); None for none.
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None

    def __call__(self, ratio: Tokens, advantages: Tokens, log_prob: Tokens) -> Surrogate:
        """Computes the loss of each token."""
        clipped = jnp.clip(ratio, 1 - self.low, 1 + self.high)
        ratio = ratio if self.delta is None else jnp.minimum(ratio, self.delta)
        loss = -jnp.minimum(ratio * advantages, clipped * advantages)
        return Surrogate(loss, (ratio < 1 - self.low) & (advantages < 0), (ratio > 1 + self.high) & (advantages > 0))


@dataclasses.dataclass(frozen=True)
class TruncatedWeight:
    """-sg(min(ρ, limit)) A ℓ (MiniMax-M1, arXiv:2506.13585): every token keeps a gradient.

    Args:
        limit: The maximum of ρ itself, not its distance from 1.
    """

    limit: float = 5.0

    def __call__(self, ratio: Tokens, advantages: Tokens, log_prob: Tokens) -> Surrogate:
        """Computes the loss of each token."""
        loss = -stop(jnp.minimum(ratio, self.limit)) * advantages * log_prob
        return Surrogate(loss, jnp.zeros_like(ratio, bool), (ratio > self.limit) & (advantages > 0))


@dataclasses.dataclass(frozen=True)
class SoftGate:
    """-4/τ σ(τ (ρ - 1)) A (SAPO, arXiv:2511.20347): the gradient of a token fades as ρ leaves 1, and never ends.

    Args:
        positive: τ of tokens with an advantage above 0.
        negative: τ of all others.
    """

    positive: float = 1.0
    negative: float = 1.05

    def __call__(self, ratio: Tokens, advantages: Tokens, log_prob: Tokens) -> Surrogate:
        """Computes the loss of each token."""
        tau = jnp.where(advantages > 0, self.positive, self.negative)
        nowhere = jnp.zeros_like(ratio, bool)
        return Surrogate(-4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantages, nowhere, nowhere)


@dataclasses.dataclass(frozen=True)
class GammaWeight:
    """-sg(φ(ρ)) A ℓ with φ(ρ) = ρ^k e^(λ (1 - ρ)) (VESPO, arXiv:2602.10693): a weight that falls on both sides of 1.

    Args:
        positive: k and λ of tokens with an advantage of at least 0.
        negative: k and λ of all others.
    """

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __call__(self, ratio: Tokens, advantages: Tokens, log_prob: Tokens) -> Surrogate:
        """Computes the loss of each token."""
        k, scale = (jnp.where(advantages >= 0, *both) for both in zip(self.positive, self.negative, strict=True))
        ratio = stop(jnp.clip(ratio, 1e-8, math.exp(20)))
        weight = jnp.exp(k * jnp.log(ratio) + scale * (1 - ratio))
        nowhere = jnp.zeros_like(ratio, bool)
        return Surrogate(-weight * advantages * log_prob, nowhere, nowhere)


@dataclasses.dataclass(frozen=True)
class ProbabilityClip:
    """-ρ A + c log²ρ, the first term without tokens whose probability moved far with A (DPPO, arXiv:2602.04879).

    p - p/ρ is how far a token's probability moved from the sampler's, so it takes ρ of tokens.

    Args:
        low: Largest fall of the probability of a token with A < 0.
        high: Largest rise of the probability of a token with A > 0.
        penalty: c, the factor of the squared log ratio.
    """

    low: float = 0.2
    high: float = 0.2
    penalty: float = 1e-3

    def __call__(self, ratio: Tokens, advantages: Tokens, log_prob: Tokens) -> Surrogate:
        """Computes the loss of each token."""
        ratio = jnp.maximum(ratio, math.exp(-MAX_LOG_RATIO))
        moved = jnp.exp(log_prob) * (1 - 1 / ratio)
        low, high = (moved < -self.low) & (advantages < 0), (moved > self.high) & (advantages > 0)
        loss = jnp.where(low | high, 0, -ratio * advantages) + self.penalty * jnp.log(ratio) ** 2
        return Surrogate(loss, low, high)


@dataclasses.dataclass(frozen=True)
class KL:
    """Divergence from the reference as a term of the loss, per token, with d = log p_reference - ℓ.

    Differentiated on samples of the policy π, "k3" (e^d - d - 1) has the gradient of KL(reference ‖ π), while "k2"
    (d²/2) and "corrected" (ρ times k3) have the gradient of KL(π ‖ reference). e^d takes d of at most 40. The plain -d
    (k1) has no gradient in expectation, so it is not available here; use it as a part of the reward
    (`advantages.kl_penalized`).

    Args:
        beta: Factor of the term.
        kind: The estimator.
    """

    beta: float = 0.04
    kind: Literal["k3", "k2", "corrected"] = "k3"

    def __post_init__(self):
        check_choice("kind", self.kind, ("k2", "k3", "corrected"), "k1 has no gradient in expectation")

    def __call__(self, log_prob: Tokens, reference: Tokens, ratio: Tokens | None = None) -> Tokens:
        """Estimates the divergence at each token, without `beta`; `ratio` is ρ, None for an on-policy step."""
        d = reference - log_prob
        if self.kind == "k2":
            return d**2 / 2
        d = jnp.minimum(d, MAX_LOG_RATIO)
        k3 = jnp.exp(d) - d - 1
        return k3 if self.kind == "k3" else k3 * (jnp.exp(log_prob - stop(log_prob)) if ratio is None else ratio)


def policy_ratio(
    log_prob: Tokens, old: Tokens | None, mask: Mask, segment_ids: Segments, *, by: Ratio = "token"
) -> Tokens:
    """Computes ρ of each token, at most e^40 and constant there: what multiplies ρ, such as an advantage of 0, finds a
    finite number.

    Args:
        log_prob: Log-probabilities under the policy.
        old: Log-probabilities under the sampling policy; None if it is the same policy; then ρ is 1 but has a gradient.
        mask: True for tokens of completions.
        segment_ids: Sequences of packed rows, or None.
        by: "token"; "sequence", the geometric mean over the sequence (GSPO, arXiv:2507.18071); "sequence_token", the
            same with separate gradients for each token (GSPO-token); "sequence_sum", the product over the sequence
            (RLOO).

    Returns:
        ρ, equal for all tokens of a sequence unless `by` is "token".
    """
    check_choice("by", by, get_args(Ratio))
    log_ratio = jnp.where(mask, log_prob - (stop(log_prob) if old is None else old), 0)
    if by == "token":
        return _ratio(log_ratio)
    total = segment_sums(log_ratio, segment_ids)  # [B, T] -> [B, S]
    if by != "sequence_sum":
        total = total / jnp.maximum(token_counts(mask, segment_ids), 1)
    of_sequence = spread(total, segment_ids, mask.shape[1])  # [B, S] -> [B, T]
    if by == "sequence_token":
        of_sequence = stop(of_sequence) + log_prob - stop(log_prob)
    return _ratio(of_sequence)


def _ratio(log_ratio: Tokens) -> Tokens:
    return jnp.exp(jnp.minimum(log_ratio, MAX_LOG_RATIO))


@dataclasses.dataclass(frozen=True)
class RolloutCorrection:
    """Importance weights for tokens of a sampler whose probabilities differ from the trainer's, such as another engine.

    `RolloutCorrection("token", 0.5, 5.0, "zero")` is IcePop's mask.

    Args:
        by: Ratio of each "token", of the whole "sequence" (the product over its tokens), or None for weights of 1.
        low: Smallest ratio, None for none.
        high: Largest ratio, None for none.
        outside: "clip" (TIS, truncated importance sampling) or "zero" (MIS, masked).
        keep: Sequences whose geometric mean of token ratios is outside of this range get the weight 0, as in verl's
            rejection sampling, which takes `(0.999, 1.001)`; None keeps all.
    """

    by: Literal["token", "sequence"] | None = "token"
    low: float | None = None
    high: float | None = 2.0
    outside: Literal["clip", "zero"] = "clip"
    keep: tuple[float, float] | None = None

    def __post_init__(self):
        check_choice("by", self.by, ("token", "sequence", None))
        check_choice("outside", self.outside, ("clip", "zero"))
        for low, high in ((self.low, self.high), self.keep or (None, None)):
            if low is not None and high is not None and not low <= high:
                raise ValueError(f"the smallest ratio must not exceed the largest, got {low} and {high}")

    def __call__(self, trained: Tokens, sampler: Tokens, mask: Mask, segment_ids: Segments) -> Tokens:
        """Computes the constant weight of each token; a NaN log-probability counts as equal.

        Args:
            trained: Log-probabilities under the trainer's program and the weights that sampled.
            sampler: Log-probabilities that the sampler reported.
            mask: True for tokens of completions.
            segment_ids: Sequences of packed rows, or None.
        """
        log_ratio = stop(jnp.nan_to_num(jnp.where(mask, trained - sampler, 0), nan=0.0))
        total = spread(segment_sums(log_ratio, segment_ids), segment_ids, mask.shape[1])
        ratio = {"token": _ratio(log_ratio), "sequence": _ratio(total), None: jnp.ones_like(total)}[self.by]
        low, high = 0.0 if self.low is None else self.low, math.inf if self.high is None else self.high
        if self.outside == "clip":
            weight = jnp.clip(ratio, low, high)
        else:
            weight = jnp.where((ratio < low) | (ratio > high), 0, ratio)
        if self.keep is None:
            return weight
        mean = _ratio(total / jnp.maximum(spread(token_counts(mask, segment_ids), segment_ids, mask.shape[1]), 1))
        return jnp.where((mean < self.keep[0]) | (mean > self.keep[1]), 0, weight)


@dataclasses.dataclass(frozen=True)
class FixedLengthMean:
    """Mean over sequences of sums over tokens divided by a fixed length (Dr. GRPO), which favors no length.

    Args:
        length: The longest completion allowed.
    """

    length: int


def mean_weights(mask: Mask, segment_ids: Segments, *, by: Mean = "sequence") -> tuple[Tokens, Float[Array, ""]]:
    """Expresses a mean of token losses as weights and a divisor, which can be summed over microbatches.

    Args:
        mask: True for tokens that count.
        segment_ids: Sequences of packed rows, or None.
        by: "sequence" (GRPO: the mean over sequences of their means), "token" (DAPO: over all tokens of the whole
            batch) or `FixedLengthMean(length)` (Dr. GRPO).

    Returns:
        The weight of each token, and the number to divide the weighted sum by.
    """
    weights = mask.astype(jnp.float32)
    counts = token_counts(mask, segment_ids)  # [B, S]
    if by == "token":
        return weights, jnp.sum(counts)
    sequences = jnp.sum(is_filled(counts))
    if isinstance(by, FixedLengthMean):
        return weights / by.length, sequences
    if by != "sequence":
        raise ValueError(f"by must be 'sequence', 'token' or FixedLengthMean(length), got {by!r}")
    return weights / jnp.maximum(spread(counts, segment_ids, mask.shape[1]), 1), sequences


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss(ReferencedLoss):
    """Loss of sampled completions with advantages; they may be packed.

    The batch has `tokens`, `targets` (-1 outside of completions), `advantages` (`B T`, or `B` for one completion a
    row); `old_log_probs`, log-probabilities under the sampling policy: required for every step after the first on the
    same completions, otherwise ρ is 1 and nothing is clipped; `reference_log_probs` for a KL term;
    `sampler_log_probs`, reported by another engine, for a correction; `sampler`, the sampler; `routed_experts`, `B T M
    X`, the experts that it chose, for replay (`nn.router.replay`).

    All terms and metrics are weighted by `mean`, so results do not depend on microbatches, devices and packing.
    Metrics: `entropy`, `ratio`, `clip_ratio/low`, `clip_ratio/high`, `clip_ratio/region`, and `kl`, `sampler_weight` if
    they exist; with `sampler_log_probs` how far these are from the policy's, by another engine or older weights:
    `sampler_gap`, the mean absolute difference, and `sampler_kl`, an estimate of the divergence. The value of the loss
    itself is not informative: for an on-policy step it is 0.

    A step raises ValueError when the batch lacks inputs of an option, or its `sampler` has another temperature, filters
    or penalties; and for advantages of shape `B` if a row has several completions, which inside `jit` makes the loss
    NaN.

    Args:
        surrogate: The loss of a token as a function of ρ, A and ℓ, such as `Clip`.
        ratio: Unit of ρ: "token", "sequence", "sequence_token" or "sequence_sum" (`policy_ratio`).
        mean: Average over token losses (`mean_weights`).
        kl_term: Divergence from the reference as a part of the loss.
        entropy: Factor of the entropy bonus; `entropy_factor` in the batch (`AdaptiveEntropy`) replaces it.
        correction: Importance weights for a sampler with different probabilities.
        top_entropy: Share of tokens, those with the highest entropies of the (micro)batch, that the surrogate and the
            entropy bonus learn from (arXiv:2506.01939).
        off_policy_limit: Sequences whose mean of `log p_sampler - ℓ` exceeds this do not learn from tokens with A < 0
            (DeepSeek-V3.2, arXiv:2512.02556); it compares with `sampler_log_probs`, or else `old_log_probs`. None keeps
            all.
    """

    surrogate: TokenSurrogate = Clip()
    ratio: Ratio = "token"
    mean: Mean = "sequence"
    kl_term: KL | None = None
    entropy: float = 0.0
    correction: RolloutCorrection | None = None
    top_entropy: float = 1.0
    off_policy_limit: float | None = None
    reads: ClassVar[Collection[str]] = (
        "advantages",
        "entropy_factor",
        "old_log_probs",
        "reference_log_probs",
        "sampler",
        "sampler_log_probs",
        "routed_experts",
    )

    def __post_init__(self):
        if not 0 < self.top_entropy <= 1:
            raise ValueError(f"top_entropy is a share of the tokens, above 0 and at most 1, got {self.top_entropy}")

    def prepare(self, model: Any, batch: Batch, *, dtype: Any, remat: nn.remat.Policy) -> tuple[Any, Batch]:
        """Returns the model, with the routes of the batch, and the batch with what the loss compares."""
        model, batch = super().prepare(model, batch, dtype=dtype, remat=remat)
        return (nn.router.replay(model, batch["routed_experts"]) if "routed_experts" in batch else model), batch

    def check_sampler(self, sampler: Any) -> None:
        """Checks before a run what a step checks if the batch has the `sampler`: that it draws what the loss scores.

        Args:
            sampler: The sampler of completions.

        Raises:
            TypeError: for another object.
            ValueError: when temperatures differ, or the sampler filters or penalizes tokens, so that ratios are of
                another distribution.
        """
        if not isinstance(sampler, Sampler):
            raise TypeError(
                "a batch's sampler is the inference.Sampler that drew its completions; log-probabilities that it "
                f"reported are sampler_log_probs. Got {type(sampler).__name__}"
            )
        if sampler.temperature == 0:
            raise ValueError(
                "a greedy sampler (temperature 0) draws from no distribution to learn from: take one above 0"
            )
        if self.temperature != sampler.temperature:
            raise ValueError(
                f"the loss scores tokens at temperature {self.temperature}, the sampler draws them at "
                f"{sampler.temperature}; give the loss temperature={sampler.temperature}"
            )
        changes = {
            field.name: value
            for field in dataclasses.fields(sampler)
            if field.name != "temperature" and (value := getattr(sampler, field.name)) != field.default
        }
        if changes:
            raise ValueError(
                f"a sampler for training must draw from the model's own distribution, but this one changes it by {changes}: "
                "omit that"
            )

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if "sampler" in batch:
            self.check_sampler(batch["sampler"])
        if "advantages" not in batch:
            raise ValueError(f"a policy loss needs batch['advantages'] (group_advantages), got {sorted(batch)}")
        if self.kl_term is not None and "reference_log_probs" not in batch:
            raise ValueError(missing_reference("the KL term"))
        if self.correction is not None and "sampler_log_probs" not in batch:
            raise ValueError("a correction needs batch['sampler_log_probs'], which the sampler reported")
        segment_ids, mask = batch.get("segment_ids"), ops.is_learned(batch["targets"])
        scored = score(model, hidden, batch["targets"], temperature=self.temperature, entropy=True)
        losses, metrics = self._token_losses(scored.log_prob, cast(Array, scored.entropy), batch, mask)
        weights, count = mean_weights(mask, segment_ids, by=self.mean)
        # Metrics are means whose weights sum to the count, unlike the weights of a fixed length.
        even = mean_weights(mask, segment_ids)[0] if isinstance(self.mean, FixedLengthMean) else weights
        sums = {name: jnp.sum(even * jnp.where(mask, value, 0)) for name, value in metrics.items()}
        return jnp.sum(weights * jnp.where(mask, losses, 0)), stop(Stats(count, sums))

    def _token_losses(
        self, log_prob: Tokens, entropy: Tokens, batch: Batch, mask: Mask
    ) -> tuple[Tokens, dict[str, Array]]:
        """Computes the loss of each token with all its terms, and the metrics of each token."""
        segment_ids = batch.get("segment_ids")
        rho = policy_ratio(log_prob, batch.get("old_log_probs"), mask, segment_ids, by=self.ratio)
        advantages = jnp.where(mask, _by_token(batch["advantages"], mask, segment_ids), 0)
        losses, low, high = self.surrogate(rho, advantages, log_prob)
        metrics = {"ratio": rho, "entropy": entropy}
        metrics |= {"clip_ratio/low": low, "clip_ratio/high": high, "clip_ratio/region": low | high}
        if self.off_policy_limit is not None:
            sampler = batch.get("sampler_log_probs", batch.get("old_log_probs", log_prob))
            drift = _mean_drift(log_prob, sampler, mask, segment_ids)
            losses = jnp.where((advantages >= 0) | (drift <= self.off_policy_limit), losses, 0)
        is_uncertain = mask
        if self.top_entropy < 1:
            is_uncertain = entropy >= jnp.nanquantile(jnp.where(mask, entropy, jnp.nan), 1 - self.top_entropy)
            losses = jnp.where(is_uncertain, losses, 0)
        if "sampler_log_probs" in batch:
            gap = jnp.nan_to_num(jnp.where(mask, stop(log_prob) - batch["sampler_log_probs"], 0), nan=0.0)
            metrics |= {"sampler_gap": jnp.abs(gap), "sampler_kl": _ratio(gap) - gap - 1}
        if self.correction is not None:
            trained = batch.get("old_log_probs", stop(log_prob))
            weight = self.correction(trained, batch["sampler_log_probs"], mask, segment_ids)
            losses, metrics = losses * weight, metrics | {"sampler_weight": weight}
        if self.kl_term is not None:  # not multiplied by the sampler's weight
            reference = jnp.where(mask, batch["reference_log_probs"], 0)
            divergence = self.kl_term(log_prob, reference, rho)
            losses, metrics = losses + self.kl_term.beta * divergence, metrics | {"kl": divergence}
        factor = batch["entropy_factor"][:, None] if "entropy_factor" in batch else self.entropy
        return losses - factor * jnp.where(is_uncertain, entropy, 0), metrics


def _mean_drift(log_prob: Tokens, sampler: Tokens, mask: Mask, segment_ids: Segments) -> Tokens:
    """Computes the mean of `log p_sampler - ℓ` over each sequence, at its tokens; NaN counts as 0."""
    difference = stop(jnp.nan_to_num(jnp.where(mask, sampler - log_prob, 0), nan=0.0))
    total = segment_sums(difference, segment_ids) / jnp.maximum(token_counts(mask, segment_ids), 1)
    return spread(total, segment_ids, mask.shape[1])


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPO(PolicyLoss):
    """GRPO (arXiv:2402.03300). Its mean favors long answers among wrong ones.

    With `mean=FixedLengthMean(length)` and the advantages of `group_advantages(rewards, scale=None)` it is Dr. GRPO
    (arXiv:2503.20783). Options are those of `PolicyLoss`.

        loss = post_training.GRPO(temperature=1.0)
        trainer = training.Trainer(model, optimizer=training.adamw(1e-6), loader=loader, loss=loss)
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class DAPO(PolicyLoss):
    """DAPO (arXiv:2503.14476): a higher upper clip, and an average over all tokens of the batch."""

    surrogate: TokenSurrogate = Clip(0.2, 0.28)
    mean: Mean = "token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GSPO(PolicyLoss):
    """GSPO (arXiv:2507.18071): one ratio for each sequence."""

    surrogate: TokenSurrogate = Clip(3e-4, 4e-4)
    ratio: Ratio = "sequence"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CISPO(PolicyLoss):
    """CISPO (arXiv:2506.13585): limits the weight of a token, not its gradient."""

    surrogate: TokenSurrogate = TruncatedWeight(5.0)
    mean: Mean = "token"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RLOO(PolicyLoss):
    """RLOO (arXiv:2402.14740), with the advantages of `leave_one_out`."""

    ratio: Ratio = "sequence_sum"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SAPO(PolicyLoss):
    """SAPO (arXiv:2511.20347): a soft gate instead of a clip."""

    surrogate: TokenSurrogate = SoftGate()


@dataclasses.dataclass(frozen=True, kw_only=True)
class VESPO(PolicyLoss):
    """VESPO (arXiv:2602.10693): tokens weighted by a smooth function of the whole sequence's ratio.

    That ratio takes samples of other weights or engines: give their log-probabilities as `old_log_probs` instead of a
    correction.
    """

    surrogate: TokenSurrogate = GammaWeight()
    ratio: Ratio = "sequence_sum"
    mean: Mean = "token"

    def __post_init__(self):
        super().__post_init__()
        if self.correction is not None:
            raise ValueError(
                "VESPO's weight is a correction: put the sampler's log-probabilities into batch['old_log_probs'] and "
                "omit correction="
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LUSPO(PolicyLoss):
    """LUSPO (arXiv:2602.05261): GSPO with the loss of each sequence times its length."""

    surrogate: TokenSurrogate = Clip(2e-3, 2.5e-3)
    ratio: Ratio = "sequence"
    mean: Mean = FixedLengthMean(1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPPO(PolicyLoss):
    """DPPO (arXiv:2602.04879): leaves out tokens whose probability moved far, instead of those whose ratio did."""

    surrogate: TokenSurrogate = ProbabilityClip()
    mean: Mean = "token"
