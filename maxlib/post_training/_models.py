"""Log-probabilities of targets under a model, and models that are compared."""

from typing import Any

import jax
import jax.numpy as jnp

from maxlib import nn
from maxlib.training._objectives.objective import Batch, run, scores
from maxlib.training._objectives.second_model import WithFrozen as WithFrozen


def log_probs(
    model: Any,
    batch: Batch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: Any = jnp.bfloat16,
    remat: nn.remat.Policy = None,
) -> nn.TokenLogProbs:
    """Computes the log-probabilities of a batch's targets, without storing all logits.

    Args:
        model: Any `nn.Model`.
        batch: `tokens` and `targets` (-1: not scored), and other inputs of the model.
        temperature: Divisor of the logits; for a policy, the temperature of its sampler.
        entropy: True computes entropies too.
        dtype: Dtype of the computation.
        remat: What layers keep for a backward pass.

    Returns:
        One value per token, 0 where it is not scored.
    """
    hidden = run(model, batch, dtype=dtype, remat=remat).hidden
    return scores(model, hidden, batch["targets"], temperature=temperature, entropy=entropy)


def frozen_log_probs(model: Any, batch: Batch, **options: Any) -> jax.Array:
    """Computes `log_probs` without gradients."""
    return jax.lax.stop_gradient(log_probs(jax.lax.stop_gradient(model), batch, **options).log_prob)
