"""Advantages from rewards, on the host: N prompts, G completions of each, K rewards; NaN for missing rewards.

A batch is what a function gets: processes that sample apart gather all rewards before they normalize over the batch.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from maxlib._utils.arguments import check_choice

EPSILON = 1e-4  # added to the standard deviation
Rewards = Any  # an array or nested lists
Advantages = Float[np.ndarray, "N G"]


def group_advantages(rewards: Rewards, *, scale: Literal["group", "batch", "mean"] | None = "group") -> Advantages:
    """Computes each completion's advantage over the mean of its group (GRPO, arXiv:2402.03300).

    Args:
        rewards: One reward per completion, `N G`, NaN where there is none.
        scale: What to divide by: the standard deviation (with `n - 1`) of the "group" or the "batch", the "mean" of the
            group (MaxRL, arXiv:2602.02710, for rewards of at least 0), or None for no scaling (Dr. GRPO,
            arXiv:2503.20783).

    Returns:
        The advantages: 0 for completions without a reward, and for groups with equal rewards.

    Raises:
        ValueError: when groups have a single completion, which is its own mean.
    """
    check_choice("scale", scale, ("group", "batch", "mean", None))
    rewards = _checked(rewards)
    mean, std = _moments(rewards)
    deviation = rewards - mean
    if scale == "mean":
        if (rewards < 0).any():
            raise ValueError('scale="mean" needs rewards of at least 0, such as 0 and 1')
        deviation /= mean + EPSILON
    elif scale is not None:
        deviation /= (std if scale == "group" else _moments(rewards.reshape(1, -1))[1]) + EPSILON
    return _finished(deviation, rewards)


def leave_one_out(rewards: Rewards, *, normalize: bool = False) -> Advantages:
    """Computes each reward minus the mean of the others of its group (RLOO, arXiv:2402.14740).

    Args:
        rewards: One reward per completion, `N G`, NaN where there is none.
        normalize: True subtracts the mean of the batch's advantages and divides by their standard deviation.

    Raises:
        ValueError: when groups have a single completion.
    """
    rewards = _checked(rewards)
    count = np.sum(~np.isnan(rewards), axis=1, keepdims=True)
    # r_i - (sum - r_i) / (n - 1) = n / (n - 1) (r_i - mean)
    deviation = count / np.maximum(count - 1, 1) * (rewards - _moments(rewards)[0])
    deviation = np.where(count > 1, deviation, 0 * rewards)
    return _finished(_normalized(deviation, over_batch=True) if normalize else deviation, rewards)


def combine_rewards(rewards: Rewards, weights: Sequence[float] | None = None) -> Float[np.ndarray, "N G"]:
    """Sums several rewards with weights; a completion without any score stays NaN.

    Args:
        rewards: K rewards per completion, `N G K`; NaN counts as 0 if others are present.
        weights: Factor of each, 1 by default.
    """
    rewards = np.asarray(rewards, np.float64)
    factors = np.ones(rewards.shape[-1]) if weights is None else np.asarray(weights, np.float64)
    if factors.shape != rewards.shape[-1:]:
        raise ValueError(f"there must be a weight for each of the {rewards.shape[-1]} rewards, got {factors.shape}")
    return np.where(np.isnan(rewards).all(axis=-1), np.nan, np.nansum(rewards * factors, axis=-1))


def decoupled_advantages(rewards: Rewards, weights: Sequence[float] | None = None) -> Advantages:
    """Normalizes each of several rewards in its group, sums them, and normalizes over the batch (GDPO, 2601.05242).

    Args:
        rewards: K rewards per completion, `N G K`, NaN where there is none.
        weights: Factor of each, 1 by default.

    Raises:
        ValueError: when groups have a single completion.
    """
    rewards = np.asarray(rewards, np.float64)
    scaled = [_normalized(_checked(reward)) for reward in np.moveaxis(rewards, -1, 0)]
    total = combine_rewards(np.stack(scaled, axis=-1), weights)
    return _finished(_normalized(total, over_batch=True), total)


def kl_penalized(rewards: Any, old: Any, reference: Any, mask: Any, *, beta: float) -> np.ndarray:
    """Subtracts `beta * Σ mask (old - reference)` from the rewards, RLOO's penalty for leaving the reference.

    Args:
        rewards: One reward per completion, of any shape.
        old: Log-probabilities under the sampling policy, with a last axis of tokens.
        reference: Log-probabilities under the reference.
        mask: True for the completion's tokens.
        beta: Factor of the divergence.
    """
    difference = np.where(mask, np.asarray(old) - np.asarray(reference), 0)
    return np.asarray(rewards) - beta * difference.sum(-1)


def overlong_penalty(lengths: Any, *, longest: int, buffer: int) -> np.ndarray:
    """Computes DAPO's penalty of overlong completions (arXiv:2503.14476): 0 up to `longest - buffer`, 1 from `longest`.

    Args:
        lengths: Numbers of tokens.
        longest: Maximum length.
        buffer: Number of tokens over which the penalty grows.

    Raises:
        ValueError: when `buffer` is not positive.
    """
    if not buffer > 0:
        raise ValueError(f"buffer must be a positive number of tokens, over which the penalty grows, got {buffer}")
    return np.clip((np.asarray(lengths) - (longest - buffer)) / buffer, 0.0, 1.0)


def has_spread(rewards: Rewards) -> np.ndarray:
    """Returns whether the rewards of each group differ; groups without spread give no gradient (DAPO replaces them)."""
    return _moments(np.asarray(rewards, np.float64))[1][:, 0] > 1e-8


def reward_metrics(rewards: Rewards) -> dict[str, float]:
    """Computes `reward`, `reward_std`, `frac_reward_zero_std` (groups without spread) and `unscored`."""
    rewards = np.asarray(rewards, np.float64)
    mean, std = _moments(rewards.reshape(1, -1))
    return {
        "reward": mean.item(),
        "reward_std": std.item(),
        "frac_reward_zero_std": float(np.mean(~has_spread(rewards))),
        "unscored": int(np.isnan(rewards).sum()),
    }


def _checked(rewards: Any) -> np.ndarray:
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards must be 'N G', G > 1 completions of each of N prompts, got the shape {rewards.shape}: a group of one "
            "completion has no baseline; sample at least two"
        )
    if np.isinf(rewards).any():
        raise ValueError("rewards must be finite, or NaN for a completion that was not scored; got infinity")
    return rewards


def _finished(advantages: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """Sets the advantages of unscored completions to 0; warns if no group gives a gradient."""
    if not has_spread(rewards).any():
        warnings.warn(
            "all rewards of each group are equal, so all advantages are 0 and nothing is learned; `reward_metrics` has the share "
            "of such groups (frac_reward_zero_std)",
            stacklevel=3,
        )
    return np.nan_to_num(advantages, nan=0.0).astype(np.float32)


def _moments(rewards: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes mean and standard deviation (with `n - 1`) of the scores in each row, `N 1`; 0 if there are none."""
    scored = ~np.isnan(rewards)
    count = scored.sum(1, keepdims=True)
    mean = np.where(scored, rewards, 0).sum(1, keepdims=True) / np.maximum(count, 1)
    square = np.where(scored, rewards - mean, 0) ** 2
    return mean, np.sqrt(square.sum(1, keepdims=True) / np.maximum(count - 1, 1))


def _normalized(rewards: np.ndarray, *, over_batch: bool = False) -> np.ndarray:
    """Subtracts the mean of each group, or of the batch, and divides by the standard deviation."""
    mean, std = _moments(rewards.reshape(1, -1) if over_batch else rewards)
    return (rewards - mean) / (std + EPSILON)


class AdaptiveEntropy:
    """Adapts the factor of the entropy bonus so that the entropy stays above a target (Skywork-OR1, arXiv:2505.22312).

    The factor grows by `delta` for a batch whose entropy is at most the target, and otherwise shrinks and is not used.
    Checkpoints do not have it: a resumed run begins at `factor`.
    The entropy is estimated without bias: the mean of the sampled tokens' negative log-probabilities.

        entropy = post_training.AdaptiveEntropy(target=0.2)
        scores = [[-0.2, -0.1]]
        batch = post_training.completion_batch([[1]], [[2, 3]], [1.0], length=4, sampler_log_probs=scores)
        batch |= {"entropy_factor": entropy(batch)}

    Args:
        factor: The first factor.
        target: Entropy in nats.
        delta: Change of the factor.
        low: Smallest factor.
        high: Largest factor.
    """

    def __init__(
        self, factor: float = 0.0, *, target: float = 0.2, delta: float = 0.005, low: float = 0.0, high: float = 1.0
    ):
        self.factor, self.target, self.delta, self.low, self.high = factor, target, delta, low, high

    def __call__(self, batch: Mapping[str, Any]) -> Float[np.ndarray, " B"]:
        """Returns the factor for each row of a batch with `targets` and `sampler_log_probs`."""
        log_probs = np.asarray(batch["sampler_log_probs"])
        learned = np.asarray(batch["targets"]) >= 0
        scored = log_probs[learned & ~np.isnan(log_probs)]
        if not scored.size:  # nothing tells the entropy
            return np.zeros(len(learned), np.float32)
        is_low = -np.mean(scored) <= self.target
        changed = self.factor + (self.delta if is_low else -self.delta)
        self.factor = min(max(changed, self.low), self.high)
        return np.full(len(learned), self.factor if is_low else 0.0, np.float32)
