"""The mean loss over held-out batches."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from maxlib.training._objectives.objective import Batch, Stats
from maxlib.training._step import TrainState, means


def evaluate(
    eval_step: Callable[[TrainState, Batch], Stats], state: TrainState, batches: Iterable[Batch]
) -> dict[str, Any]:
    """Evaluates a loss on all `batches`: its sums per target, and the number of targets as `num_targets`.

    Every target has the same weight, however the targets are divided into batches.

    Args:
      eval_step: `jax.jit(make_eval_step(loss_fn))`.
      state: the state with the parameters to evaluate.
      batches: the batches to evaluate.

    Raises:
      ValueError: when there is no target at all.
    """
    total = None
    for batch in batches:
        stats = eval_step(state, batch)
        total = stats if total is None else jax.tree.map(jnp.add, total, stats)
    if total is None or float(total.num_targets) == 0:
        raise ValueError(
            "evaluation needs at least one batch with a target; there was none. Give it more held-out data"
        )
    return {"num_targets": float(total.num_targets)} | jax.device_get(means(total))
