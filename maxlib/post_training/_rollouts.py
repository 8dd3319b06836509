"""Loaders of batches that a function samples: in turns with training, or in several engines while the model trains."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from maxlib.inference import Engine

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
        self.set_state({"0": {"next": 0}})

    def get_state(self) -> dict[str, Any]:
        """Returns the position."""
        return {"0": {"next": self._next}}

    def set_state(self, state: Any) -> None:
        """Continues from a position."""
        self._next = state["0"]["next"]


class AsyncRollouts(Rollouts):
    """Rollouts whose batches several engines sample in threads while the model trains.

    Batch n is trained on in step n, and no engine begins it with weights older than those of step
    `n - max_staleness`: it waits for newer ones. So nothing is sampled to be dropped, unless `sample` returns rows that
    were begun earlier: rows whose `weight_versions` are older teach nothing, and the metric `stale` is their share. The
    metric `staleness` is the age of the oldest other row's weights in steps. A policy loss learns from older samples
    with a correction by `sampler_log_probs`, or with `old_log_probs`.

        def sample(engine, number):
            ...
            return post_training.completion_batch(...), post_training.reward_metrics(rewards)

        rollouts = post_training.AsyncRollouts(sample, engines, lambda: copied(trainer.state.trainable))

    A resumed run begins with the batch after the last one trained on. `close` it, or leave its `with`, at the end.

    Args:
        sample: Takes an engine with new enough weights and the number of a batch, from 0, and returns this host's rows
            and metrics.
        engines: Engines, each of which is used by one thread.
        weights: Returns a copy of the newest weights; it is called in the thread of the loop, before each batch.
        max_staleness: Maximum age of weights in steps; 0 samples and trains in turns.
    """

    def __init__(
        self,
        sample: Callable[[Engine, int], tuple[Row, Mapping[str, Any]]],
        engines: Sequence[Engine],
        weights: Callable[[], Any],
        *,
        max_staleness: int = 1,
    ):
        if not engines or max_staleness < 0:
            raise ValueError(f"there must be an engine, and max_staleness at least 0, got {engines}, {max_staleness}")
        self.sample, self.engines, self.weights, self.max_staleness = sample, engines, weights, max_staleness
        self._changed, self._metrics, self._threads = threading.Condition(), {}, list[threading.Thread]()
        self._begin_at(0)

    def __next__(self) -> Row:
        newest = self.weights()
        with self._changed:
            self._newest = self._next, newest
            self._changed.notify_all()
            if not self._threads:
                self._closed = False
                self._threads = [threading.Thread(target=self._work, args=(e,), daemon=True) for e in self.engines]
                for thread in self._threads:
                    thread.start()
            self._changed.wait_for(lambda: self._error is not None or self._next in self._done)
            if self._error is not None:
                raise RuntimeError(f"an engine could not sample: {self._error!r}") from self._error
            batch, self._metrics = self._done.pop(self._next)
            self._next += 1
            return batch

    def set_state(self, state: Any) -> None:
        """Continues from a position; batches that were sampled ahead are dropped."""
        self.close()
        self._begin_at(state["0"]["next"])

    def close(self) -> None:
        """Ends the threads, each after the batch that it samples; the next batch starts them again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def __enter__(self) -> "AsyncRollouts":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _begin_at(self, number: int) -> None:
        self._next = self._unbegun = number  # the next batch to return, and to begin
        self._done: dict[int, tuple[Row, dict[str, Any]]] = {}
        self._newest: tuple[int, Any] | None = None  # step and weights
        self._error: BaseException | None = None
        self._closed = False

    def _work(self, engine: Engine) -> None:
        """Samples batches in one engine until the loader is closed."""
        version = None
        try:
            while (job := self._next_job()) is not None:
                number, (newest, weights) = job
                if newest != version:
                    engine.update(weights, newest)
                    version = newest
                batch, metrics = self.sample(engine, number)
                batch, ages = self._limited(batch, number, newest)
                with self._changed:
                    self._done[number] = batch, {**metrics, **ages}
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _limited(self, batch: Row, number: int, newest: int) -> tuple[Row, dict[str, float]]:
        """Returns a batch in which rows by too old weights teach nothing, and metrics of the age of the weights."""
        batch = dict(batch)
        ages = number - np.asarray(batch.pop("weight_versions", newest))
        is_old = ages > self.max_staleness
        if not is_old.any():
            return batch, {"staleness": float(ages.max()), "stale": 0.0}
        batch["targets"] = np.where(is_old[:, None], -1, batch["targets"])
        return batch, {"staleness": float(ages[~is_old].max(initial=0)), "stale": float(is_old.mean())}

    def _next_job(self) -> tuple[int, tuple[int, Any]] | None:
        """Returns the number of the next batch once there are new enough weights, with these; None at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or (self._newest and self._unbegun - self._newest[0] <= self.max_staleness)
            )
            if self._closed or self._newest is None:
                return None
            self._unbegun += 1
            return self._unbegun - 1, self._newest
