"""Evaluation: the mean loss over held-out batches, and how often a `Trainer` computes it."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from maxlib.training._prefetch import IterableLoader, as_loader
from maxlib.training._state import TrainState
from maxlib.training._step import means
from maxlib.training.losses import Batch, LossFunction, Stats


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Evaluation of a training run on held-out data: which batches, how often, and what to compute.

    Args:
        loader: This host's rows of the held-out batches, read from the start each time: a loader or a list. It must not
            be the training loader.
        every: Steps between evaluations; 0 evaluates only at the end of the run.
        batches: Number of batches to read; None reads to the end.
        at: Further steps at which to evaluate, such as (10, 100, 1000).
        loss: The loss to evaluate, such as `BySource`; None for that of the training.
        ema: True evaluates the averages of the parameters (`ema_model`) instead of the parameters.
        stop_at: Name and value of a metric: training ends once an evaluation finds the metric at or below the value,
            such as `("nll", 3.0)`.

    Raises:
        TypeError: for what is neither, such as a generator, which can be read only once.
        ValueError: for a negative `every`, or less than one batch; after the first evaluation, for a metric of
            `stop_at` that it does not compute.
    """

    loader: Any  # StatefulLoader, or an iterable that becomes one
    every: int = 0
    batches: int | None = None
    at: Collection[int] = ()
    loss: LossFunction | None = None
    ema: bool = False
    stop_at: tuple[str, float] | None = None

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

    def check_stop_at(self, metrics: Collection[str]) -> None:
        """Raises ValueError unless the metric of `stop_at` is among those of an evaluation."""
        if self.stop_at is not None and self.stop_at[0] not in metrics:
            raise ValueError(
                f"stop_at names the metric {self.stop_at[0]!r}, so training would never stop; an evaluation has "
                f"{', '.join(sorted(metrics))}"
            )

    def is_due(self, step: int) -> bool:
        """Returns whether to evaluate after this step."""
        return step in self.at or (self.every > 0 and step > 0 and step % self.every == 0)


def by_prefix(evaluation: Evaluation | Mapping[str, Evaluation] | None) -> dict[str, Evaluation]:
    """Returns evaluations by the prefix of their metrics: "eval/", or "eval/NAME/" if they have names.

    Raises:
        TypeError: for anything that is no evaluation.
    """
    named = evaluation if isinstance(evaluation, Mapping) else {"": evaluation} if evaluation is not None else {}
    for value in named.values():
        if not isinstance(value, Evaluation):
            raise TypeError(
                "evaluation, or each value of a dictionary of several, must be a training.Evaluation(loader, every=100), "
                f"got {value!r:.80}"
            )
    return {f"eval/{name}/".replace("//", "/"): value for name, value in named.items()}


def target_reached(evaluations: Mapping[str, Evaluation], metrics: Mapping[str, Any]) -> str | None:
    """Returns a sentence about the first `stop_at` that these metrics meet; None if there is none."""
    for prefix, evaluation in evaluations.items():
        if evaluation.stop_at is not None:
            name, limit = f"{prefix}{evaluation.stop_at[0]}", evaluation.stop_at[1]
            if name in metrics and float(metrics[name]) <= limit:
                return f"{name} is {float(metrics[name]):.6g}, at most {limit:g}"
    return None


def evaluate(
    eval_step: Callable[[TrainState, Batch], Stats], state: TrainState, batches: Iterable[Batch]
) -> dict[str, Any]:
    """Evaluates a loss on all `batches`; returns its sums per target, and the number of targets as `num_targets`.

    Every target has the same weight, no matter how targets are divided into batches; sums over batches are in float64.

    Args:
        eval_step: `jax.jit(make_eval_step(loss))`.
        state: The state with the parameters to evaluate.
        batches: The batches to evaluate.

    Raises:
        ValueError: when there is no target at all.
    """
    total, running = None, None
    for batch in batches:
        running, done = eval_step(state, batch), running  # the device computes while the sums before are added
        total = _plus(total, done)
    total = _plus(total, running)
    if total is None or float(total.num_targets) == 0:
        raise ValueError("evaluation needs at least one batch with a target, got none. Give it more held-out data")
    return {"num_targets": float(total.num_targets)} | jax.device_get(means(total))


def _plus(total: Stats | None, stats: Stats | None) -> Stats | None:
    """Adds the sums of a batch on the host, in float64; None stands for nothing."""
    if stats is None:
        return total
    sums = jax.tree.map(lambda x: np.asarray(x, np.float64), jax.device_get(stats))
    return sums if total is None else jax.tree.map(np.add, total, sums)
