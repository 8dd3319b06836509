"""Preference losses: functions of the summed log-probabilities of two answers to a prompt.

Notation: c and r are sums over the tokens of the chosen and the rejected answer of `log p - log p_reference` (of `log
p` for kinds without a reference), n_c and n_r their numbers of tokens, sp(x) = log(1 + e^x), σ the logistic function.
"""

import dataclasses
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.nn import sigmoid, softplus
from jaxtyping import Array, Bool, Float

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
        mean = lambda total, count: jnp.where(count > 0, total / jnp.maximum(count, 1), -1.0)
        return mean(self.chosen, self.chosen_tokens), mean(self.rejected, self.rejected_tokens)

    @property
    def difference(self) -> Pairs:
        """Returns c - r."""
        return self.chosen - self.rejected

    @property
    def mean_difference(self) -> Pairs:
        """Returns c/n_c - r/n_r."""
        return jnp.subtract(*self.means)


@dataclasses.dataclass(frozen=True)
class Preference:
    """Base class of preference losses: `kind(answers)` is one number per pair.

    Attributes:
        beta: Strength of the pull to the reference, or scale of the rewards.
        needs_reference: True if c and r are ratios to a reference.
        nll: Weight of the negative log-likelihood of the chosen answer, which is added to the loss of pairs.
        nll_of_prompt: True if that likelihood includes the prompt.
        per_token: True if rewards are means over tokens.
    """

    beta: float = 0.1
    needs_reference: ClassVar[bool] = True
    per_token: ClassVar[bool] = False
    nll: ClassVar[float] = 0.0
    nll_of_prompt: ClassVar[bool] = False

    def __post_init__(self):
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, got {self.beta}")
        noise = getattr(self, "label_smoothing", 0.0)
        if not 0 <= noise < 0.5:
            raise ValueError(f"label_smoothing is the share of wrong labels, in [0, 0.5), got {noise}")

    def __call__(self, answers: Answers) -> Pairs:
        """Computes the loss of each pair."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__(answers) -> the loss of each pair")

    def rewards(self, answers: Answers) -> tuple[Pairs, Pairs]:
        """Returns the implicit rewards of the chosen and the rejected answers, for metrics."""
        chosen, rejected = answers.means if self.per_token else answers[:2]
        return self.beta * chosen, self.beta * rejected


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
class DPO(Preference):
    """DPO (arXiv:2305.18290) and its relatives, with Δ = β (c - r).

    c and r are sums over the n_c and n_r tokens of the chosen and the rejected answer of `log p - log p_reference`,
    sp(x) = log(1 + e^x), and σ is the logistic function.

        loss = functools.partial(post_training.preference_loss, kind=post_training.DPO(beta=0.1))

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

    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        if self.loss_type not in _LOSSES:
            raise ValueError(f"loss_type must be one of {', '.join(_LOSSES)}, got {self.loss_type!r}")
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing is for 'sigmoid' and 'robust', got it for {self.loss_type!r}")

    def __call__(self, answers: Answers) -> Pairs:
        return _LOSSES[self.loss_type](answers, self.beta, self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class SimPO(Preference):
    """SimPO (arXiv:2405.14734), without a reference: (1-ε) sp(-x) + ε sp(x), x = β (c/n_c - r/n_r) - γ."""

    beta: float = 2.0
    gamma: float = 1.0
    label_smoothing: float = 0.0
    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True

    def __call__(self, answers: Answers) -> Pairs:
        return _smoothed(self.beta * answers.mean_difference - self.gamma, self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class ORPO(Preference):
    """ORPO (arXiv:2403.07691), without a reference: β sp(-o) plus the NLL of prompt and chosen answer.

    o is the log of the ratio of odds: x_c - x_r - (L(x_c) - L(x_r)), x = mean log p, L(x) = log(1 - e^x). x is at most
    -1e-12, because the odds of a probability of 1 are infinite.
    """

    needs_reference: ClassVar[bool] = False
    per_token: ClassVar[bool] = True
    nll: ClassVar[float] = 1.0
    nll_of_prompt: ClassVar[bool] = True

    def __call__(self, answers: Answers) -> Pairs:
        chosen, rejected = (jnp.minimum(x, -1e-12) for x in answers.means)
        log_not = lambda x: jnp.log(-jnp.expm1(x))
        return self.beta * softplus(-(chosen - rejected - (log_not(chosen) - log_not(rejected))))


@dataclasses.dataclass(frozen=True)
class ChosenNLL(Preference):
    """The negative log-likelihood of the chosen answers, per token: supervised tuning inside a `Mixture`."""

    needs_reference: ClassVar[bool] = False
    nll: ClassVar[float] = 1.0

    def __call__(self, answers: Answers) -> Pairs:
        return jnp.zeros_like(answers.chosen)


@dataclasses.dataclass(frozen=True)
class Mixture:
    """A weighted sum of preference losses, such as MPO's (arXiv:2411.10442).

    Args:
        terms: Pairs of weight and loss, `((0.8, DPO()), (0.2, DPO(0.1, "bco_pair")), (1.0, ChosenNLL()))`. Rewards in
            metrics are those of the first.

    Raises:
        ValueError: when there is no term, or terms disagree on whether c and r are ratios to a reference.
    """

    terms: tuple[tuple[float, Preference], ...]

    def __post_init__(self):
        of_pairs = {kind.needs_reference for _, kind in self.terms if not isinstance(kind, ChosenNLL)}
        if len(of_pairs) != 1 or any(kind.nll_of_prompt for _, kind in self.terms):
            raise ValueError(
                "a Mixture takes losses of pairs that all have a reference or all have none, and ChosenNLL for the "
                f"likelihood (ORPO brings its own), got {[type(kind).__name__ for _, kind in self.terms]}"
            )

    nll_of_prompt: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        """Returns True if c and r are ratios to a reference."""
        return any(kind.needs_reference for _, kind in self.terms)

    @property
    def nll(self) -> float:
        """Returns the weight of the likelihood."""
        return sum(weight * kind.nll for weight, kind in self.terms)

    def __call__(self, answers: Answers) -> Pairs:
        """Computes the loss of each pair."""
        return jnp.stack([weight * kind(answers) for weight, kind in self.terms]).sum(0)

    def rewards(self, answers: Answers) -> tuple[Pairs, Pairs]:
        """Returns the implicit rewards of the first loss."""
        return self.terms[0][1].rewards(answers)


@dataclasses.dataclass(frozen=True)
class KTO:
    """KTO (arXiv:2402.01306), for answers that are desirable or not: w σ(∓β (x - z)), x = Σ (log p - log p_reference).

    z estimates the divergence from the reference: the mean of x over answers to *other* prompts. It is at least 0 and
    has no gradient; both are essential.

    Args:
        beta: Strength of the pull to the reference.
        desirable_weight: Factor of desirable answers.
        undesirable_weight: Factor of undesirable answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __call__(self, x: Pairs, desirable: Bool[Array, "*P"], z: Float[Array, "*#P"]) -> Pairs:
        """Computes the loss of each answer."""
        away = self.beta * (x - jax.lax.stop_gradient(jnp.maximum(z, 0)))
        return jnp.where(desirable, self.desirable_weight * sigmoid(-away), self.undesirable_weight * sigmoid(away))
