"""Rewards in processes of their own, each with a deadline: what goes wrong is counted, and is never a score."""

import collections
import contextlib
import math
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
from jaxtyping import Float

Reward = Callable[[Any], float | None]
FAILURES = "timeout", "error", "nan"


class RewardPool:
    """Processes that score completions.

    A reward is a function of one item, such as a dict of a document and a completion, that returns a number, or None
    for "not scored". One that takes longer than `timeout`, raises, ends its process, or returns no finite number leaves
    NaN and adds to a count. Functions and items are pickled, so functions must be importable from a module.

    Args:
        rewards: A reward, or several.
        processes: Number of processes.
        timeout: Seconds that one reward may take for one item.
    """

    def __init__(self, rewards: Reward | Sequence[Reward], *, processes: int = 4, timeout: float = 10.0):
        if processes < 1 or not timeout > 0:
            raise ValueError(f"processes and timeout must be positive, got {processes} and {timeout}")
        self.rewards, self.timeout = list(rewards) if isinstance(rewards, Sequence) else [rewards], timeout
        self.outcomes = collections.Counter[str]()
        self._workers = [_Worker(self.rewards) for _ in range(processes)]

    def __call__(self, items: Sequence[Any]) -> Float[np.ndarray, "N K"]:
        """Scores N items with K rewards; NaN where an item was not scored."""
        scores = np.full((len(items), len(self.rewards)), np.nan)
        waiting = [(n, k) for n in reversed(range(len(items))) for k in reversed(range(len(self.rewards)))]
        while waiting or any(worker.job for worker in self._workers):
            for worker in self._workers:
                if waiting and worker.idle:
                    worker.start(waiting[-1], items[waiting.pop()[0]], self.timeout)
            for worker in self._ready():
                if (done := worker.result()) is not None:
                    place, kind, value = done
                    scores[place] = value
                    self.outcomes[kind] += 1
        return scores

    def metrics(self) -> dict[str, int]:
        """Returns the failures so far: `reward_timeout`, `reward_error` and `reward_nan`."""
        return {f"reward_{kind}": self.outcomes[kind] for kind in FAILURES}

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.end()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _ready(self) -> list["_Worker"]:
        """Waits for an answer or a deadline, and returns the workers that have one."""
        busy = [worker for worker in self._workers if not worker.idle]
        until = min((worker.deadline for worker in busy), default=0.0) - time.monotonic()
        answered = wait([worker.pipe for worker in busy], None if math.isinf(until) else max(until, 0.0))
        return [worker for worker in busy if worker.pipe in answered or worker.deadline <= time.monotonic()]


class _Worker:
    """A process and its job: the place of a score."""

    def __init__(self, rewards: Sequence[Reward]):
        self.rewards = rewards
        self._begin()

    @property
    def idle(self) -> bool:
        return self.ready and self.job is None

    def start(self, job: tuple[int, int], item: Any, timeout: float) -> None:
        self.job, self.deadline = job, time.monotonic() + timeout
        self.pipe.send((job[1], item))

    def result(self) -> tuple[tuple[int, int], str, float] | None:
        """Returns place, kind and score of the job, or None if the process has only started."""
        try:
            kind, value = self.pipe.recv() if self.pipe.poll() else ("timeout", math.nan)
            lost = kind == "timeout"
        except (EOFError, OSError):  # it ended itself
            kind, value, lost = "error", math.nan, True
        if kind == "ready":
            self.ready = True
            return None
        if not self.ready:
            raise RuntimeError(
                f"a process ended before it could score: {self.rewards} must be importable from a module"
            )
        job, self.job, self.deadline = self.job, None, math.inf
        if lost:
            self.end()
            self._begin()
        assert job is not None
        return job, kind, value

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def _begin(self) -> None:
        # Not forked: the threads of the parent, which XLA has many of, are missing in a fork.
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other, self.rewards), daemon=True)
        self.process.start()
        other.close()
        self.job, self.ready, self.deadline = None, False, math.inf


def _serve(pipe: Connection, rewards: Sequence[Reward]) -> None:
    """Scores items until the parent closes the pipe."""
    pipe.send(("ready", 0.0))
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            number, item = pipe.recv()
            pipe.send(_score(rewards[number], item))


def _score(reward: Reward, item: Any) -> tuple[str, float]:
    """Returns the kind of the outcome, and the score, NaN if there is none."""
    try:
        value = reward(item)
        score = math.nan if value is None else float(value)
    except Exception:
        return "error", math.nan
    if value is None:
        return "unscored", math.nan
    return ("scored", score) if math.isfinite(score) else ("nan", math.nan)
