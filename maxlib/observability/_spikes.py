"""Loss spikes in the metrics of a run."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

WINDOW, FEWEST = 20, 10  # logged steps before a step that tell its usual loss
DEVIATIONS, SHARE = 6.0, 0.05  # how far above it a spike is: in standard deviations, and of its size
TIMES = 2.0  # a gradient norm is high from this many times its median
_BESIDE = {"grad_norm": "gradient norm", "learning_rate": "learning rate", "num_targets": "targets"}


@dataclasses.dataclass(frozen=True)
class Spike:
    """Consecutive steps with a loss far above that of the steps before; printed as one line.

    Attributes:
      step: the first step.
      last: the last step.
      loss: the greatest loss; NaN if one was not finite.
      usual: the median loss of the 20 logged steps before.
      beside: from `grad_norm`, `learning_rate` and `num_targets`, as far as they were logged, to the value at the first
          step and the median before.
      norm_since: the step at which the gradient norm rose above twice its median; None if it did not.
      skipped: number of these steps that `training.skip_spikes` skipped.
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
    than 6 standard deviations and 5 %. The deviation is estimated from the median difference of neighbouring steps, so
    that neither a falling loss nor an earlier spike hides a spike. The first 10 steps have no spikes.

        for spike in observability.loss_spikes(observability.read_jsonl("run/metrics.jsonl")):
            print(spike)

    Args:
      rows: the run's metrics, as `read_jsonl` returns them; `nll` is used if it was logged, else `loss`.
    """
    name = loss_name(rows)
    rows = [row for row in rows if name in row]
    losses = _values(rows, name)
    high = [i for i in range(FEWEST, len(rows)) if _is_high(losses[i], losses[max(0, i - WINDOW) : i])]
    return [_spike(rows, losses, first, last) for first, last in _runs(high)]


def loss_name(rows: Sequence[dict[str, Any]], prefix: str = "") -> str:
    """Returns the name of the cross-entropy if it was logged, else of the total loss."""
    return next(
        (prefix + name for name in ("nll", "loss") if any(prefix + name in row for row in rows)), f"{prefix}loss"
    )


def _values(rows: Sequence[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([np.nan if row.get(name) is None else row[name] for row in rows], float)


def _is_high(loss: float, before: np.ndarray) -> bool:
    before = before[np.isfinite(before)]
    if not np.isfinite(loss) or not before.size:
        return not np.isfinite(loss)
    usual = np.median(before)
    # For normally distributed noise, the difference of two steps has sqrt(2) times its deviation, and a median size of
    # 0.6745 times that.
    deviation = np.median(abs(np.diff(before))) / (0.6745 * np.sqrt(2)) if before.size > 1 else 0.0
    return bool(loss - usual > max(DEVIATIONS * deviation, SHARE * abs(usual)))


def _runs(numbers: list[int]) -> Iterator[tuple[int, int]]:
    """Yields the first and last of consecutive numbers."""
    for _, group in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield run[0], run[-1]


def _spike(rows: Sequence[dict[str, Any]], losses: np.ndarray, first: int, last: int) -> Spike:
    before = slice(max(0, first - WINDOW), first)
    found = {name: _values(rows[: last + 1], name) for name in _BESIDE}
    beside = {n: (float(v[first]), _median(v[before])) for n, v in found.items() if np.isfinite(v[first])}
    return Spike(
        rows[first]["step"],
        rows[last]["step"],
        float(np.max(losses[first : last + 1])),
        _median(losses[before]),
        beside,
        _norm_since(rows, found["grad_norm"], first),
        sum(bool(row.get("skipped")) for row in rows[first : last + 1]),
    )


def _median(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else float("nan")


def _norm_since(rows: Sequence[dict[str, Any]], norms: np.ndarray, first: int) -> int | None:
    """Returns the first of the consecutive steps up to the spike's with a high gradient norm."""
    usual = TIMES * _median(norms[max(0, first - WINDOW) : first])
    start = first + 1
    while start and (norms[start - 1] > usual or not np.isfinite(norms[start - 1])):
        start -= 1
    return rows[start]["step"] if start <= first and np.isfinite(usual) else None
