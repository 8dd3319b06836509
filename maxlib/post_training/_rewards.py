"""Rewards computed in separate processes with a timeout; failures are counted and never become scores."""

import collections
import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from maxlib._utils.timed_process import TimedProcess, results

Reward = Callable[[Any], float | None]
FAILURES = "timeout", "error", "nan"


class RewardPool(contextlib.AbstractContextManager):
    """Processes that score completions.

    A reward is a function of one item, such as a dict of a document and a completion, that returns a number, or None
    for "not scored". A call that exceeds `timeout`, raises, crashes its process, or returns no finite number gives NaN
    and increments a count. Functions and items are pickled, so functions must be importable from a module.

    Args:
        rewards: A reward, or several.
        processes: Number of processes.
        timeout: Time limit in seconds of one reward for one item.
    """

    def __init__(self, rewards: Reward | Sequence[Reward], *, processes: int = 4, timeout: float = 10.0):
        if processes < 1 or not timeout > 0:
            raise ValueError(f"processes and timeout must be positive, got {processes} and {timeout}")
        self.rewards, self.timeout = list(rewards) if isinstance(rewards, Sequence) else [rewards], timeout
        self.outcomes = collections.Counter[str]()
        score = [functools.partial(_score, reward) for reward in self.rewards]
        self._workers = [TimedProcess(score) for _ in range(processes)]

    def __call__(self, items: Sequence[Any]) -> Float[np.ndarray, "N K"]:
        """Scores N items with K rewards; NaN for items that were not scored."""
        scores = np.full((len(items), len(self.rewards)), np.nan)
        queue = collections.deque(((n, k), k, items[n]) for n, k in np.ndindex(scores.shape))
        for job, scored, failure in results(self._workers, [queue] * len(self._workers), self.timeout):
            kind, scores[job] = scored or ("timeout" if failure == "timeout" else "error", math.nan)
            self.outcomes[kind] += 1
        return scores

    def metrics(self) -> dict[str, int]:
        """Returns the failures so far: `reward_timeout`, `reward_error` and `reward_nan`."""
        return {f"reward_{kind}": self.outcomes[kind] for kind in FAILURES}

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.end()

    def __exit__(self, *_: Any) -> None:
        self.close()


def _score(reward: Reward, item: Any) -> tuple[str, float]:
    """Returns the kind of the outcome, and the score, NaN if there is none."""
    try:
        if (value := reward(item)) is None:
            return "unscored", math.nan
        score = float(value)
    except Exception:
        return "error", math.nan
    return ("scored", score) if math.isfinite(score) else ("nan", math.nan)
