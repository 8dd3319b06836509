"""Loss spikes in the metrics of a run."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxlib._utils.ranges import runs

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
    found = {name: _values(window, name) for name in _BESIDE}
    return Spike(
        rows[first]["step"],
        rows[last]["step"],
        float(np.max(losses[first : last + 1])),
        _median(losses[first - WINDOW : first]),
        {name: (float(v[-1]), _median(v[:-1])) for name, v in found.items() if np.isfinite(v[-1])},
        _norm_since(window, found["grad_norm"]),
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
