"""Losses of preferences: DPO and its relatives on pairs of answers, KTO on answers that are desirable or not.

Notation: c and r are sums over the tokens of the chosen and the rejected answer of `log p - log p_reference` (of `log
p` for losses without a reference), n_c and n_r their numbers of tokens, sp(x) = log(1 + e^x), σ the logistic function.

Pairs come in one of two forms. `{"chosen": {...}, "rejected": {...}}` has an array of rows for each; the loss puts
the two rows of a pair next to each other and runs the model once. A single batch has the answers of a pair as
consecutive segments of a row (1 chosen, 2 rejected, 3 chosen, ...), which trains in a 1F1B pipeline too.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import sigmoid, softplus
from jaxtyping import Array, Bool, Float, Int

from maxlib.ops import is_learned
from maxlib.post_training._reference import ReferencedLoss, missing_reference
from maxlib.post_training._segments import is_filled, segment_sums, token_counts
from maxlib.training.losses import Batch, Quotient, Stats, score

Pairs = Float[Array, "*P"]


class Answers(NamedTuple):
    """The two answers of each pair, summed over their tokens."""

    chosen: Pairs
    rejected: Pairs
    chosen_tokens: Pairs
    rejected_tokens: Pairs

    @property
    def means(self) -> tuple[Pairs, Pairs]:
        """Returns both sums per token; -1 if there is no answer, so that log-odds stay finite."""
        chosen, rejected = (
            jnp.where(count > 0, total / jnp.maximum(count, 1), -1.0)
            for total, count in ((self.chosen, self.chosen_tokens), (self.rejected, self.rejected_tokens))
        )
        return chosen, rejected

    @property
    def difference(self) -> Pairs:
        """Returns c - r."""
        return self.chosen - self.rejected

    @property
    def mean_difference(self) -> Pairs:
        """Returns c/n_c - r/n_r."""
        return jnp.subtract(*self.means)


@dataclasses.dataclass(frozen=True)
class PreferenceLoss(ReferencedLoss):
    """Base class of losses of pairs, summed over them; a subclass defines `of_pairs`.

    In packed pairs the segments of one number in both halves belong together. Metrics: `rewards/chosen`,
    `rewards/rejected`, `rewards/margins`, `rewards/accuracies`, `logps/chosen`, `logps/rejected`, and `nll` if the loss
    has it. The likelihood of ORPO and `ChosenNLL` is a mean over tokens of the (micro)batch, as TRL computes it; all
    other terms are exact over any number of microbatches.

        loss = post_training.DPO(beta=0.1, reference=adapters.base_model)
        trainer = training.Trainer(tuned, optimizer=training.adamw(1e-5), loader=loader, loss=loss)

    Attributes:
        needs_reference: True if c and r are ratios to a reference.
        nll: Weight of the negative log-likelihood of the chosen answer, which is added to the loss of pairs.
        nll_of_prompt: True if that likelihood includes the prompt.
        per_token: True if rewards are means over tokens.
    """

    reads: ClassVar[Collection[str]] = ("chosen", "rejected", "interleaved", "reference_log_probs")
    beta: ClassVar[Any] = 0.1
    needs_reference: ClassVar[Any] = True
    per_token: ClassVar[bool] = False
    nll: ClassVar[Any] = 0.0
    nll_of_prompt: ClassVar[bool] = False

    def of_pairs(self, answers: Answers) -> Pairs:
        """Computes the loss of each pair."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(answers) -> the loss of each pair")

    def rewards(self, answers: Answers) -> tuple[Pairs, Pairs]:
        """Returns the implicit rewards of the chosen and the rejected answers, for metrics."""
        chosen, rejected = answers.means if self.per_token else answers[:2]
        return self.beta * chosen, self.beta * rejected

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if self.needs_reference and "reference_log_probs" not in batch:
            raise ValueError(missing_reference(type(self).__name__))
        if "interleaved" not in batch and "segment_ids" not in batch:
            raise ValueError(
                f"{type(self).__name__} finds no pairs in a batch of {sorted(batch)}: pass {{'chosen': {{...}}, "
                "'rejected': {...}} with the rows of each (split rows of both that are stacked in one array), or "
                "'segment_ids' with the answers of a pair as consecutive segments of a row"
            )
        segment_ids, mask = batch.get("segment_ids"), is_learned(batch["targets"])
        targets = _with_prompt(batch) if self.nll_of_prompt else batch["targets"]
        scored = score(model, hidden, targets, temperature=self.temperature).log_prob

        def of_answers(x: Array) -> tuple[Array, Array]:
            return split_pairs(segment_sums(jnp.where(mask, x, 0), segment_ids), batch)

        counts = split_pairs(token_counts(mask, segment_ids), batch)
        is_pair = is_filled(counts[0]) * is_filled(counts[1])
        log_p = of_answers(scored)
        ratios = of_answers(scored - batch["reference_log_probs"]) if self.needs_reference else log_p
        answers, pairs = Answers(*ratios, *counts), jnp.sum(is_pair)
        loss, rewards = jnp.sum(is_pair * self.of_pairs(answers)), self.rewards(answers)
        metrics = {"rewards/margins": rewards[0] - rewards[1], "rewards/accuracies": rewards[0] > rewards[1]}
        for i, name in enumerate(("chosen", "rejected")):
            metrics |= {f"rewards/{name}": rewards[i], f"logps/{name}": log_p[i]}
        sums = {name: jnp.sum(is_pair * value) for name, value in metrics.items()}
        if self.nll:
            rows = jnp.arange(len(targets))[:, None]
            chosen = is_learned(targets) & (rows % 2 == 0 if "interleaved" in batch else batch["segment_ids"] % 2 == 1)
            sums["nll"] = -pairs * jnp.sum(jnp.where(chosen, scored, 0)) / jnp.maximum(jnp.sum(chosen), 1)
            loss += self.nll * sums["nll"]
        return loss, jax.lax.stop_gradient(Stats(pairs, sums))


def _check_scale(beta: float, label_smoothing: float = 0.0) -> None:
    """Raises ValueError unless beta is positive and the share of wrong labels below a half."""
    if not beta > 0:
        raise ValueError(f"beta must be positive, got {beta}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is the share of wrong labels, in [0, 0.5), got {label_smoothing}")


def split_pairs(sums: Float[Array, "B S"], batch: Batch) -> tuple[Array, Array]:
    """Splits sums over segments into those of chosen and of rejected answers."""
    if "interleaved" in batch:
        pairs = sums.reshape(-1, 2, sums.shape[1])  # [2B, S] -> [B, 2, S]
        return pairs[:, 0], pairs[:, 1]
    pairs = jnp.pad(sums, ((0, 0), (0, sums.shape[1] % 2))).reshape(len(sums), -1, 2)  # [B, S] -> [B, S/2, 2]
    return pairs[..., 0], pairs[..., 1]


def _with_prompt(batch: Batch) -> Int[Array, "B T"]:
    """Returns the targets of prompts too: the next token of the same text."""

    def following(x: Array) -> Array:
        return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)

    targets, tokens, segment_ids = batch["targets"], batch["tokens"], batch.get("segment_ids")
    if segment_ids is not None:
        inside = (segment_ids > 0) & (following(segment_ids) == segment_ids)
    else:  # up to the last target of the row
        inside = jnp.flip(jnp.cumsum(jnp.flip(is_learned(targets), 1), axis=1), 1) > 0
    return jnp.where(is_learned(targets), targets, jnp.where(inside, following(tokens), -1))


def _smoothed(x: Pairs, noise: float) -> Pairs:
    """Computes (1-ε) sp(-x) + ε sp(x)."""
    return (1 - noise) * softplus(-x) + noise * softplus(x)


# From TRL's names to functions of answers, β and ε. The formulas are in the docstring of `DPO`.
_LOSSES: dict[str, Callable[[Answers, float, float], Pairs]] = {
    "sigmoid": lambda a, beta, noise: _smoothed(beta * a.difference, noise),
    "robust": lambda a, beta, noise: (
        ((1 - noise) * softplus(-beta * a.difference) - noise * softplus(beta * a.difference)) / (1 - 2 * noise)
    ),
    "hinge": lambda a, beta, _: jax.nn.relu(1 - beta * a.difference),
    "ipo": lambda a, beta, _: (a.mean_difference - 1 / (2 * beta)) ** 2,
    "sigmoid_norm": lambda a, beta, _: softplus(-beta * a.mean_difference),
    "apo_zero": lambda a, beta, _: sigmoid(-beta * a.chosen) + sigmoid(beta * a.rejected),
    "apo_down": lambda a, beta, _: sigmoid(beta * a.chosen) + sigmoid(-beta * a.difference),
    "sppo_hard": lambda a, beta, _: (a.chosen - 0.5 / beta) ** 2 + (a.rejected + 0.5 / beta) ** 2,
    "nca_pair": lambda a, beta, _: (
        softplus(-beta * a.chosen) + 0.5 * softplus(beta * a.chosen) + 0.5 * softplus(beta * a.rejected)
    ),
    "bco_pair": lambda a, beta, _: softplus(-beta * a.chosen) + softplus(beta * a.rejected),
}


@dataclasses.dataclass(frozen=True)
class DPO(PreferenceLoss):
    """DPO (arXiv:2305.18290) and its relatives, with Δ = β (c - r).

    c and r are sums over the n_c and n_r tokens of the chosen and the rejected answer of `log p - log p_reference`,
    sp(x) = log(1 + e^x), and σ is the logistic function.

        loss = post_training.DPO(beta=0.1)

    | `loss_type` | loss of a pair |
    |---|---|
    | "sigmoid" | (1-ε) sp(-Δ) + ε sp(Δ); with ε > 0 it is cDPO |
    | "robust" (2403.00409) | ((1-ε) sp(-Δ) - ε sp(Δ)) / (1 - 2ε), unbiased under a share ε of wrong labels |
    | "hinge" (SLiC, 2305.10425) | max(0, 1 - Δ) |
    | "ipo" (2310.12036) | (c/n_c - r/n_r - 1/(2β))², per token, as its authors computed it |
    | "sigmoid_norm" | sp(-β (c/n_c - r/n_r)) |
    | "apo_zero" (2408.06266) | σ(-βc) + σ(βr), for chosen answers better than the model's own |
    | "apo_down" (2408.06266) | σ(βc) + σ(-Δ), for chosen answers worse than the model's own |
    | "sppo_hard" (2405.00675) | (c - 1/(2β))² + (r + 1/(2β))² |
    | "nca_pair" (2402.05369) | sp(-βc) + ½ sp(βc) + ½ sp(βr) |
    | "bco_pair" (2404.04656) | sp(-βc) + sp(βr) |

    Args:
        beta: β, the strength of the pull to the reference.
        loss_type: One of the above, with TRL's names.
        label_smoothing: ε, the share of wrong labels, for "sigmoid" and "robust".

    Raises:
        ValueError: when `beta` is not positive, `label_smoothing` is not in [0, 0.5), or `loss_type` is unknown.
    """

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self):
        _check_scale(self.beta, self.label_smoothing)
        if self.loss_type not in _LOSSES:
            raise ValueError(f"loss_type must be one of {', '.join(_LOSSES)}, got {self.loss_type!r}")
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing is for 'sigmoid' and 'robust', got it for {self.loss_type!r}")

    def of_pairs(self, answers: Answers) -> Pairs:
        return _LOSSES[self.loss_type](answers, self.beta, self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class SimPO(PreferenceLoss):
    """SimPO (arXiv:2405.14734), without a reference: (1-ε) sp(-x) + ε sp(x), x = β (c/n_c - r/n_r) - γ."""

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0
    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    def __post_init__(self):
        _check_scale(self.beta, self.label_smoothing)

    def of_pairs(self, answers: Answers) -> Pairs:
        return _smoothed(self.beta * answers.mean_difference - self.gamma, self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class ORPO(PreferenceLoss):
    """ORPO (arXiv:2403.07691), without a reference: β sp(-o) plus the NLL of prompt and chosen answer.

    o is the log of the ratio of odds: x_c - x_r - (L(x_c) - L(x_r)), x = mean log p, L(x) = log(1 - e^x). x is at most
    -1e-12, because the odds of a probability of 1 are infinite.
    """

    beta: float = 0.1
    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    nll: ClassVar[float] = 1.0
    nll_of_prompt: ClassVar[bool] = True

    def __post_init__(self):
        _check_scale(self.beta)

    def of_pairs(self, answers: Answers) -> Pairs:
        chosen, rejected = (jnp.minimum(x, -1e-12) for x in answers.means)
        log_odds = chosen - rejected - (jnp.log(-jnp.expm1(chosen)) - jnp.log(-jnp.expm1(rejected)))
        return self.beta * softplus(-log_odds)


@dataclasses.dataclass(frozen=True)
class ChosenNLL(PreferenceLoss):
    """The negative log-likelihood of the chosen answers, per token: supervised tuning inside a `MixedPreference`."""

    needs_reference: ClassVar[bool] = False
    nll: ClassVar[float] = 1.0

    def of_pairs(self, answers: Answers) -> Pairs:
        return jnp.zeros_like(answers.chosen)


@dataclasses.dataclass(frozen=True)
class MixedPreference(PreferenceLoss):
    """A weighted sum of losses of pairs, such as MPO's (arXiv:2411.10442).

    Args:
        terms: Pairs of weight and loss, `((0.8, DPO()), (0.2, DPO(0.1, "bco_pair")), (1.0, ChosenNLL()))`. Rewards in
            metrics are those of the first. The terms' own `reference` and `temperature` are not used.

    Raises:
        ValueError: when there is no term, or terms disagree on whether c and r are ratios to a reference.
    """

    terms: tuple[tuple[float, PreferenceLoss], ...]

    def __post_init__(self):
        of_pairs = {loss.needs_reference for _, loss in self.terms if not isinstance(loss, ChosenNLL)}
        if len(of_pairs) != 1 or any(loss.nll_of_prompt for _, loss in self.terms):
            raise ValueError(
                "a MixedPreference takes losses of pairs that all have a reference or all have none, and ChosenNLL for "
                f"the likelihood (ORPO brings its own), got {[type(loss).__name__ for _, loss in self.terms]}"
            )

    @property
    def needs_reference(self) -> bool:
        """Returns True if c and r are ratios to a reference."""
        return any(loss.needs_reference for _, loss in self.terms)

    @property
    def nll(self) -> float:
        """Returns the weight of the likelihood."""
        return sum(weight * loss.nll for weight, loss in self.terms)

    def of_pairs(self, answers: Answers) -> Pairs:
        return jnp.stack([weight * loss.of_pairs(answers) for weight, loss in self.terms]).sum(0)

    def rewards(self, answers: Answers) -> tuple[Pairs, Pairs]:
        """Returns the implicit rewards of the first loss."""
        return self.terms[0][1].rewards(answers)


@dataclasses.dataclass(frozen=True)
class KTO(ReferencedLoss):
    """KTO (arXiv:2402.01306), for answers that are desirable or not: w σ(∓β (x - z)), x = Σ (log p - log p_reference).

    z estimates the divergence from the reference: the mean of x over answers to *other* prompts. It is at least 0 and
    has no gradient; both are essential. The batch has `desirable` (`B`, or `B T` for packed rows), and either
    `mismatched`, a nested batch of prompts with answers to other prompts (and its `reference_log_probs`), or
    `kl_baseline` by row, `B`, a precomputed z: then results do not depend on microbatches. Metrics: `rewards`, `kl`
    (z), the means `rewards/desirable` and `rewards/undesirable` over one kind, and `desirable`, the share of that kind.

    Args:
        beta: β, the strength of the pull to the reference.
        desirable_weight: Factor of desirable answers.
        undesirable_weight: Factor of undesirable answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reads: ClassVar[Collection[str]] = ("desirable", "mismatched", "kl_baseline", "reference_log_probs")

    def of_answers(self, x: Pairs, desirable: Bool[Array, "*P"], z: Float[Array, "*#P"]) -> Pairs:
        """Computes the loss of each answer."""
        away = self.beta * (x - jax.lax.stop_gradient(jnp.maximum(z, 0)))
        return jnp.where(desirable, self.desirable_weight * sigmoid(-away), self.undesirable_weight * sigmoid(away))

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if "reference_log_probs" not in batch:
            raise ValueError(missing_reference("KTO"))
        if "kl_baseline" not in batch:
            raise ValueError(
                "KTO needs batch['mismatched'], prompts with answers to other prompts, or batch['kl_baseline'], the "
                "divergence from the reference that was estimated on them"
            )
        segment_ids, mask = batch.get("segment_ids"), is_learned(batch["targets"])
        scored = score(model, hidden, batch["targets"], temperature=self.temperature).log_prob
        ratio = segment_sums(jnp.where(mask, scored - batch["reference_log_probs"], 0), segment_ids)  # B S
        counts = token_counts(mask, segment_ids)
        desirable = batch["desirable"][:, None] if batch["desirable"].ndim == 1 else batch["desirable"]
        # [B, T] -> [B, S]: an answer is desirable if its tokens are marked so.
        desirable = segment_sums(jnp.where(mask, desirable, 0).astype(jnp.float32), segment_ids) > counts / 2
        is_answer = is_filled(counts)
        losses = self.of_answers(ratio, desirable, batch["kl_baseline"][:, None])
        rewards = is_answer * self.beta * ratio
        sums = {
            "kl": jnp.sum(is_answer * jnp.maximum(batch["kl_baseline"][:, None], 0)),
            "rewards": jnp.sum(rewards),
            "rewards/desirable": Quotient(jnp.sum(rewards * desirable), jnp.sum(is_answer * desirable)),
            "rewards/undesirable": Quotient(jnp.sum(rewards * ~desirable), jnp.sum(is_answer * ~desirable)),
            "desirable": jnp.sum(is_answer * desirable),
        }
        return jnp.sum(is_answer * losses), jax.lax.stop_gradient(Stats(jnp.sum(is_answer), sums))
