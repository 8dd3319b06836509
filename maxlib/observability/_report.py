"""An HTML page about one or several runs, in a single file with light and dark mode."""

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from maxlib.observability import _plots as plots
from maxlib.observability._goodput import NAMES, Account, goodput
from maxlib.observability._metrics import is_number, read_json, read_jsonl
from maxlib.observability._run import read_config
from maxlib.observability._spikes import loss_name, loss_spikes

# Categories of time, in the order of the bar, with their CSS colour variables.
COLOURS = {
    "step": "good",
    "redone": "bad",
    "down": "t1",
    "startup": "t2",
    "restore": "t3",
    "compile": "t4",
    "data": "t5",
}
COLOURS |= {"evaluation": "t6", "save": "t7", "callbacks": "t8", "idle": "t9"}
SPIKES = 20  # the last ones of a run, which the page lists
LAYERS = {
    "output_rms": "Size of outputs",
    "gradient_norm": "Gradient norm",
    "parameter_norm": "Parameter norm",
    "max_logit": "Largest attention logit",
    "entropy": "Attention entropy, nats",
    "output_max": "Largest output",
}


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run's directory."""

    name: str
    rows: list[dict[str, Any]]
    account: Account | None
    config: dict[str, Any]
    samples: list[dict[str, Any]]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of a scalar metric; NaN where it was not finite."""
        found = [(row["step"], row[name]) for row in self.rows if name in row and not isinstance(row[name], list)]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, float), np.array([np.nan if v is None else v for v in values], float)

    def arrays(self, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns steps and values of a metric that is an array."""
        found = [(row["step"], _array(row[name])) for row in self.rows if isinstance(row.get(name), list)]
        found = [(step, value) for step, value in found if value.size]
        return np.array([step for step, _ in found], float), [value for _, value in found]


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Writes one page about runs: loss, its spikes, speed, goodput, memory, samples, configuration. Needs matplotlib.

    Args:
        runs: Directories of a Trainer. `metrics.jsonl` is required; `goodput.jsonl`, `config.json` and `samples.jsonl`
            are optional.
        out: File to write; by default `report.html` in the first run.

    Returns:
        The file.

    Raises:
        FileNotFoundError: when a directory has no metrics.
    """
    if not runs:
        raise ValueError("report needs at least one run's directory")
    found = [_read(Path(run), _name(Path(run), runs)) for run in runs]
    path = Path(runs[0]) / "report.html" if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found), encoding="utf-8", errors="replace")  # JSON may contain half of a surrogate pair
    return path


def page(runs: list[Run]) -> str:
    """Renders the page, from `templates/report.html`."""
    facts = [_facts(run) for run in runs]
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("maxlib.observability"), autoescape=True, undefined=jinja2.StrictUndefined
    )
    return environment.get_template("report.html").render(
        title=", ".join(run.name for run in runs),
        runs=runs,
        facts=facts,
        fact_names=[name for name in facts[0] if any(fact[name] != "-" for fact in facts)],
        compared=list(zip(runs, facts, strict=True)),
        curves=_curves(runs),
        spikes=_spikes(runs),
        times=[_time(run.name, run.account) for run in runs if run.account is not None],
        layers=_layers(runs),
        samples=_samples(runs),
        settings=_settings(runs),
    )


def _read(directory: Path, name: str) -> Run:
    if not (directory / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{directory} has no metrics.jsonl; Trainer(directory=...) writes it")
    rows = read_jsonl(directory / "metrics.jsonl")
    samples = directory / "samples.jsonl"
    lines = samples.read_text(errors="replace").splitlines() if samples.exists() else []
    texts = [one for one in map(read_json, lines) if _is_sample(one)]
    account = goodput(directory) if (directory / "goodput.jsonl").exists() else None
    return Run(name, rows, account, read_config(directory), texts)


def _is_sample(one: Any) -> bool:
    """Returns whether a line was written by `add_sample`."""
    texts = [one.get("prompt", ""), one.get("text")] if isinstance(one, dict) else [None]
    return all(isinstance(text, str) for text in texts) and isinstance(one.get("step"), int) and is_number(one["step"])


def _name(run: Path, runs: Iterable[str | Path]) -> str:
    name = run.resolve().name
    return name if sum(Path(other).resolve().name == name for other in runs) == 1 else str(run)


# ------------------------------------------------------------------------------------------- sections


def _facts(run: Run) -> dict[str, str]:
    loss, held_out = loss_name(run.rows, ""), loss_name(run.rows, "eval/")
    last = lambda name: _last(run.series(name)[1])
    speed = run.series("tokens_per_second")[1]
    targets = [*run.series("num_targets")[1], *run.series("tokens")[1]]  # runs of 0.1.0.dev0 wrote "tokens"
    form = lambda value, text: "-" if value is None or not np.isfinite(value) else text.format(value)
    return {
        "steps": f"{int(max((row['step'] for row in run.rows), default=0)):,}",
        "targets": _compact(np.nansum(targets)) if targets else "-",
        "loss, smoothed": form(_last(plots.smooth(run.series(loss)[1])), "{:.4f}"),
        "loss spikes": str(len(loss_spikes(run.rows)) or "-"),
        "eval loss": form(last(held_out), "{:.4f}"),
        "tokens/s": form(np.nanmedian(speed) if len(speed) else None, "{:,.0f}"),
        "MFU": form(last("mfu"), "{:.1%}"),
        "goodput": "-" if run.account is None else f"{run.account.goodput:.1%}",
        "time": "-" if run.account is None else _duration(run.account.wall),
    }


def _curves(runs: list[Run]) -> list[plots.Chart]:
    tokens_per_second = lambda run: run.series("tokens_per_second")
    where, memory = _memory(runs)
    charts = [
        plots.loss([(run.series(loss_name(run.rows, "")), run.series(loss_name(run.rows, "eval/"))) for run in runs]),
        plots.lines("Gradient norm", "before clipping", [run.series("grad_norm") for run in runs], log=True),
        plots.lines("Throughput", "tokens per second", [tokens_per_second(run) for run in runs], zero=True),
        plots.lines("Learning rate", "", [run.series("learning_rate") for run in runs], zero=True),
        plots.lines("Step time", "seconds", [run.series("seconds") for run in runs], zero=True),
        plots.lines("Waiting for data", "share of the step, %", [_waiting(run) for run in runs], zero=True),
        plots.lines("Memory", f"peak GiB, {where}", [_gib(run.series(memory)) for run in runs], zero=True),
        plots.lines("Busiest expert", "times its even share", [_imbalance(run) for run in runs]),
    ]
    return [chart for chart in charts if chart]


def _spikes(runs: list[Run]) -> list[str]:
    who = lambda run: f"{run.name}, " if len(runs) > 1 else ""
    return [f"{who(run)}{spike}" for run in runs for spike in loss_spikes(run.rows)[-SPIKES:]]


def _time(name: str, account: Account) -> dict[str, Any]:
    seconds, wall, count = account.seconds, account.wall or 1.0, account.sessions
    order = [name for name in COLOURS if name in seconds] + [name for name in seconds if name not in COLOURS]
    part = lambda name: {
        "share": f"{seconds[name] / wall:.6f}",
        "colour": COLOURS.get(name, "t9"),
        "label": NAMES.get(name, name),
        "duration": _duration(seconds[name]),
        "percent": f"{seconds[name] / wall:.1%}",
    }
    what = f"goodput {account.goodput:.1%} of {_duration(wall)}, {count} process{'es' if count > 1 else ''}"
    return {"run": name, "what": what, "parts": [part(name) for name in order]}


def _layers(runs: list[Run]) -> list[plots.Chart]:
    """Draws the latest layer statistics of each run."""
    charts = []
    for suffix, title in LAYERS.items():
        name = next((n for run in runs for row in run.rows for n in row if n.endswith(f"/{suffix}")), "")
        last = [run.arrays(name)[1][-1:] for run in runs]
        series = [(np.arange(len(v[0])), v[0]) if v else plots.NOTHING for v in last]
        charts.append(plots.lines(title, "", series, x="layer"))
    return [chart for chart in charts if chart]


def _samples(runs: list[Run], most: int = 3) -> list[dict[str, str]]:
    who = lambda run: f"{run.name}, " if len(runs) > 1 else ""
    return [
        {"who": who(run), "step": f"{one['step']:,}", "prompt": one.get("prompt", ""), "text": one["text"]}
        for run in runs
        for one in run.samples[-most:]
    ]


def _settings(runs: list[Run]) -> dict[str, list[str]]:
    """Flattens the runs' configurations into one row for each name."""
    flat = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return {key: [str(values.get(key, "-")) for values in flat] for key in keys}


# -------------------------------------------------------------------------------------------- numbers


def _waiting(run: Run) -> tuple[np.ndarray, np.ndarray]:
    rows = [row for row in run.rows if row.get("seconds") and "data_seconds" in row]
    share = [100 * min(row["data_seconds"] / row["seconds"], 1.0) for row in rows]
    return np.array([row["step"] for row in rows], float), np.array(share, float)


def _memory(runs: list[Run]) -> tuple[str, str]:
    on_device = any(len(run.series("memory/device_bytes")[0]) for run in runs)
    return ("fullest device", "memory/device_bytes") if on_device else ("first process", "memory/host_bytes")


def _array(value: list[Any]) -> np.ndarray:
    """Returns an array; an empty one if the lists have different lengths."""
    try:
        return np.array(value, float)
    except ValueError:
        return np.empty(0)


def _gib(series: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return series[0], series[1] / 2**30


def _imbalance(run: Run) -> tuple[np.ndarray, np.ndarray]:
    steps, loads = run.arrays("moe/load")
    return steps, np.array([np.mean(load.max(axis=-1) * load.shape[-1]) for load in loads])


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _compact(number: float) -> str:
    """Formats a number with three digits and a unit: 16.4M."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.0f}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    if minutes < 1:
        return f"{rest:.1f} s"
    hours, minutes = divmod(int(minutes), 60)
    days, hours = divmod(hours, 24)
    text: Callable[..., str] = lambda *parts: " ".join(f"{n} {unit}" for n, unit in parts if n)
    return text(
        (days, "d"), (hours, "h"), (minutes, "min"), (int(rest) if not days and not hours and minutes < 10 else 0, "s")
    )


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
