"""Losses of preferences: DPO and its relatives on pairs of answers, KTO on answers that are desirable or not.

Notation: c and r are sums over the tokens of the chosen and the rejected answer of `log p - log p_reference` (of `log
p` for losses without a reference), n_c and n_r their numbers of tokens, sp(x) = log(1 + e^x), σ the logistic function.

Pairs come in one of two forms. `{"chosen": {...}, "rejected": {...}}` has an array of rows for each; the loss puts
the two rows of a pair next to each other and runs the model once. A single batch has the answers of a pair as
consecutive segments of a row (1 chosen, 2 rejected, 3 chosen, ...), which trains in a 1F1B pipeline too.
"""

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import sigmoid, softplus
from jaxtyping import Array, Bool, Float, Int

from maxlib._utils.arguments import check_choice
from maxlib.ops import is_learned
from maxlib.post_training._reference import ReferencedLoss, missing_reference
from maxlib.post_training._segments import MAX_LOG_RATIO, is_filled, segment_sums, spread, token_counts
from maxlib.training.losses import Batch, Quotient, Stats, score

Pairs = Float[Array, "*P"]


class Answers(NamedTuple):
    """The two answers of each pair, summed over their tokens."""

    chosen: Pairs
    rejected: Pairs
    chosen_tokens: Pairs
    rejected_tokens: Pairs
    policy_difference: Any = None  # of `log p`, without the reference

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceLoss(ReferencedLoss):
    """Base class of losses of pairs, summed over them; a subclass defines `of_pairs`.

    In packed pairs the segments of one number in both halves belong together. Metrics: `rewards/chosen`,
    `rewards/rejected`, `rewards/margins`, `rewards/accuracies`, `logps/chosen`, `logps/rejected`, and `nll` if the loss
    has it. The likelihood of ORPO and `ChosenNLL` is a mean over tokens of the (micro)batch, as TRL computes it; all
    other terms are exact over any number of microbatches.

        loss = post_training.DPO(beta=0.1, reference=adapters.base_model)
        trainer = training.Trainer(tuned, optimizer=training.adamw(1e-5), loader=loader, loss=loss)

    Args:
        ld_alpha: Weight of the tokens of an answer beyond the length of the shorter one of its pair (LD-DPO,
            arXiv:2409.06411); None for 1.
        weighted: True weighs each pair by how probable both answers are under the policy, relative to its own samples
            (WPO, arXiv:2406.11827); this computes the head twice.

    Attributes:
        needs_reference: True if c and r are ratios to a reference.
        nll: Weight of the negative log-likelihood of the chosen answer, which is added to the loss of pairs.
        nll_of_prompt: True if that likelihood includes the prompt.
        per_token: True if rewards are means over tokens.
    """

    ld_alpha: float | None = None
    weighted: bool = False
    reads: ClassVar[Collection[str]] = ("chosen", "rejected", "interleaved", "reference_log_probs")
    beta: ClassVar[Any] = 0.1
    needs_reference: ClassVar[Any] = True
    per_token: ClassVar[Any] = False
    nll: ClassVar[Any] = 0.0
    nll_of_prompt: ClassVar[bool] = False

    def of_pairs(self, answers: Answers) -> Pairs:
        """Computes the loss of each pair."""
        raise NotImplementedError(f"{type(self).__name__} must define of_pairs(answers) -> the loss of each pair")

    def rewards(self, answers: Answers) -> tuple[Pairs, Pairs]:
        """Returns the implicit rewards of the chosen and the rejected answers, for metrics."""
        chosen, rejected = answers.means if self.per_token else answers[:2]
        return self.beta * chosen, self.beta * rejected

    def extra_metrics(self, answers: Answers) -> dict[str, Pairs]:
        """Returns other metrics of each pair."""
        return {}

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if self.needs_reference and "reference_log_probs" not in batch:
            raise ValueError(missing_reference(type(self).__name__))
        check_pairs(self, batch)
        segment_ids, mask = batch.get("segment_ids"), is_learned(batch["targets"])
        targets = _with_prompt(batch) if self.nll_of_prompt else batch["targets"]
        scored = score(model, hidden, targets, temperature=self.temperature).log_prob

        def of_answers(x: Array) -> tuple[Array, Array]:
            return split_pairs(segment_sums(jnp.where(mask, x, 0), segment_ids), batch)

        counts = split_pairs(token_counts(mask, segment_ids), batch)
        is_pair = is_filled(counts[0]) * is_filled(counts[1])
        weights = 1.0 if self.ld_alpha is None else jnp.where(_is_shared(mask, batch), 1.0, self.ld_alpha)
        log_p = of_answers(weights * scored)
        ratios = of_answers(weights * (scored - batch["reference_log_probs"])) if self.needs_reference else log_p
        answers, pairs = Answers(*ratios, *counts, jnp.subtract(*log_p)), jnp.sum(is_pair)
        losses, rewards = self.of_pairs(answers), self.rewards(answers)
        if self.weighted:
            # log p - log Σ p², where the sum runs over the vocabulary: the same at half the temperature, less log p.
            halved = score(model, hidden, targets, temperature=self.temperature / 2).log_prob
            alignment = Answers(*of_answers(halved - scored), *counts).means
            losses *= jax.lax.stop_gradient(jnp.exp(jnp.add(*alignment)))
        loss, metrics = jnp.sum(is_pair * losses), self.extra_metrics(answers)
        metrics |= {"rewards/margins": rewards[0] - rewards[1], "rewards/accuracies": rewards[0] > rewards[1]}
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


def check_pairs(loss: Any, batch: Batch) -> None:
    """Raises ValueError if a batch has pairs in neither of the two forms."""
    if "interleaved" not in batch and "segment_ids" not in batch:
        raise ValueError(
            f"{type(loss).__name__} finds no pairs in a batch of {sorted(batch)}: pass {{'chosen': {{...}}, "
            "'rejected': {...}} with the rows of each (split rows of both that are stacked in one array), or "
            "'segment_ids' with the answers of a pair as consecutive segments of a row"
        )


def split_pairs(sums: Float[Array, "B S"], batch: Batch) -> tuple[Array, Array]:
    """Splits sums over segments into those of chosen and of rejected answers."""
    if "interleaved" in batch:
        pairs = sums.reshape(-1, 2, sums.shape[1])  # [2B, S] -> [B, 2, S]
        return pairs[:, 0], pairs[:, 1]
    pairs = jnp.pad(sums, ((0, 0), (0, sums.shape[1] % 2))).reshape(len(sums), -1, 2)  # [B, S] -> [B, S/2, 2]
    return pairs[..., 0], pairs[..., 1]


def _is_shared(mask: Bool[Array, "B T"], batch: Batch) -> Bool[Array, "B T"]:
    """Returns True for the tokens of an answer up to the length of the shorter answer of its pair."""
    counts, segment_ids = token_counts(mask, batch.get("segment_ids")), batch.get("segment_ids")  # B S
    if "interleaved" in batch:
        other = counts.reshape(-1, 2, counts.shape[1])[:, ::-1].reshape(counts.shape)
    else:
        columns = jnp.arange(counts.shape[1])
        other = jnp.take(counts, columns ^ 1, axis=1, mode="fill", fill_value=0)  # 0 and 1, 2 and 3, ... change places
    before = jnp.cumsum(counts, axis=1) - counts
    last = spread(before + jnp.minimum(counts, other), segment_ids, mask.shape[1])
    return jnp.cumsum(mask, axis=1) <= last


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


def _matched(x: Pairs, y: Pairs, answers: Answers) -> Pairs:
    """Subtracts from each x the y of the same rank; what is no pair ranks last in both.

    It is the derivative of the distance between two distributions, so the order has no gradient.
    """
    is_pair = (answers.chosen_tokens > 0) & (answers.rejected_tokens > 0)
    first, second = (jnp.where(is_pair, z, jnp.inf).reshape(-1) for z in (x, y))
    ranks = jnp.argsort(jnp.argsort(first))
    same_rank = y.reshape(-1)[jnp.argsort(second)[ranks]].reshape(x.shape)
    return x - same_rank


def _exo(delta: Pairs, noise: float) -> Pairs:
    """Computes KL(σ(±Δ) ‖ 1-ε, ε)."""
    log_p, log_q = -softplus(-delta), -softplus(delta)
    return jnp.exp(log_p) * (log_p - math.log1p(-noise)) + jnp.exp(log_q) * (log_q - math.log(noise))


def _discopop(delta: Pairs) -> Pairs:
    share = sigmoid(delta / 0.05)
    return softplus(-delta) * (1 - share) + jnp.exp(jnp.minimum(-delta, MAX_LOG_RATIO)) * share


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
    "exo_pair": lambda a, beta, noise: _exo(beta * a.difference, noise),
    "discopop": lambda a, beta, _: _discopop(beta * a.difference),
    "aot": lambda a, beta, noise: _smoothed(
        beta * _matched(a.policy_difference, a.policy_difference - a.difference, a), noise
    ),
    "aot_unpaired": lambda a, beta, noise: _smoothed(beta * _matched(a.chosen, a.rejected, a), noise),
}
_SMOOTHED = "sigmoid", "robust", "exo_pair", "aot", "aot_unpaired"
# Losses whose c and r may be those of another divergence.
_OF_DIVERGENCES = "sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop"


def _derivative(divergence: str, log_ratio: Pairs, alpha: float) -> Pairs:
    """Computes f'(t) of an f-divergence, up to a constant, for t = e^log_ratio."""
    if divergence == "forward_kl":  # 1 - 1/t
        return 1 - jnp.exp(jnp.minimum(-log_ratio, MAX_LOG_RATIO))
    if divergence == "js_divergence":  # log(2t / (1 + t))
        return math.log(2) - softplus(-log_ratio)
    if divergence == "alpha_divergence" and alpha != 1:  # (t^(α-1) - 1) / (α - 1)
        return jnp.expm1(jnp.minimum((alpha - 1) * log_ratio, MAX_LOG_RATIO)) / (alpha - 1)
    return log_ratio


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
    | "exo_pair" (2402.00856) | KL of (σ(Δ), σ(-Δ)) from (1-ε, ε), with ε > 0 |
    | "discopop" (2406.08414) | (1-m) sp(-Δ) + m e^-Δ, m = σ(Δ / 0.05) |
    | "aot" (2406.05882) | "sigmoid", with each log p(chosen) / p(rejected) against the reference's of the same rank |
    | "aot_unpaired" (2406.05882) | "sigmoid", with each c against the r of the same rank |

    The ranks of "aot" are those in the (micro)batch.

    Args:
        beta: β, the strength of the pull to the reference.
        loss_type: One of the above, with TRL's names.
        label_smoothing: ε, the share of wrong labels, for "sigmoid", "robust", "exo_pair", "aot" and "aot_unpaired".
        divergence: The divergence from the reference (f-DPO, arXiv:2309.16240): each of c and r becomes f'(e^c) for
            "forward_kl", "js_divergence" or "alpha_divergence". For losses of Δ alone, and of c/n_c - r/n_r.
        alpha: α of the alpha divergence: 1 - 1/t at 0, log t at 1.

    Raises:
        ValueError: when `beta` is not positive, `label_smoothing` is not in [0, 0.5) or 0 for "exo_pair", an option is
            for another loss, or a name is unknown.
    """

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    divergence: Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] = "reverse_kl"
    alpha: float = 0.5

    def __post_init__(self):
        _check_scale(self.beta, self.label_smoothing)
        if self.loss_type not in _LOSSES:
            raise ValueError(f"loss_type must be one of {', '.join(_LOSSES)}, got {self.loss_type!r}")
        if self.label_smoothing and self.loss_type not in _SMOOTHED:
            raise ValueError(f"label_smoothing is for {', '.join(_SMOOTHED)}, got it for {self.loss_type!r}")
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ValueError("exo_pair compares with ε, so label_smoothing must be above 0, such as 1e-3")
        check_choice("divergence", self.divergence, ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"))
        if self.alpha != DPO.alpha and self.divergence != "alpha_divergence":
            raise ValueError(f"alpha is for divergence='alpha_divergence', got it for {self.divergence!r}")
        if self.divergence != "reverse_kl" and self.loss_type not in _OF_DIVERGENCES:
            raise ValueError(f"other divergences are for {', '.join(_OF_DIVERGENCES)}, got {self.loss_type!r}")

    def of_pairs(self, answers: Answers) -> Pairs:
        chosen, rejected = (_derivative(self.divergence, x, self.alpha) for x in answers[:2])
        answers = answers._replace(chosen=chosen, rejected=rejected)
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
        return self.beta * softplus(-_log_odds(answers))

    def extra_metrics(self, answers: Answers) -> dict[str, Pairs]:
        """Returns o as `log_odds_chosen`, and log σ(o) as `log_odds_ratio`."""
        log_odds = _log_odds(answers)
        return {"log_odds_chosen": log_odds, "log_odds_ratio": -softplus(-log_odds)}


def _log_odds(answers: Answers) -> Pairs:
    chosen, rejected = (jnp.minimum(x, -1e-12) for x in answers.means)
    return chosen - rejected - (jnp.log(-jnp.expm1(chosen)) - jnp.log(-jnp.expm1(rejected)))


@dataclasses.dataclass(frozen=True)
class CPO(PreferenceLoss):
    """CPO (arXiv:2401.08417), without a reference: a loss of Δ = β (c - r), plus the NLL of the chosen answer.

    Args:
        beta: β.
        loss_type: "sigmoid", "hinge" or "ipo" of `DPO`, with c and r of `log p`.
        label_smoothing: ε, the share of wrong labels, for "sigmoid".
        nll_weight: Factor of the likelihood.
    """

    beta: float = 0.1
    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    label_smoothing: float = 0.0
    nll_weight: float = 1.0
    needs_reference: ClassVar[bool] = False

    def __post_init__(self):
        check_choice("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo"))
        DPO(self.beta, self.loss_type, self.label_smoothing)  # checks the rest

    @property
    def nll(self) -> float:
        """Returns the weight of the likelihood."""
        return self.nll_weight

    @property
    def per_token(self) -> bool:
        """Returns True if rewards are means over tokens."""
        return self.loss_type == "ipo"

    def of_pairs(self, answers: Answers) -> Pairs:
        return _LOSSES[self.loss_type](answers, self.beta, self.label_smoothing)


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
            metrics are those of the first.

    Raises:
        ValueError: when there is no term, terms disagree on whether c and r are ratios to a reference, or a term sets
            an option that all share.
    """

    terms: tuple[tuple[float, PreferenceLoss], ...]

    def __post_init__(self):
        of_pairs = {loss.needs_reference for _, loss in self.terms if not isinstance(loss, ChosenNLL)}
        if len(of_pairs) != 1 or any(loss.nll_of_prompt for _, loss in self.terms):
            raise ValueError(
                "a MixedPreference takes losses of pairs that all have a reference or all have none, and ChosenNLL for "
                f"the likelihood (ORPO brings its own), got {[type(loss).__name__ for _, loss in self.terms]}"
            )
        common = dataclasses.fields(PreferenceLoss)
        if unread := {f.name for _, loss in self.terms for f in common if getattr(loss, f.name) != f.default}:
            raise ValueError(f"all terms share {sorted(unread)}: give them to the MixedPreference, not to its terms")

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

    `loss_type="apo_zero_unpaired"` (arXiv:2408.06266) has z = 0; "bco" (arXiv:2404.04656) is w sp(∓β (x - z)), in which
    z is the mean of x over the answers of the (micro)batch, unless `kl_baseline` has another one.

    z estimates the divergence from the reference: the mean of x over answers to *other* prompts. It is at least 0 and
    has no gradient; both are essential. The batch has `desirable` (`B`, or `B T` for packed rows), and either
    `mismatched`, a nested batch of prompts with answers to other prompts (and its `reference_log_probs`), or
    `kl_baseline` by row, `B`, a precomputed z: then results do not depend on microbatches. Metrics: `rewards`, `kl`
    (z), the means `rewards/desirable` and `rewards/undesirable` over one kind, and `desirable`, the share of that kind.

    Args:
        beta: β, the strength of the pull to the reference.
        desirable_weight: Factor of desirable answers.
        undesirable_weight: Factor of undesirable answers.
        loss_type: "kto", "apo_zero_unpaired" or "bco".
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    loss_type: Literal["kto", "apo_zero_unpaired", "bco"] = "kto"
    reads: ClassVar[Collection[str]] = ("desirable", "mismatched", "kl_baseline", "reference_log_probs")

    def __post_init__(self):
        _check_scale(self.beta)
        check_choice("loss_type", self.loss_type, ("kto", "apo_zero_unpaired", "bco"))

    def of_answers(self, x: Pairs, desirable: Bool[Array, "*P"], z: Float[Array, "*#P"]) -> Pairs:
        """Computes the loss of each answer."""
        away = self.beta * (x - jax.lax.stop_gradient(z))
        cost = softplus if self.loss_type == "bco" else sigmoid
        return jnp.where(desirable, self.desirable_weight * cost(-away), self.undesirable_weight * cost(away))

    def _baseline(self, batch: Batch, ratio: Pairs, is_answer: Pairs) -> Float[Array, "B 1"]:
        """Returns z for each row."""
        if self.loss_type == "apo_zero_unpaired":
            return jnp.zeros((len(ratio), 1))
        if self.loss_type == "kto":
            return jnp.maximum(batch["kl_baseline"][:, None], 0)
        if "kl_baseline" in batch:
            return batch["kl_baseline"][:, None]
        return jnp.broadcast_to(jnp.sum(is_answer * ratio) / jnp.maximum(jnp.sum(is_answer), 1), (len(ratio), 1))

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if "reference_log_probs" not in batch:
            raise ValueError(missing_reference("KTO"))
        if self.loss_type == "kto" and "kl_baseline" not in batch:
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
        z = self._baseline(batch, ratio, is_answer)
        losses = self.of_answers(ratio, desirable, z)
        rewards = is_answer * self.beta * ratio
        sums = {
            "kl": jnp.sum(is_answer * z),
            "rewards": jnp.sum(rewards),
            "rewards/desirable": Quotient(jnp.sum(rewards * desirable), jnp.sum(is_answer * desirable)),
            "rewards/undesirable": Quotient(jnp.sum(rewards * ~desirable), jnp.sum(is_answer * ~desirable)),
            "desirable": jnp.sum(is_answer * desirable),
        }
        return jnp.sum(is_answer * losses), jax.lax.stop_gradient(Stats(jnp.sum(is_answer), sums))
