"""The picture that everybody looks at first."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlib.observability._metrics import read_jsonl

_CURVES = {"nll": ("training", "-"), "eval/nll": ("validation", "o-")}


def plot_loss(directory: str | Path, *, levels: Mapping[str, float] | None = None, ax: Any = None) -> Any:
    """The training and validation loss in a run's `metrics.jsonl` by step; returns matplotlib's axes.

    levels: losses to compare with by name, in nats per token, as dashed lines.
    """
    import matplotlib.pyplot as plt  # an extra

    ax = plt.subplots(figsize=(6.4, 4), layout="constrained")[1] if ax is None else ax
    rows = read_jsonl(Path(directory) / "metrics.jsonl")
    for name, (label, line) in _CURVES.items():
        points = [(row["step"], row[name]) for row in rows if name in row]
        ax.plot(*zip(*points, strict=True) if points else ((), ()), line, markersize=4, label=label)
    for name, level in (levels or {}).items():
        ax.axhline(level, color="grey", linestyle="--", label=f"{name} {level:.2f}")
    ax.set(xlabel="step", ylabel="nats per token")
    ax.legend()
    return ax
