"""A run's configuration and samples as files, and an HTML page about one or several runs with light and dark mode."""

import dataclasses
import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jinja2
import numpy as np

import maxlib
from maxlib._utils.files import is_number, read_json, write_atomically
from maxlib.observability import _plots as plots
from maxlib.observability._anomalies import loss_name, loss_spikes
from maxlib.observability._goodput import NAMES, GoodputSummary, goodput
from maxlib.observability._metrics import read_jsonl

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


def write_config(directory: str | Path, **values: Any) -> None:
    """Adds `values` and a description of the hardware to `directory/config.json`. Values without a JSON type become
    strings.
    """
    path = Path(directory) / "config.json"
    config = _read_config(directory) | values | {"environment": _environment()}
    write_atomically(path, json.dumps(config, indent=1, default=str))


def _read_config(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    config = read_json(path.read_text(errors="replace")) if path.exists() else {}
    return config if isinstance(config, dict) else {}  # truncated or damaged


def add_sample(directory: str | Path, step: int, text: str, prompt: str = "") -> None:
    """Appends the model's text after `step` steps to `directory/samples.jsonl`."""
    path = Path(directory) / "samples.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")


class Samples:
    """Callback that stores the text that `generate(model)` returns: `callbacks=[(1000, Samples("run", generate))]`."""

    def __init__(self, directory: str | Path, generate: Callable[[Any], str]):
        self._directory, self._generate = directory, generate

    def __call__(self, trainer: Any) -> None:
        text = self._generate(trainer.model)
        if jax.process_index() == 0:
            add_sample(self._directory, trainer.step, text)


def _environment() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "devices": f"{jax.device_count()} x {device.device_kind} ({device.platform})",
        "hosts": jax.process_count(),
        "maxlib": maxlib.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
    }


@dataclasses.dataclass(frozen=True)
class Run:
    """Contents of a run's directory."""

    name: str
    rows: list[dict[str, Any]]
    goodput: GoodputSummary | None
    config: dict[str, Any]
    samples: list[dict[str, Any]]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns steps and values of a scalar metric; NaN where it was not finite."""
        rows = [row for row in self.rows if name in row and not isinstance(row[name], list)]
        values = [np.nan if row[name] is None else row[name] for row in rows]
        return np.array([row["step"] for row in rows], float), np.array(values, float)

    def arrays(self, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns steps and values of a metric that is an array."""
        points = [(row["step"], _array(row[name])) for row in self.rows if isinstance(row.get(name), list)]
        points = [(step, value) for step, value in points if value.size]
        return np.array([step for step, _ in points], float), [value for _, value in points]

    def last(self, name: str) -> float | None:
        """Returns the last value of a scalar metric; None if it was never logged."""
        values = self.series(name)[1]
        return float(values[-1]) if len(values) else None


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
    contents = [_read(Path(run), _name(Path(run), runs)) for run in runs]
    path = Path(runs[0]) / "report.html" if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(contents), encoding="utf-8", errors="replace")  # JSON may contain half of a surrogate pair
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
        times=[_time(run.name, run.goodput) for run in runs if run.goodput is not None],
        layers=_layers(runs),
        samples=_samples(runs),
        evaluations=_evaluations(runs),
        settings=_settings(runs),
    )


def _read(directory: Path, name: str) -> Run:
    if not (directory / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{directory} has no metrics.jsonl; Trainer(directory=...) writes it")
    rows = read_jsonl(directory / "metrics.jsonl")
    samples = directory / "samples.jsonl"
    lines = samples.read_text(errors="replace").splitlines() if samples.exists() else []
    texts = [line for line in map(read_json, lines) if _is_sample(line)]
    summary = goodput(directory) if (directory / "goodput.jsonl").exists() else None
    return Run(name, rows, summary, _read_config(directory), texts)


def _is_sample(line: Any) -> bool:
    """Returns whether a line was written by `add_sample`."""
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not is_number(line["step"]):
        return False
    return isinstance(line.get("prompt", ""), str) and isinstance(line.get("text"), str)


def _name(run: Path, runs: Iterable[str | Path]) -> str:
    name = run.resolve().name
    return name if sum(Path(other).resolve().name == name for other in runs) == 1 else str(run)


def _facts(run: Run) -> dict[str, str]:
    loss, held_out = loss_name(run.rows, ""), loss_name(run.rows, "eval/")
    smoothed = plots.smooth(run.series(loss)[1])
    speed = run.series("tokens_per_second")[1]
    targets = run.series("num_targets")[1]
    return {
        "steps": f"{int(max((row['step'] for row in run.rows), default=0)):,}",
        "targets": _compact(np.nansum(targets)) if len(targets) else "-",
        "loss, smoothed": _formatted(smoothed[-1] if len(smoothed) else None, "{:.4f}"),
        "loss spikes": str(len(loss_spikes(run.rows)) or "-"),
        "eval loss": _formatted(run.last(held_out), "{:.4f}"),
        "tokens/s": _formatted(np.nanmedian(speed) if len(speed) else None, "{:,.0f}"),
        "MFU": _formatted(run.last("mfu"), "{:.1%}"),
        "goodput": "-" if run.goodput is None else f"{run.goodput.goodput:.1%}",
        "time": "-" if run.goodput is None else _duration(run.goodput.wall),
    }


def _formatted(value: float | None, text: str) -> str:
    return "-" if value is None or not np.isfinite(value) else text.format(value)


def _curves(runs: list[Run]) -> list[plots.Chart]:
    where, memory = _memory(runs)
    charts = [
        plots.loss([(run.series(loss_name(run.rows, "")), run.series(loss_name(run.rows, "eval/"))) for run in runs]),
        *(plots.lines("Held-out data", name, [run.series(f"eval/{name}") for run in runs]) for name in _held_out(runs)),
        plots.lines("Gradient norm", "before clipping", [run.series("grad_norm") for run in runs], log=True),
        plots.lines("Throughput", "tokens per second", [run.series("tokens_per_second") for run in runs], zero=True),
        plots.lines("Learning rate", "", [run.series("learning_rate") for run in runs], zero=True),
        plots.lines("Step time", "seconds", [run.series("seconds") for run in runs], zero=True),
        plots.lines("Waiting for data", "share of the step, %", [_waiting(run) for run in runs], zero=True),
        plots.lines("Memory", f"peak GiB, {where}", [_gib(run.series(memory)) for run in runs], zero=True),
        plots.lines("Busiest expert", "times its even share", [_imbalance(run) for run in runs]),
    ]
    return [chart for chart in charts if chart]


def _spikes(runs: list[Run]) -> list[str]:
    return [f"{_who(run, runs)}{spike}" for run in runs for spike in loss_spikes(run.rows)[-SPIKES:]]


def _who(run: Run, runs: list[Run]) -> str:
    return f"{run.name}, " if len(runs) > 1 else ""


def _time(run: str, summary: GoodputSummary) -> dict[str, Any]:
    seconds, wall, count = summary.seconds, summary.wall or 1.0, summary.sessions
    order = [name for name in COLOURS if name in seconds] + [name for name in seconds if name not in COLOURS]
    slices = [
        {
            "share": f"{seconds[name] / wall:.6f}",
            "colour": COLOURS.get(name, "t9"),
            "label": NAMES.get(name, name),
            "duration": _duration(seconds[name]),
            "percent": f"{seconds[name] / wall:.1%}",
        }
        for name in order
    ]
    what = f"goodput {summary.goodput:.1%} of {_duration(wall)}, {count} process{'es' if count > 1 else ''}"
    return {"run": run, "what": what, "slices": slices}


def _layers(runs: list[Run]) -> list[plots.Chart]:
    """Draws the latest layer statistics of each run."""
    charts = []
    for suffix, title in LAYERS.items():
        name = next((n for run in runs for row in run.rows for n in row if n.endswith(f"/{suffix}")), "")
        last = [run.arrays(name)[1][-1:] for run in runs]
        series = [(np.arange(len(v[0])), v[0]) if v else plots.NOTHING for v in last]
        charts.append(plots.lines(title, "", series, x="layer"))
    return [chart for chart in charts if chart]


def _held_out(runs: list[Run], most: int = 12) -> list[str]:
    """Lists the evaluations' losses to draw: those of named sets or sources, and bits per byte."""
    names = sorted({name for run in runs for row in run.rows for name in row if name.startswith("eval/")})
    drawn = [
        name.removeprefix("eval/")
        for name in names
        if name.count("/") < 3 and name.endswith(("/nll", "bits_per_byte")) and name != "eval/nll"
    ]
    return drawn[:most]


def _evaluations(runs: list[Run]) -> dict[str, list[str]]:
    """Returns the last value of each scalar of the evaluations, one row for each name."""
    names = sorted({name for run in runs for row in run.rows for name in row if name.startswith("eval/")})
    rows = {name.removeprefix("eval/"): [_formatted(run.last(name), "{:.5g}") for run in runs] for name in names}
    return {name: values for name, values in rows.items() if set(values) != {"-"}}


def _samples(runs: list[Run], most: int = 3) -> list[dict[str, str]]:
    return [
        {
            "who": _who(run, runs),
            "step": f"{sample['step']:,}",
            "prompt": sample.get("prompt", ""),
            "text": sample["text"],
        }
        for run in runs
        for sample in run.samples[-most:]
    ]


def _settings(runs: list[Run]) -> dict[str, list[str]]:
    """Flattens the runs' configurations into one row for each name."""
    flat = [_flat(run.config) for run in runs]
    keys = dict.fromkeys(key for values in flat for key in values)
    return {key: [str(values.get(key, "-")) for values in flat] for key in keys}


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
    seconds = int(rest) if not days and not hours and minutes < 10 else 0
    numbers = {"d": days, "h": hours, "min": minutes, "s": seconds}
    return " ".join(f"{number} {unit}" for unit, number in numbers.items() if number)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
