"""A frozen model beside the trained one, with which losses compare it."""

from collections.abc import Callable
from typing import Any

import jax

from maxlib import nn


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
