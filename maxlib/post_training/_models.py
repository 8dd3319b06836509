"""Models beside the one that is trained: references and teachers; and the log-probabilities that they give."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxlib import nn

_INPUTS = ("positions", "segment_ids", "valid", "images")
Other = Callable[[Any], Any]


class WithFrozen(nnx.Module):
    """A model that is trained, and one beside it that is not: the reference of preferences and policies, or a teacher.

    Train it with `filter=training.trainable_only("trained.*")`: the frozen model has no gradients and no moments.

    Args:
        trained: The model to train.
        frozen: The other one, of any architecture.
    """

    def __init__(self, trained: Any, frozen: Any):
        self.trained, self.frozen = trained, frozen


def trained_and_frozen(model: Any, other: Other | None, what: str) -> tuple[Any, Any]:
    """Returns the model to train and the other one, None if there is none.

    Args:
        model: A model, or `WithFrozen`.
        other: A function from the model to the other one, such as `adapters.base`.
        what: Name of the option, for errors.

    Raises:
        TypeError: when `other` is a model.
    """
    if other is not None and (not callable(other) or nn.variables(other)):
        raise TypeError(
            f"{what} must be a function from the trained model to the other one, such as adapters.base, got "
            f"{type(other).__name__}: put a model of its own beside the trained one, WithFrozen(trained, frozen)"
        )
    if other is not None:
        return model, other(model)
    return (model.trained, model.frozen) if isinstance(model, WithFrozen) else (model, None)


def hidden_states(model: Any, batch: dict[str, Any], *, dtype: Any, remat: nn.remat.Policy = None) -> nn.Output:
    """Runs a model on a batch's tokens."""
    inputs = {name: batch[name] for name in _INPUTS if name in batch}
    return model(batch["tokens"], dtype=dtype, remat=remat, **inputs)


def log_probs(
    model: Any,
    batch: dict[str, Any],
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: Any = jnp.bfloat16,
    remat: nn.remat.Policy = None,
) -> nn.TokenLogProbs:
    """Computes the log-probabilities of a batch's targets, without making all logits.

    Args:
        model: Any model of the contract.
        batch: `tokens` and `targets` (-1: not scored), and what else the model reads.
        temperature: Divisor of the logits; policies take that of their sampler.
        entropy: True computes entropies too.
        dtype: Dtype of the computation.
        remat: What layers keep for a backward pass.

    Returns:
        One value per token, 0 where it is not scored.
    """
    out = hidden_states(model, batch, dtype=dtype, remat=remat)
    options = {"temperature": temperature, "softcap": model.softcap, "entropy": entropy}
    return nn.token_log_probs(out.hidden, model.head_weight(), batch["targets"], **options)


def frozen_log_probs(model: Any, batch: dict[str, Any], **options: Any) -> jax.Array:
    """Computes `log_probs` without gradients."""
    return jax.lax.stop_gradient(log_probs(jax.lax.stop_gradient(model), batch, **options).log_prob)
