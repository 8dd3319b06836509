"""Policies: when to save a step, and which steps to keep."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

SECONDS = 1800.0  # default interval between saves


@dataclasses.dataclass(frozen=True)
class Best:
    """Keeps the `n` steps with the lowest, or highest, `metric`, ignoring steps that lack it."""

    metric: str
    n: int = 1
    highest: bool = False


@dataclasses.dataclass(frozen=True)
class Keep:
    """Policy of which steps to keep: the newest ones, every `every`-th, the best."""

    newest: int | None
    every: int | None = None
    best: Best | None = None

    def __call__(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """Returns the good steps to keep."""
        newest = set(steps) if self.newest is None else set(steps[-self.newest :])
        nth = {step for step in steps if self.every and step % self.every == 0}
        return newest | nth | (_best(self.best, steps, metrics) if self.best else set())


def _best(best: Best, steps: Sequence[int], metrics: Mapping[int, Mapping[str, Any]]) -> set[int]:
    sign = -1 if best.highest else 1
    values = {step: sign * metrics.get(step, {}).get(best.metric, math.nan) for step in steps}
    ranked = [step for step in steps if not math.isnan(values[step])]
    return set(sorted(ranked, key=values.__getitem__)[: best.n])


class When:
    """Decides when a save is due: every `every` steps, and `seconds` after the previous save."""

    def __init__(self, every: int | None, seconds: float | None):
        self._every, self._seconds = every, math.inf if seconds is None else seconds
        self.saved(0)
        self._first: int | None = None  # the step at which the interval began, once known

    def due(self, step: int) -> bool:
        """Returns whether to save after `step`; all hosts get the same answer."""
        by_steps = self._every is not None and step > 0 and step % self._every == 0
        return by_steps or (self._seconds < math.inf and step > 0 and self._late(step))

    def saved(self, step: int) -> None:
        """Restarts the interval."""
        self._since, self._first, self._ask, self._is_late = time.monotonic(), step, step + 1, False

    def _late(self, step: int) -> bool:
        self._first = step if self._first is None else self._first
        if not self._is_late and step >= self._ask:
            passed = time.monotonic() - self._since
            per_step = passed / max(1, step - self._first)
            self._is_late, self._ask = _of_first_host(passed >= self._seconds, step + self._pause(passed, per_step))
        return self._is_late

    def _pause(self, passed: float, per_step: float) -> int:
        """Returns the number of steps until the next check; checks are rare, because hosts agree by one clock, which
        waits for devices.
        """
        left = max(0.0, self._seconds - passed)
        return 1 if jax.process_count() == 1 else max(1, int(left / 2 / max(per_step, 1e-9)))


def _of_first_host(late: bool, ask: int) -> tuple[bool, int]:
    if jax.process_count() == 1:
        return late, ask
    late, ask = np.asarray(multihost_utils.broadcast_one_to_all(np.array([late, ask]))).tolist()
    return bool(late), ask
