"""Small charts with captions as inline SVG; their colours are CSS variables of the page."""

import dataclasses
import io
import re
from typing import Any

import numpy as np

Series = tuple[np.ndarray, np.ndarray]
NOTHING: Series = (np.zeros(0), np.zeros(0))
# Placeholder colours for matplotlib, which the page's style sheet replaces.
_INK, _MUTED, _LINE = "#0b0b0d", "#6b6b71", "#e4e3e1"
_RUNS = ("#2a78d1", "#eb6831", "#1b9a71", "#8b5cf1", "#c99001", "#d64071")
_VARIABLES = {_INK: "ink", _MUTED: "muted", _LINE: "line"} | {c: f"c{i}" for i, c in enumerate(_RUNS)}
_RC: Any = {
    "svg.fonttype": "none",
    "font.size": 9,
    "text.color": _INK,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _MUTED,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _LINE,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "figure.constrained_layout.h_pad": 0.02,
    "figure.constrained_layout.w_pad": 0.02,
}


@dataclasses.dataclass(frozen=True)
class Chart:
    """A picture with its caption."""

    title: str
    what: str
    svg: str


def lines(
    title: str, what: str, series: list[Series], *, log: bool = False, zero: bool = False, x: str = "step"
) -> Chart | None:
    """Draws one line per run, with its moving mean if there are many points; None if there is nothing to draw."""
    if not any(np.isfinite(values).any() for _, values in series):
        return None
    figure, axes = _axes(x)
    for i, run in enumerate(series):
        _line(axes, i, run)
    if log and all((values[np.isfinite(values)] > 0).all() for _, values in series):
        _decades(axes)
    elif zero:
        axes.set_ylim(0, 1.12 * max(np.nanmax(binned(*run)[1], initial=0.0) for run in series) or 1.0)
    return Chart(title, what, _svg(figure))


def loss(pairs: list[tuple[Series, Series]]) -> Chart | None:
    """Draws the training loss (faint) with its moving mean (strong), and the validation loss as points."""
    if not any(np.isfinite(values).any() for pair in pairs for _, values in pair):
        return None
    figure, axes = _axes("step")
    for i, (training, validation) in enumerate(pairs):
        _line(axes, i, training)
        axes.plot(*validation, "o", color=_colour(i), markersize=4.5, markeredgecolor=_INK, markeredgewidth=0.8)
    return Chart("Loss", "nats per target; points: validation", _svg(figure))


def _line(axes, i: int, series: Series) -> None:
    many = len(series[0]) > 100
    look = {"color": _colour(i), "marker": "o" if len(series[0]) < 20 else None, "markersize": 3}
    axes.plot(*binned(*series), **look, linewidth=0.8 if many else 1.6, alpha=0.3 if many else 1.0)
    if many:
        axes.plot(*binned(series[0], smooth(series[1])), **look, linewidth=1.6)


def smooth(values: np.ndarray) -> np.ndarray:
    """Computes a moving mean over 2% of the values, ignoring those that are not finite."""
    half = len(values) // 100
    good = np.isfinite(values)
    total = np.concatenate([np.zeros(1), np.cumsum(np.where(good, values, 0.0))])
    count = np.concatenate([np.zeros(1), np.cumsum(good)])
    begin, end = np.arange(len(values)) - half, np.arange(len(values)) + half + 1
    begin, end = np.maximum(begin, 0), np.minimum(end, len(values))
    number = count[end] - count[begin]
    return np.where(number > 0, (total[end] - total[begin]) / np.maximum(number, 1), np.nan)


def binned(steps: np.ndarray, values: np.ndarray, most: int = 500) -> Series:
    """Returns at most `most` points, each the mean of its neighbours."""
    if len(values) <= most:
        return steps, values
    bins = np.array_split(np.arange(len(values)), most)
    return np.array([steps[indices[-1]] for indices in bins]), np.array([_mean(values[indices]) for indices in bins])


def _mean(values: np.ndarray) -> float:
    good = values[np.isfinite(values)]
    return float(good.mean()) if len(good) else np.nan


def _colour(i: int) -> str:
    return _RUNS[i % len(_RUNS)]


def _decades(axes) -> None:
    """Sets a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _axes(x: str):
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, StrMethodFormatter
    except ImportError as error:
        raise ImportError('a report needs matplotlib: pip install "maxlib[examples]"') from error
    with mpl.rc_context(_RC):
        figure = Figure(figsize=(5.4, 2.6), layout="constrained")
        axes = figure.subplots()
        axes.grid(axis="y", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(which="both", length=0)
        axes.set_xlabel(x)
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        return figure, axes


def _svg(figure) -> str:
    import matplotlib as mpl

    out = io.StringIO()
    with mpl.rc_context(_RC | {"svg.hashsalt": str(id(figure))}):
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = out.getvalue()
    text = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", text[text.index("<svg") :], count=1)
    text = re.sub(r'width="[\d.]+pt" height="[\d.]+pt" ', "", text, count=1)
    for colour, name in _VARIABLES.items():
        text = text.replace(colour, f"var(--{name})")
    return text
