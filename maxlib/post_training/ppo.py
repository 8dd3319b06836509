"""PPO with a critic (arXiv:1707.06347): advantages of tokens from their values, and the two losses.

The policy and the critic are two models with a step each. Values are those of `token_scores`: the value at a token is
that of the text up to it, before the target is chosen. Shapes: B rows, T tokens; all arrays are aligned with targets.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from maxlib.ops import is_learned
from maxlib.post_training.policies import Mean, PolicyLoss
from maxlib.training.losses import Batch, Loss, Stats, num_learned

Rows = Any  # an array B T, or nested lists


def token_rewards(
    scores: Any, mask: Rows, *, old: Rows = None, reference: Rows = None, beta: float = 0.05
) -> Float[np.ndarray, "B T"]:
    """Makes rewards of tokens: each row's score at its last sampled token, minus β (old - reference) at every one.

    Args:
        scores: The score of each row's completion, `B`.
        mask: True for sampled tokens.
        old: Log-probabilities under the sampling policy.
        reference: Those under the reference; None for no penalty.
        beta: β, the strength of the pull to the reference.

    Raises:
        ValueError: when a row with sampled tokens has no score, NaN as that of a reward that failed.
    """
    mask, scores = np.asarray(mask, bool), np.asarray(scores, np.float64)
    if not np.isfinite(scores[mask.any(axis=1)]).all():
        raise ValueError(
            f"scores must be finite, or `gae` and `whiten` make the advantages of all rows NaN; got {scores}: leave out "
            "rows without a score, mask and targets"
        )
    rewards = np.zeros(mask.shape)
    if reference is not None:
        rewards -= np.where(mask, beta * (np.asarray(old, np.float64) - np.asarray(reference, np.float64)), 0)
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    rewards[np.arange(len(mask)), last] += np.where(mask.any(axis=1), scores, 0)
    return rewards


def gae(
    rewards: Rows, values: Rows, mask: Rows, *, gamma: float = 1.0, lam: float = 0.95, segment_ids: Rows = None
) -> tuple[Float[np.ndarray, "B T"], Float[np.ndarray, "B T"]]:
    """Computes generalized advantages (arXiv:1506.02438), A_t = δ_t + γλ A_{t+1}, δ_t = r_t + γ V_{t+1} - V_t.

    Tokens outside of the mask, such as a tool's, are skipped: t + 1 is the next sampled token. After the last one V is
    0.

    Args:
        rewards: Reward of each token (`token_rewards`).
        values: The critic's value at each token.
        mask: True for sampled tokens.
        gamma: γ, the discount.
        lam: λ: 1 for the return minus the value, 0 for one step.
        segment_ids: Sequences of packed rows, None for one per row.

    Returns:
        The advantages, and the returns A + V that the critic learns; 0 outside of the mask.

    Raises:
        ValueError: when shapes differ.
    """
    rewards, values, mask = np.asarray(rewards, np.float64), np.asarray(values, np.float64), np.asarray(mask, bool)
    if not rewards.shape == values.shape == mask.shape:
        raise ValueError(
            f"rewards, values and mask must be B T each, aligned with targets, got {rewards.shape}, {values.shape} and "
            f"{mask.shape}"
        )
    advantages = np.zeros(mask.shape)
    next_value, carry = np.zeros(len(mask)), np.zeros(len(mask))
    ids = np.ones(mask.shape, int) if segment_ids is None else np.asarray(segment_ids)
    for t in reversed(range(mask.shape[1])):
        ends = ids[:, t] != ids[:, min(t + 1, mask.shape[1] - 1)]
        next_value, carry = np.where(ends, 0, next_value), np.where(ends, 0, carry)
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carry = np.where(mask[:, t], delta + gamma * lam * carry, carry)
        next_value = np.where(mask[:, t], values[:, t], next_value)
        advantages[:, t] = np.where(mask[:, t], carry, 0)
    return advantages, np.where(mask, advantages + values, 0)


def whiten(values: Rows, mask: Rows, *, shift_mean: bool = True) -> Float[np.ndarray, "B T"]:
    """Scales the values inside the mask to a variance of 1, and shifts their mean to 0; 0 outside of it.

    Args:
        values: Such as the advantages of a batch.
        mask: True for values that count.
        shift_mean: False keeps the mean.
    """
    values, mask = np.asarray(values, np.float64), np.asarray(mask, bool)
    inside = values[mask]
    if len(inside) < 2:
        raise ValueError(f"whiten needs at least two values inside the mask, got {len(inside)}: take a larger batch")
    mean = inside.mean()
    white = (values - mean) / np.sqrt(inside.var(ddof=1) + 1e-8)
    return np.where(mask, white if shift_mean else white + mean, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PPO(PolicyLoss):
    """PPO's loss of the policy (arXiv:1707.06347), a mean over tokens; its advantages are `B T`, those of `gae`.

    `surrogate=Clip(0.2, 0.2, delta=3.0)` is dual-clip PPO (arXiv:1912.09729). Options are those of `PolicyLoss`.
    """

    mean: Mean = "token"


@dataclasses.dataclass(frozen=True)
class ValueLoss(Loss):
    """Loss of a critic: ½ max((V - R)², (clip(V, V_old ± ε) - R)²), a mean over the tokens with targets.

    The batch has `returns` R (`gae`) and, to clip, `old_values` V_old, `B T` each. Metrics: `value`, `value_error`, the
    mean of `|V - R|`, and `clip_ratio`.

    Args:
        clip: ε, how far a value may move from the one at sampling and still be pulled on; None for no limit.
    """

    clip: float | None = 0.2
    reads: ClassVar[Collection[str]] = ("returns", "old_values")

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        required = ("returns",) if self.clip is None else ("returns", "old_values")
        if missing := [name for name in required if name not in batch]:
            raise ValueError(f"ValueLoss needs batch[{missing[0]!r}], an array B T (post_training.ppo.gae)")
        mask = is_learned(batch["targets"])
        values, returns = (jnp.where(mask, x, 0) for x in (model.logits(hidden)[..., 0], batch["returns"]))
        losses = (values - returns) ** 2
        clipped = jnp.zeros_like(mask)
        if self.clip is not None:
            old = jnp.where(mask, batch["old_values"], 0)
            limited = (jnp.clip(values, old - self.clip, old + self.clip) - returns) ** 2
            clipped = limited > losses
            losses = jnp.maximum(losses, limited)
        metrics = {"value": values, "value_error": jnp.abs(values - returns), "clip_ratio": clipped}
        sums = {name: jnp.sum(jnp.where(mask, value, 0)) for name, value in metrics.items()}
        return 0.5 * jnp.sum(jnp.where(mask, losses, 0)), jax.lax.stop_gradient(Stats(num_learned(batch), sums))
