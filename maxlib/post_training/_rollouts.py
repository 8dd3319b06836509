"""A loader of batches that a function samples."""

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


class Rollouts:
    """A loader whose batches a function samples by number, such as completions by the newest weights.

    Its position is the number of the next batch, so a resumed run goes on with the same prompts and keys.

        def sample(number):
            engine.update(trainer.state.trainable)
            ...
            return post_training.completion_batch(...), post_training.reward_metrics(rewards)

        rollouts = post_training.Rollouts(sample)
        trainer = training.Trainer(model, optimizer=optimizer, loader=rollouts, loss=loss)

    Args:
        sample: Takes the number of a batch, from 0, and returns this host's rows and metrics, which are written with
            those of the step.
    """

    def __init__(self, sample: Callable[[int], tuple[Row, Mapping[str, Any]]]):
        self.sample, self._next, self._metrics = sample, 0, {}

    def __iter__(self) -> "Rollouts":
        return self

    def __next__(self) -> Row:
        batch, self._metrics = self.sample(self._next)
        self._next += 1
        return batch

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last batch."""
        return dict(self._metrics)

    def reset(self) -> None:
        """Returns to the first batch."""
        self._next = 0

    def get_state(self) -> dict[str, Any]:
        """Returns the position."""
        return {"0": {"next": self._next}}

    def set_state(self, state: Any) -> None:
        """Continues from a position."""
        self._next = state["0"]["next"]
