"""Writers of metrics: a JSONL file, the terminal. A writer is any object with `resume`, `write` and `close`."""

import collections
import errno
import io
import json
import math
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from maxlib import distributed
from maxlib._utils.files import is_number, read_json, write_atomically

Values = Mapping[str, Any]


@runtime_checkable
class Writer(Protocol):
    """Protocol of writers of metrics: numbers, or small arrays such as one number per layer.

    The Trainer calls its writers on every process; a writer to a service should only write if `jax.process_index()` is
    0.
    """

    def resume(self, step: int) -> None:
        """Discards everything after `step`, from which training continues."""
        ...

    def write(self, step: int, values: Values) -> None:
        """Writes the metrics of a step. It may be called several times per step, with different names."""
        ...

    def close(self) -> None:
        """Flushes buffers. Every `fit` ends with it, and the next `fit` may write again."""
        ...


class Writers(list[Writer]):
    """The writers of a run. A writer that raises is reported once and retried next time; the others, and training,
    continue.
    """

    def __init__(self, writers: Iterable[Writer], *, log: Callable[[str], Any]):
        super().__init__()
        self._log, self._failed = log, set()
        self.extend(writers)

    def append(self, writer: Writer) -> None:
        """Adds a writer. Raises TypeError for one that lacks a method."""
        self.extend([writer])

    def extend(self, writers: Iterable[Writer]) -> None:
        """Adds several writers; raises as `append` does."""
        writers = list(writers)
        for writer in writers:
            if missing := [name for name in ("resume", "write", "close") if not hasattr(writer, name)]:
                raise TypeError(
                    "a writer of metrics has the methods resume(step), write(step, values) and close(), as "
                    f"observability.Jsonl has; {type(writer).__name__} lacks {', '.join(missing)}"
                )
        super().extend(writers)

    def resume(self, step: int) -> None:
        self._each(lambda writer: writer.resume(step))

    def write(self, step: int, values: Values) -> None:
        self._each(lambda writer: writer.write(step, values))

    def close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, call: Callable[[Writer], None]) -> None:
        for writer in self:
            try:
                call(writer)
            except Exception as error:
                if id(writer) not in self._failed:
                    self._log(f"METRICS LOST: {type(writer).__name__} failed with {error!r}; training continues")
                self._failed.add(id(writer))


@runtime_checkable
class HasMetrics(Protocol):
    """Protocol of objects with their own metrics, such as a loader that counts its reads."""

    def metrics(self) -> Values: ...


def collect_metrics(source: object, *, all_processes: bool = False) -> Values:
    """Returns the metrics of an object that has a method `metrics()`; none of any other object.

    Args:
        source: The object, such as a loader.
        all_processes: True adds up the counts of all processes, and takes the mean of numbers that are no integers,
            such as rewards; all processes must call this.
    """
    values = source.metrics() if isinstance(source, HasMetrics) else {}
    if not all_processes:
        return values
    everyone = distributed.allgather_json({name: np.asarray(x).tolist() for name, x in values.items()})
    names = sorted({name for counts in everyone for name in counts})
    each = {name: np.array([counts[name] for counts in everyone if name in counts]) for name in names}
    return {name: (x.sum(0) if x.dtype.kind in "biu" else x.mean(0)).tolist() for name, x in each.items()}


class Jsonl:
    """Writer of one JSON object per line, `{"step": 10, "loss": 2.5, ...}`; NaN and infinities become null.

    Lines that cannot be written wait for the next one, up to 10,000 of them.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file: io.FileIO | None = None
        self._waiting: collections.deque[str] = collections.deque(maxlen=10_000)
        self._have: set[tuple[int, tuple[str, ...]]] = set()

    def resume(self, step: int) -> None:
        """Keeps the lines up to `step`; if there are later ones, the old file is kept with the suffix `.old`."""
        self.close()
        self._waiting.clear()
        lines = self.path.read_text(errors="replace").splitlines() if self.path.exists() else []
        rows = [read_json(line) for line in lines]
        until = [(line, row) for line, row in zip(lines, rows, strict=True) if _is_row(row) and row["step"] <= step]
        self._have = {(step, _names(row)) for _, row in until if row["step"] == step}
        if len(until) == len(lines):
            return
        shutil.copyfile(self.path, self.path.with_suffix(self.path.suffix + ".old"))
        write_atomically(self.path, "".join(line + "\n" for line, _ in until))

    def write(self, step: int, values: Values) -> None:
        if not values or (step, _names(values)) in self._have:  # the evaluation after the last step may be repeated
            return
        line = {"step": step} | {k: _plain(v) for k, v in values.items()}
        self._waiting.append(json.dumps(line, allow_nan=False) + "\n")
        self._append()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _append(self) -> None:
        """Writes pending lines, and keeps them if writing fails, as on a full disk."""
        if self._file is None:  # unbuffered, because a buffer that cannot be flushed would be lost
            self._file = self.path.open("ab", buffering=0)
        data, size = "".join(self._waiting).encode(), self._file.tell()
        written = self._file.write(data)
        if written < len(data):
            self._file.truncate(size)  # all lines are written next time
            raise OSError(errno.ENOSPC, f"{self.path}: only {written} of {len(data)} bytes could be written")
        self._waiting.clear()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads all lines of a `Jsonl`, except truncated or damaged ones."""
    rows = map(read_json, Path(path).read_text(errors="replace").splitlines())
    return [row for row in rows if _is_row(row)]


def _is_row(row: Any) -> bool:
    """Returns whether a row was written by a `Jsonl`: a step, and numbers, null or arrays of them by name."""
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    return all(_is_value(value) for value in row.values())


def _is_value(value: Any) -> bool:
    return all(map(_is_value, value)) if isinstance(value, list) else value is None or is_number(value)


class Console:
    """Progress bar with loss, speed and remaining time; without a terminal, a line every `seconds`."""

    def __init__(self, *, seconds: float = 10.0, terminal: Terminal | None = None):
        self.terminal = Terminal(soft_wrap=True) if terminal is None else terminal
        self._seconds, self._bar, self._last, self._total, self._unfinished = seconds, None, -math.inf, 0, ""

    def start(self, step: int, total: int) -> None:
        """Begins to show progress from `step` towards `total`."""
        self._total = total
        if self.terminal.is_terminal:
            columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn()
            self._bar = Progress(*columns, console=self.terminal)
            self._task = self._bar.add_task("", total=total, completed=step, text="compiling")
            self._bar.start()

    def log(self, text: str) -> None:
        """Prints a separate line."""
        self.terminal.print(text, markup=False, highlight=False)

    def resume(self, step: int) -> None: ...

    def write(self, step: int, values: Values) -> None:
        text = _summary(values)
        if not text:
            return
        if "loss" not in values:
            self.log(f"step {step}  {text}")
        elif self._bar is not None:
            self._bar.update(self._task, completed=step, text=text)
        elif time.monotonic() - self._last >= self._seconds:
            self._last, self._unfinished = time.monotonic(), ""
            self.log(f"step {step}/{self._total}  {text}")
        else:
            self._unfinished = f"step {step}/{self._total}  {text}"

    def close(self) -> None:
        """Ends the display and leaves the bar, or the last line, visible."""
        if self._bar is not None:
            self._bar.stop()
        elif self._unfinished:
            self.log(self._unfinished)
        self._bar, self._unfinished, self._last = None, "", -math.inf


class Meter:
    """Reader of metrics from the device, one step late so that the device never waits, which also measures the speed.

    Args:
        flops: Model FLOPs of the step that is pushed next.
        peak: FLOP/s of all devices. `tokens_per_second` (of `num_tokens`), `targets_per_second` (of `num_targets`) and
            what comes of `flops` are averaged over about ten steps; `seconds` is the time of one step.
    """

    def __init__(self, *, flops: float | None = None, peak: float | None = None):
        self.flops, self.peak = flops, peak
        self._waiting: tuple[int, dict[str, Any], float | None] | None = None  # with the FLOPs of the step
        self._averaged: float | None = None  # FLOPs of the steps whose times are averaged
        self._read_at: float | None = None
        self._smooth: float | None = None

    def push(self, step: int, metrics: dict[str, Any], **here: float) -> list[tuple[int, dict[str, Any]]]:
        """Takes the metrics of a step that was just started (`here`: already known), and returns those of the previous
        step.
        """
        before, self._waiting = self._waiting, (step, metrics | here, self.flops)
        if before is None:
            return []
        values, now = jax.device_get(before[1]), time.perf_counter()
        if self._read_at is not None:
            values["seconds"] = now - self._read_at
            smooth = self._smooth if before[2] == self._averaged else None  # more rows, for example, take longer
            self._smooth = values["seconds"] if smooth is None else 0.9 * smooth + 0.1 * values["seconds"]
            self._averaged = before[2]
        self._read_at = now
        return [(before[0], self._with_speed(values, before[2]))]

    def flush(self) -> list[tuple[int, dict[str, Any]]]:
        """Waits for pending metrics. The time until the next step does not count."""
        before, self._waiting, self._read_at = self._waiting, None, None
        return [] if before is None else [(before[0], self._with_speed(jax.device_get(before[1]), before[2]))]

    def _with_speed(self, values: dict[str, Any], flops: float | None) -> dict[str, Any]:
        if self._smooth is None:
            return values
        for name in {"num_tokens", "num_targets"} & values.keys():
            values[f"{name.removeprefix('num_')}_per_second"] = float(values[name]) / self._smooth
        if flops is not None:
            values["model_tflops_per_second"] = flops / self._smooth / 1e12
        if flops is not None and self.peak is not None:
            values["mfu"] = flops / self._smooth / self.peak
        return values


def _summary(values: Values) -> str:
    # A policy's loss has the gradient of the reward, but its value says nothing: about 0 at every step.
    shown = {"reward": "reward {:.4f}"} if "reward" in values else {"loss": "loss {:.4f}"}
    shown |= {
        "eval/loss": "eval loss {:.4f}",
        "eval/accuracy": "accuracy {:.3f}",
        "tokens_per_second": "{:,.0f} tokens/s",
        "mfu": "MFU {:.1%}",
    }
    for name in values:
        match name.split("/"):
            case ["eval", set_name, "loss" | "bits_per_byte" as metric]:
                shown[name] = f"{set_name} {metric.replace('_', ' ')} {{:.4f}}"
    return "  ".join(form.format(float(values[name])) for name, form in shown.items() if name in values)


def _plain(value: Any) -> Any:
    """Converts a value to JSON types, with null for values that JSON cannot represent."""
    value = np.asarray(value)
    if value.dtype.kind == "b" or value.dtype.kind in "iu":
        return value.tolist()
    return _finite(value.astype(np.float64).tolist())


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return float(f"{value:.9g}") if math.isfinite(value) else None


def _names(values: Values) -> tuple[str, ...]:
    return tuple(sorted(name for name in values if name != "step"))
