"""When a step is saved, and which steps stay."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@dataclasses.dataclass(frozen=True)
class Best:
    """Keeps the `n` steps with the lowest `metric`, or with the highest. Steps saved without it are not among them."""

    metric: str
    n: int = 1
    highest: bool = False


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which steps stay: the newest ones, every `every`-th, the best."""

    newest: int | None
    every: int | None = None
    best: Best | None = None

    def __call__(self, steps: Sequence[int], metrics: Mapping[int, Mapping[str, Any]]) -> set[int]:
        """The steps to keep, of those that are good."""
        newest = set(steps) if self.newest is None else set(steps[-self.newest :])
        nth = {step for step in steps if self.every and step % self.every == 0}
        return newest | nth | (_best(self.best, steps, metrics) if self.best else set())


def _best(best: Best, steps: Sequence[int], metrics: Mapping[int, Mapping[str, Any]]) -> set[int]:
    values = {step: metrics.get(step, {}).get(best.metric) for step in steps}
    ranked = [step for step, value in values.items() if value is not None and not math.isnan(value)]
    return set(sorted(ranked, key=lambda step: values[step], reverse=best.highest)[: best.n])


class When:
    """Says when a save is due: every `every` steps, and `seconds` after the save before."""

    def __init__(self, every: int | None, seconds: float | None):
        self.every, self.seconds = every, seconds
        self._first: int | None = None
        self.saved(0)
        self._first = None

    def due(self, step: int) -> bool:
        """Whether to save after `step`; all hosts get the same answer."""
        by_steps = self.every is not None and step > 0 and step % self.every == 0
        return by_steps or (self.seconds is not None and step > 0 and self._late(step))

    def saved(self, step: int) -> None:
        """The time begins anew."""
        self._since, self._first, self._ask, self._is_late = time.monotonic(), step, step + 1, False

    def _late(self, step: int) -> bool:
        self._first = step if self._first is None else self._first
        if not self._is_late and step >= self._ask:
            passed = time.monotonic() - self._since
            self._is_late, self._ask = _of_first_host(passed >= self.seconds, step + self._pause(step, passed))
        return self._is_late

    def _pause(self, step: int, passed: float) -> int:
        """In how many steps to ask again. Several hosts have to agree by one clock, which waits for the devices, so rarely."""
        if jax.process_count() == 1:
            return 1
        per_step = passed / max(1, step - (self._first or 0))
        return max(1, int((self.seconds - passed) / 2 / max(per_step, 1e-9)))


def _of_first_host(late: bool, ask: int) -> tuple[bool, int]:
    if jax.process_count() == 1:
        return late, ask
    late, ask = np.asarray(multihost_utils.broadcast_one_to_all(np.array([late, ask]))).tolist()
    return bool(late), ask
