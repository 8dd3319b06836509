"""Detection of slow steps and slow hosts."""

import collections
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from maxlib.observability._metrics import Values


class SlowSteps:
    """Writer that reports steps more than `deviations` slower than the median of the last `window`.

    A deviation is 1.4826 times the median distance from the median, which outliers do not move (for normal times it is
    the standard deviation), and at least 1% of the median. log: output function, such as `trainer.log`. In your own
    loop call `write(step, {"seconds": ...})`. Attributes: `flagged`, pairs of step and seconds.
    """

    def __init__(self, *, deviations: float = 8.0, window: int = 200, log: Callable[[str], Any] = print):
        self.flagged: list[tuple[int, float]] = []
        self._deviations, self._log = deviations, log
        self._times: collections.deque[float] = collections.deque(maxlen=window)
        self._limit, self._middle, self._since = float("inf"), 0.0, 0

    def resume(self, step: int) -> None:
        self.flagged = [(at, seconds) for at, seconds in self.flagged if at <= step]

    def write(self, step: int, values: Values) -> None:
        if (seconds := values.get("seconds")) is None:
            return
        if seconds > self._limit:
            self.flagged.append((step, seconds))
            self._log(f"step {step} took {seconds:.3g} s; the median is {self._middle:.3g} s")
        self._times.append(seconds)
        self._since += 1
        if self._since >= 20:  # sorting at every step would cost time
            self._since, self._middle = 0, statistics.median(self._times)
            spread = 1.4826 * statistics.median(abs(t - self._middle) for t in self._times)
            self._limit = self._middle + self._deviations * max(spread, 0.01 * self._middle)

    def close(self) -> None: ...


class SlowHosts:
    """Callback that names hosts that are `factor` times slower than the median; every process must run it.

    Steps take equally long everywhere, because all hosts wait for the slowest. So it compares work that each host does
    alone: the same small matmuls on each of its devices, and its waiting time for data. Run it rarely:
    `callbacks=[(500, SlowHosts())]`.
    """

    def __init__(self, *, factor: float = 1.5, size: int = 1024, log: Callable[[str], Any] = print):
        self._factor, self._size, self._log, self._waited = factor, size, log, 0.0

    def __call__(self, trainer: Any = None) -> list[str]:
        total = 0.0 if trainer is None else trainer.clock.seconds.get("data", 0.0)
        mine, self._waited = [matmul_seconds(self._size), total - self._waited], total
        times = np.reshape(multihost_utils.process_allgather(np.array(mine, np.float32)), (-1, 2))
        found = slow_hosts({"compute": times[:, 0], "data": times[:, 1]}, factor=self._factor)
        if jax.process_index() == 0:
            for line in found:
                self._log(line)
        return found


def slow_hosts(times: dict[str, Any], *, factor: float = 1.5) -> list[str]:
    """Finds every process whose time for a kind of work is above `factor` times the median.

    Times below 50 ms are ignored, except for compute.

    Args:
        times: Seconds of each process, by kind of work.
        factor: Multiple of the median.
    """
    lines = []
    for kind, seconds in times.items():
        middle = float(np.median(seconds))
        least = 0.0 if kind == "compute" else 0.05
        for process in np.flatnonzero(np.asarray(seconds) > np.maximum(factor * middle, least)):
            lines.append(
                f"process {process}: {kind} took {float(seconds[process]):.3g} s, the median is {middle:.3g} s"
            )
    return lines


def matmul_seconds(size: int = 1024, rounds: int = 5) -> float:
    """Measures a few matmuls on each local device; returns the slowest device's best time, which excludes
    other load.
    """
    return max(_matmul_seconds(device, size, rounds) for device in jax.local_devices())


def _matmul_seconds(device: Any, size: int, rounds: int) -> float:
    x = jax.device_put(jnp.ones((size, size), jnp.bfloat16 if device.platform != "cpu" else jnp.float32), device)
    jax.block_until_ready(_dot(x))
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        jax.block_until_ready(_dot(x))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


_dot = jax.jit(lambda x: x @ x)
