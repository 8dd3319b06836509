"""A page about one run or several, in one file that opens without a server, in light and dark."""

import dataclasses
import html
import json
from collections.abc import Callable, Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from maxlib.observability import _plots as plots
from maxlib.observability._goodput import NAMES, Account, goodput
from maxlib.observability._metrics import read_jsonl
from maxlib.observability._run import read_config

# Where time goes, in the order of the bar, and the variable of the style sheet that colours it.
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


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run's directory holds."""

    name: str
    rows: list[dict[str, Any]]
    account: Account | None
    config: dict[str, Any]
    samples: list[dict[str, Any]]

    def series(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a metric that is a number; NaN where it was not finite."""
        found = [(row["step"], row[name]) for row in self.rows if name in row and not isinstance(row[name], list)]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, float), np.array([np.nan if v is None else v for v in values], float)

    def arrays(self, name: str) -> tuple[np.ndarray, list[np.ndarray]]:
        """Steps and values of a metric that is an array."""
        found = [(row["step"], np.array(row[name], float)) for row in self.rows if isinstance(row.get(name), list)]
        return np.array([step for step, _ in found], float), [value for _, value in found]


def report(*runs: str | Path, out: str | Path | None = None) -> Path:
    """Writes one page about `runs`, directories that a Trainer wrote to: loss, speed, goodput, memory, samples,
    configuration.

    out: default is `report.html` in the first of them. It takes what it finds: `metrics.jsonl` must be there,
    `goodput.jsonl`, `config.json` and `samples.jsonl` may. Needs matplotlib. Raises FileNotFoundError for a directory
    without metrics.
    """
    if not runs:
        raise ValueError("report needs at least one run's directory")
    found = [_read(Path(run), _name(Path(run), runs)) for run in runs]
    path = Path(runs[0]) / "report.html" if out is None else Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(found))
    return path


def page(runs: list[Run]) -> str:
    style = resources.files("maxlib.observability").joinpath("report.css").read_text()
    title = html.escape(", ".join(run.name for run in runs))
    parts = [_overview(runs), _curves(runs), _time(runs), _layers(runs), _samples(runs), _config(runs)]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">'
        f"<title>{title} · maxlib</title>\n<style>\n{style}</style></head>\n<body><main>\n"
        f"<header><p>Training report</p><h1>{title}</h1>{_legend(runs)}</header>\n"
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _read(directory: Path, name: str) -> Run:
    if not (directory / "metrics.jsonl").exists():
        raise FileNotFoundError(f"{directory} has no metrics.jsonl; Trainer(directory=...) writes it")
    rows = read_jsonl(directory / "metrics.jsonl")
    samples = directory / "samples.jsonl"
    texts = [json.loads(line) for line in samples.read_text().splitlines()] if samples.exists() else []
    account = goodput(directory) if (directory / "goodput.jsonl").exists() else None
    return Run(name, rows, account, read_config(directory), texts)


def _name(run: Path, runs: Iterable[str | Path]) -> str:
    name = run.resolve().name
    return name if sum(Path(other).resolve().name == name for other in runs) == 1 else str(run)


# ------------------------------------------------------------------------------------------- sections


def _legend(runs: list[Run]) -> str:
    if len(runs) == 1:
        return ""
    keys = "".join(
        f'<span><i style="background:var(--c{i % 6})"></i>{html.escape(r.name)}</span>' for i, r in enumerate(runs)
    )
    return f'<div class="legend">{keys}</div>'


def _overview(runs: list[Run]) -> str:
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        tiles = "".join(
            f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts[0].items() if value != "-"
        )
        return f'<dl class="tiles">{tiles}</dl>'
    names = [name for name in facts[0] if any(fact[name] != "-" for fact in facts)]
    head = "<tr><th></th>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"
    rows = "".join(
        f"<tr><th>{html.escape(run.name)}</th>" + "".join(f"<td>{fact[name]}</td>" for name in names) + "</tr>"
        for run, fact in zip(runs, facts, strict=True)
    )
    return f'<div class="wide"><table class="numbers">{head}{rows}</table></div>'


def _facts(run: Run) -> dict[str, str]:
    loss, held_out = _loss_name(run, ""), _loss_name(run, "eval/")
    last = lambda name: _last(run.series(name)[1])
    speed, tokens = run.series("tokens_per_second")[1], run.series("tokens")[1]
    form = lambda value, text: "-" if value is None or not np.isfinite(value) else text.format(value)
    return {
        "steps": f"{int(max((row['step'] for row in run.rows), default=0)):,}",
        "tokens": _compact(np.nansum(tokens)) if len(tokens) else "-",
        "loss, smoothed": form(_last(plots.smooth(run.series(loss)[1])), "{:.4f}"),
        "eval loss": form(last(held_out), "{:.4f}"),
        "tokens/s": form(np.nanmedian(speed) if len(speed) else None, "{:,.0f}"),
        "MFU": form(last("mfu"), "{:.1%}"),
        "goodput": "-" if run.account is None else f"{run.account.goodput:.1%}",
        "time": "-" if run.account is None else _duration(run.account.wall),
    }


def _curves(runs: list[Run]) -> str:
    tokens_per_second = lambda run: run.series("tokens_per_second")
    charts = [
        plots.loss([(run.series(_loss_name(run, "")), run.series(_loss_name(run, "eval/"))) for run in runs]),
        plots.lines("Throughput", "tokens per second", [tokens_per_second(run) for run in runs], zero=True),
        plots.lines("Gradient norm", "before clipping", [run.series("grad_norm") for run in runs], log=True),
        plots.lines("Learning rate", "", [run.series("learning_rate") for run in runs], zero=True),
        plots.lines("Step time", "seconds", [run.series("seconds") for run in runs], zero=True),
        plots.lines("Waiting for data", "share of the step, %", [_waiting(run) for run in runs], zero=True),
        plots.lines(
            "Memory", "peak GiB, " + _memory(runs)[0], [_gib(run.series(_memory(runs)[1])) for run in runs], zero=True
        ),
        plots.lines("Busiest expert", "times its even share", [_imbalance(run) for run in runs]),
    ]
    return _section("Curves", charts)


def _time(runs: list[Run]) -> str:
    parts = [_bar(run) for run in runs if run.account is not None]
    return f"<section><h2>Where the time went</h2>{''.join(parts)}</section>" if parts else ""


def _bar(run: Run) -> str:
    assert run.account is not None
    seconds, wall = run.account.seconds, run.account.wall or 1.0
    order = [name for name in COLOURS if name in seconds] + [name for name in seconds if name not in COLOURS]
    colour = lambda name: f"var(--{COLOURS.get(name, 't9')})"
    label = lambda name: f"{_label(name)}: {_duration(seconds[name])}, {seconds[name] / wall:.1%}"
    pieces = "".join(
        f'<i style="flex-grow:{seconds[name] / wall:.6f};background:{colour(name)}" title="{label(name)}"></i>'
        for name in order
    )
    rows = "".join(
        f'<li><i style="background:{colour(name)}"></i><span>{_label(name)}</span>'
        f"<span>{_duration(seconds[name])}</span><b>{seconds[name] / wall:.1%}</b></li>"
        for name in order
    )
    count = run.account.sessions
    what = f"goodput {run.account.goodput:.1%} of {_duration(wall)}, {count} process{'es' if count > 1 else ''}"
    return (
        f'<figure class="time"><figcaption><b>{html.escape(run.name)}</b> {what}</figcaption>'
        f'<div class="bar" role="img" aria-label="{what}">{pieces}</div><ul>{rows}</ul></figure>'
    )


def _label(name: str) -> str:
    return html.escape(NAMES.get(name, name))


def _layers(runs: list[Run]) -> str:
    """The last look at the layers that each run took."""
    names = {"output_rms": "Size of outputs", "gradient_norm": "Gradient norm", "parameter_norm": "Parameter norm"}
    names |= {
        "max_logit": "Largest attention logit",
        "entropy": "Attention entropy, nats",
        "output_max": "Largest output",
    }
    charts = []
    for suffix, title in names.items():
        name = next((n for run in runs for row in run.rows for n in row if n.endswith(f"/{suffix}")), "")
        last = [run.arrays(name)[1][-1:] for run in runs]
        charts.append(
            plots.lines(title, "", [(np.arange(len(v[0])), v[0]) if v else plots.NOTHING for v in last], x="layer")
        )
    return _section("By layer, when last looked at", charts)


def _samples(runs: list[Run], most: int = 3) -> str:
    parts = []
    for run in runs:
        for sample in run.samples[-most:]:
            text = f"<b>{html.escape(sample.get('prompt', ''))}</b>{html.escape(sample['text'])}"
            who = f"{html.escape(run.name)}, " if len(runs) > 1 else ""
            parts.append(f"<figure><figcaption>{who}step {sample['step']:,}</figcaption><pre>{text}</pre></figure>")
    return f'<section><h2>Samples</h2><div class="grid">{"".join(parts)}</div></section>' if parts else ""


def _config(runs: list[Run]) -> str:
    flat = [_flat(run.config) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    if not keys:
        return ""
    head = (
        ""
        if len(runs) == 1
        else "<tr><th></th>" + "".join(f"<th>{html.escape(run.name)}</th>" for run in runs) + "</tr>"
    )
    rows = ""
    for key in keys:
        values = [str(v.get(key, "-")) for v in flat]
        differs = ' class="differs"' if len(set(values)) > 1 else ""
        cells = "".join(f"<td>{html.escape(value)}</td>" for value in values)
        rows += f"<tr{differs}><th>{html.escape(key)}</th>{cells}</tr>"
    return (
        f'<section><h2>Configuration</h2><div class="wide"><table class="config">{head}{rows}</table></div></section>'
    )


def _section(title: str, charts: list[str | None]) -> str:
    figures = "".join(f"<figure>{chart}</figure>" for chart in charts if chart)
    return f'<section><h2>{title}</h2><div class="grid">{figures}</div></section>' if figures else ""


# -------------------------------------------------------------------------------------------- numbers


def _loss_name(run: Run, prefix: str) -> str:
    """The cross-entropy alone where it is known, else what is minimized."""
    return next((prefix + n for n in ("nll", "loss") if any(prefix + n in row for row in run.rows)), prefix + "loss")


def _waiting(run: Run) -> tuple[np.ndarray, np.ndarray]:
    rows = [row for row in run.rows if row.get("seconds") and "data_seconds" in row]
    share = [100 * min(row["data_seconds"] / row["seconds"], 1.0) for row in rows]
    return np.array([row["step"] for row in rows], float), np.array(share, float)


def _memory(runs: list[Run]) -> tuple[str, str]:
    on_device = any(len(run.series("memory/device_bytes")[0]) for run in runs)
    return ("fullest device", "memory/device_bytes") if on_device else ("first process", "memory/host_bytes")


def _gib(series: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return series[0], series[1] / 2**30


def _imbalance(run: Run) -> tuple[np.ndarray, np.ndarray]:
    steps, loads = run.arrays("moe/load")
    return steps, np.array([np.mean(load.max(axis=-1) * load.shape[-1]) for load in loads])


def _last(values: np.ndarray) -> float | None:
    return float(values[-1]) if len(values) else None


def _compact(number: float) -> str:
    """Three digits and a unit: 16.4M."""
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
