"""Frozen models to compare with, references and teachers, and what they give each target."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import nn
from maxlib.training._objectives.objective import Batch, run, scores


class WithFrozen(nn.tree.HasFrozen):
    """A trained model together with a frozen one: the reference of preferences and policies, or a teacher.

    A `Trainer` and `make_state` exclude the frozen model: it has no gradients, moments or weight decay. Your own filter
    decides for both models: begin its patterns with "trained.".

    Args:
        trained: The model to train.
        frozen: The other model, of any architecture; pass `trained` itself for its current state.
    """

    frozen_parts = ("frozen",)

    def __init__(self, trained: Any, frozen: Any):
        # Separate variables (arrays may be shared), so that training never changes the frozen model.
        self.trained, self.frozen = trained, jax.tree.map(lambda x: x, frozen)


def trained_and_frozen(model: Any, other: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    """Returns the model to train and the one to compare with: `other(model)`, that of `WithFrozen`, or None."""
    if other is not None and (not callable(other) or nn.variables(other)):
        raise TypeError(
            "a reference or teacher must be a function from the trained model to the other one, such as "
            f"adapters.base_model, got {type(other).__name__}: put a model of its own beside the trained one, "
            "WithFrozen(trained, frozen)"
        )
    if other is not None:
        return model, other(model)
    return (model.trained, model.frozen) if isinstance(model, WithFrozen) else (model, None)


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
