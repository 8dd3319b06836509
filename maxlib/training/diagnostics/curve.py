"""The picture that everybody looks at first."""

from pathlib import Path
from typing import Any

from maxlib.training.metrics import read_jsonl

_CURVES = {"nll": ("training", "-"), "eval/nll": ("validation", "o-")}


def plot_loss(directory: str | Path, *, level: float | None = None, ax: Any = None) -> Any:
    """The training and validation loss in a run's `metrics.jsonl` by step; returns matplotlib's axes.

    level: a loss to compare with, in nats per token, as a dashed line.
    """
    import matplotlib.pyplot as plt  # an extra

    ax = plt.subplots(figsize=(6.4, 4), layout="constrained")[1] if ax is None else ax
    rows = read_jsonl(Path(directory) / "metrics.jsonl")
    for name, (label, line) in _CURVES.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        ax.plot(*zip(*points, strict=True) if points else ((), ()), line, markersize=4, label=label)
    if level is not None:
        ax.axhline(level, color="grey", linestyle="--", label=f"{level:.2f}")
    ax.set(xlabel="step", ylabel="nats per token")
    ax.legend()
    return ax
