"""Anomalies of a run: loss spikes, slow steps, slow hosts."""

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from maxlib._utils.text import runs
from maxlib.observability._metrics import Values

WINDOW = 20  # logged steps before a step that tell its usual loss
DEVIATIONS, SHARE = 8.0, 0.05  # how far above it a spike is: in standard deviations, and of its size
TIMES = 2.0  # a gradient norm is high from this many times its median
_BESIDE = {"grad_norm": "gradient norm", "learning_rate": "learning rate", "num_targets": "targets"}


@dataclasses.dataclass(frozen=True)
class Spike:
    """Consecutive steps with a loss far above that of the steps before; printed as one line.

    Attributes:
        step: The first step.
        last: The last step.
        loss: The greatest loss; NaN if one was not finite.
        usual: The median loss of the 20 logged steps before.
        beside: From `grad_norm`, `learning_rate` and `num_targets`, as far as they were logged, to the value at the
            first step and the median before.
        norm_since: The step at which the gradient norm rose above twice its median; None if it did not.
        skipped: Number of these steps that `training.skip_spikes` skipped.
    """

    step: int
    last: int
    loss: float
    usual: float
    beside: dict[str, tuple[float, float]]
    norm_since: int | None
    skipped: int

    def __str__(self) -> str:
        steps = f"step {self.step}" if self.step == self.last else f"steps {self.step}-{self.last}"
        parts = [f"{steps}: loss {self.loss:.4g}, usually {self.usual:.4g}"]
        for name, (value, usual) in self.beside.items():
            parts.append(f"{_BESIDE[name]} {value:.4g}" + f", usually {usual:.4g}" * (name != "learning_rate"))
            if name == "grad_norm" and self.norm_since is not None:
                parts[-1] += f", high since step {self.norm_since}"
        return "; ".join(parts) + f"; updates skipped: {self.skipped}" * bool(self.skipped)


def loss_spikes(rows: Sequence[dict[str, Any]]) -> list[Spike]:
    """Finds the loss spikes of a run.

    A step belongs to a spike if its loss is not finite, or exceeds the median of the 20 logged steps before by more
    than 8 standard deviations and 5 %. The deviation is estimated from the median difference of neighbouring steps, so
    that neither a falling loss nor an earlier spike hides a spike. The first 20 steps have no spikes.

        from maxlib import observability

        rows = [{"step": n, "loss": 9.0 if n == 25 else 2 + n % 3 / 10} for n in range(30)]  # or read_jsonl(path)
        assert observability.loss_spikes(rows)

    Args:
        rows: The run's metrics, as `read_jsonl` returns them; `nll` is used if it was logged, else `loss`.
    """
    name = loss_name(rows)
    rows = [row for row in rows if name in row]
    losses = _values(rows, name)
    return [_spike(rows, losses, first, last) for first, last in runs(_high(losses))]


def loss_name(rows: Sequence[dict[str, Any]], prefix: str = "") -> str:
    """Returns the name of the cross-entropy if it was logged, else of the total loss."""
    return next(
        (prefix + name for name in ("nll", "loss") if any(prefix + name in row for row in rows)), f"{prefix}loss"
    )


def _values(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], float)


def _high(losses: np.ndarray) -> list[int]:
    """Returns the indices of losses that are not finite or far above those before."""
    if len(losses) <= WINDOW:
        return []
    finite = np.isfinite(losses)
    filled = losses[np.maximum.accumulate(np.where(finite, np.arange(len(losses)), 0))]  # by the last finite one
    before = np.lib.stride_tricks.sliding_window_view(filled[:-1], WINDOW)
    usual = np.median(before, axis=1)
    # For normally distributed noise, the difference of two steps has sqrt(2) times its deviation, and a median size of
    # 0.6745 times that.
    deviation = np.median(abs(np.diff(before)), axis=1) / (0.6745 * np.sqrt(2))
    above = losses[WINDOW:] - usual > np.maximum(DEVIATIONS * deviation, SHARE * abs(usual))
    return [WINDOW + int(i) for i in np.flatnonzero(above | ~finite[WINDOW:])]


def _spike(rows: Sequence[dict[str, Any]], losses: np.ndarray, first: int, last: int) -> Spike:
    window = rows[first - WINDOW : first + 1]
    beside = {name: _values(window, name) for name in _BESIDE}
    return Spike(
        rows[first]["step"],
        rows[last]["step"],
        float(np.max(losses[first : last + 1])),
        _median(losses[first - WINDOW : first]),
        {name: (float(v[-1]), _median(v[:-1])) for name, v in beside.items() if np.isfinite(v[-1])},
        _norm_since(window, beside["grad_norm"]),
        sum(bool(row.get("skipped")) for row in rows[first : last + 1]),
    )


def _median(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else float("nan")


def _norm_since(window: Sequence[dict[str, Any]], norms: np.ndarray) -> int | None:
    """Returns the first of the consecutive steps with a high gradient norm up to the last one, the spike's."""
    low = ~(norms > TIMES * _median(norms[:-1]))
    if low[-1]:
        return None
    return window[int(np.flatnonzero(np.append(True, low)).max())]["step"]


class SlowSteps:
    """Writer that reports steps more than `deviations` slower than the median of the last `window`.

    A deviation is 1.4826 times the median distance from the median, which outliers do not move (for normal times it is
    the standard deviation), and at least 1% of the median. In your own loop call `write(step, {"seconds": ...})`.

    Args:
        deviations: Deviations above the median from which a step is slow.
        window: Number of steps of the median.
        log: Output function, such as `trainer.log`.

    Attributes:
        flagged: Pairs of step and seconds.
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

    Args:
        factor: Multiple of the median from which a host is slow.
        size: Rows and columns of the matmuls.
        log: Output function.
    """

    def __init__(self, *, factor: float = 1.5, size: int = 1024, log: Callable[[str], Any] = print):
        self._factor, self._size, self._log, self._waited = factor, size, log, 0.0

    def __call__(self, trainer: Any = None) -> list[str]:
        total = 0.0 if trainer is None else trainer.clock.seconds.get("data", 0.0)
        slowest = max(_matmul_seconds(device, self._size) for device in jax.local_devices())
        mine, self._waited = [slowest, total - self._waited], total
        times = np.reshape(multihost_utils.process_allgather(np.array(mine, np.float32)), (-1, 2))
        lines = slow_hosts({"compute": times[:, 0], "data": times[:, 1]}, factor=self._factor)
        if jax.process_index() == 0:
            for line in lines:
                self._log(line)
        return lines


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


def _matmul_seconds(device: Any, size: int) -> float:
    """Returns the best time of a few matmuls, which excludes other load."""
    x = jnp.ones((size, size), jnp.bfloat16 if device.platform != "cpu" else jnp.float32, device=device)
    multiply = jax.jit(jnp.matmul)
    jax.block_until_ready(multiply(x, x))
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        jax.block_until_ready(multiply(x, x))
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
