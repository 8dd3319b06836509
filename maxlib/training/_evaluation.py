"""Evaluation: the mean loss over held-out batches, and how often a `Trainer` computes it."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from maxlib.training._prefetch import IterableLoader, as_loader
from maxlib.training._state import TrainState
from maxlib.training._step import means
from maxlib.training.losses import Batch, Stats


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluation of a training run on held-out data: which batches, and how often.

    Args:
        loader: This host's rows of the held-out batches, read from the start each time: a loader or a list. It must not
            be the training loader.
        every: Steps between evaluations; 0 evaluates only at the end of the run.
        batches: Number of batches to read; None reads to the end.

    Raises:
        TypeError: for what is neither, such as a generator, which can be read only once.
        ValueError: for a negative `every`, or less than one batch.
    """

    loader: Any  # StatefulLoader, or an iterable that becomes one
    every: int = 0
    batches: int | None = None

    def __post_init__(self):
        object.__setattr__(self, "loader", as_loader(self.loader, "Evaluation.loader"))
        if isinstance(self.loader, IterableLoader) and self.loader.is_one_pass:
            raise TypeError(
                "Evaluation reads its batches from the first one each time, which a "
                f"{type(self.loader.batches).__name__} cannot: give a list of batches, or a loader"
            )
        if self.every < 0 or (self.batches is not None and self.batches < 1):
            raise ValueError(
                f"Evaluation needs every of at least 0 and at least one batch, got every={self.every} and "
                f"batches={self.batches}"
            )


def evaluate(
    eval_step: Callable[[TrainState, Batch], Stats], state: TrainState, batches: Iterable[Batch]
) -> dict[str, Any]:
    """Evaluates a loss on all `batches`; returns its sums per target, and the number of targets as `num_targets`.

    Every target has the same weight, no matter how targets are divided into batches.

    Args:
        eval_step: `jax.jit(make_eval_step(loss))`.
        state: The state with the parameters to evaluate.
        batches: The batches to evaluate.

    Raises:
        ValueError: when there is no target at all.
    """
    total = None
    for batch in batches:
        stats = eval_step(state, batch)
        total = stats if total is None else jax.tree.map(jnp.add, total, stats)
    if total is None or float(total.num_targets) == 0:
        raise ValueError("evaluation needs at least one batch with a target, got none. Give it more held-out data")
    return {"num_targets": float(total.num_targets)} | jax.device_get(means(total))
