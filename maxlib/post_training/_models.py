"""Frozen reference and teacher models, and losses that compare with them."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.training._objectives.objective import Batch, Objective, run


class WithFrozen(nn.tree.HasFrozen):
    """A trained model together with a frozen one: the reference of preferences and policies, or a teacher.

    A `Trainer` and `make_state` exclude the frozen model automatically: it has no gradients, moments or weight decay.
    Your own filter decides for both models: begin its patterns with "trained.".

    Args:
        trained: The model to train.
        frozen: The other model, of any architecture; pass `trained` itself for its current state.
    """

    frozen_parts = ("frozen",)

    def __init__(self, trained: Any, frozen: Any):
        # Separate variables (arrays may be shared), so that training never changes the frozen model.
        self.trained, self.frozen = trained, jax.tree.map(lambda x: x, frozen)


class ComparedObjective(Objective):
    """A training loss that compares the model with a second one, such as a reference or a teacher.

    The second model is `option(model)`, such as `adapters.base_model`, or the frozen model of `WithFrozen`; or its
    outputs are in the batch.

    Args:
        from_hidden: As for `Objective`.
        option: Name of the option of the loss, such as "reference".
        compare: Returns the batch with the second model's outputs. Takes the model, the second model (None if there is
            none), the batch, and by keyword temperature, dtype and remat.
        reads: As for `objective`.
    """

    def __init__(self, from_hidden: Any, *, option: str, compare: Callable[..., Batch], reads: Collection[str]):
        super().__init__(from_hidden, reads=reads)
        self.option, self.compare = option, compare
        new = inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=None)
        self.__signature__ = self.__signature__.replace(parameters=[*self.__signature__.parameters.values(), new])

    def prepared(self, model: Any, batch: Batch, options: dict[str, Any], **how: Any) -> tuple[Any, Batch, dict]:
        """Returns the trained model, the batch with the second model's outputs, and the other options."""
        other, frozen = options.pop(self.option, None), None
        if other is not None and (not callable(other) or nn.variables(other)):
            raise TypeError(
                f"{self.option} must be a function from the trained model to the other one, such as "
                f"adapters.base_model, got {type(other).__name__}: put a model of its own beside the trained one, "
                "WithFrozen(trained, frozen)"
            )
        if other is not None:
            frozen = other(model)
        elif isinstance(model, WithFrozen):
            model, frozen = model.trained, model.frozen
        temperature = options.get("temperature", 1.0)
        return model, self.compare(model, frozen, batch, temperature=temperature, **how), options


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


def scores(head: Any, hidden: Float[Array, "B T D"], targets: Any, **options: Any) -> nn.TokenLogProbs:
    """Computes a head's log-probabilities of targets."""
    return nn.token_log_probs(hidden, head.head_weight(), targets, softcap=head.softcap, **options)


def frozen_log_probs(model: Any, batch: Batch, **options: Any) -> jax.Array:
    """Computes `log_probs` without gradients."""
    return jax.lax.stop_gradient(log_probs(jax.lax.stop_gradient(model), batch, **options).log_prob)
