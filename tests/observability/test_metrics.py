"""Metrics files, and how resumed runs continue them."""

import io
import json
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console as Terminal

from maxlib import observability
from maxlib.observability._metrics import Writers


def test_jsonl_holds_a_line_a_step_at_any_moment(tmp_path):
    writer = observability.Jsonl(tmp_path / "run" / "metrics.jsonl")
    writer.write(1, {"loss": jnp.float32(2.5), "loads": np.array([0.25, 0.75]), "bad": np.nan, "tokens": np.int32(7)})
    writer.write(2, {"loss": 1.0})
    rows = observability.read_jsonl(writer.path)  # not closed yet
    assert rows == [{"step": 1, "loss": 2.5, "loads": [0.25, 0.75], "bad": None, "tokens": 7}, {"step": 2, "loss": 1.0}]
    value = np.float32(1 / 3)
    writer.write(3, {"loss": value})
    assert np.float32(observability.read_jsonl(writer.path)[-1]["loss"]) == value


def test_a_resumed_jsonl_has_every_step_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = observability.Jsonl(path)
    for step in (1, 2, 3, 4):
        writer.write(step, {"loss": float(step)})
    writer.write(2, {"eval/loss": 0.5})
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # the process was killed here

    resumed = observability.Jsonl(path)
    resumed.resume(2)
    resumed.write(2, {"eval/loss": 0.5})  # the evaluation at the end of a finished run
    resumed.write(3, {"loss": -3.0})
    rows = observability.read_jsonl(path)
    assert [(row["step"], row.get("loss")) for row in rows] == [(1, 1.0), (2, 2.0), (2, None), (3, -3.0)]
    assert "4.0" in (tmp_path / "metrics.jsonl.old").read_text()  # nothing is lost
    again = observability.Jsonl(path)
    again.resume(3)
    assert observability.read_jsonl(path) == rows


@pytest.mark.parametrize("room", [5, 26, 35])  # within the first line that waits, all of it, within the second
def test_lines_wait_while_the_disk_is_full(tmp_path, room):
    """Also across the end of a `fit`, and where a line was cut in the middle."""
    writer = observability.Jsonl(tmp_path / "m.jsonl")
    writer.write(1, {"loss": 1.0})
    file = writer._file
    full = io.FileIO("/dev/full", "ab")
    nearly = SimpleNamespace(tell=file.tell, truncate=file.truncate, write=lambda data: file.write(data[:room]))
    for step, broken in ((2, full), (3, nearly)):
        writer._file = broken
        with pytest.raises(OSError, match=f"No space left|only {room} of"):
            writer.write(step, {"loss": 2.0})
    writer._file = file
    writer.close()
    writer.write(4, {"loss": 4.0})
    writer.close()
    assert [row["step"] for row in observability.read_jsonl(writer.path)] == [1, 2, 3, 4]


def test_console_without_a_terminal_prints_lines():
    out = io.StringIO()
    console = observability.Console(seconds=1000, terminal=Terminal(file=out, width=100))
    console.start(0, 3)
    for step in (1, 2, 3):
        console.write(step, {"loss": 1.5, "tokens_per_second": 12345.6, "mfu": 0.5})
    console.write(3, {"eval/loss": 1.25})
    console.close()
    lines = [line.strip() for line in out.getvalue().splitlines()]
    shown = "loss 1.5000  12,346 tokens/s  MFU 50.0%"
    assert lines == [f"step 1/3  {shown}", "step 3  eval loss 1.2500", f"step 3/3  {shown}"]


def test_the_console_shows_the_reward_in_place_of_a_policys_loss():
    out = io.StringIO()
    console = observability.Console(terminal=Terminal(file=out, width=100))
    console.start(0, 3)
    console.write(1, {"loss": -1e-9, "reward": 0.25})
    assert out.getvalue().strip() == "step 1/3  reward 0.2500"


def test_console_on_a_terminal_draws_a_bar():
    out = io.StringIO()
    console = observability.Console(terminal=Terminal(file=out, width=100, force_terminal=True))
    console.start(0, 3)
    console.write(3, {"loss": 1.5})
    console.close()
    assert "loss 1.5000" in out.getvalue() and "3/3" in out.getvalue()


def test_the_meter_reads_one_step_late():
    meter = observability.Meter(flops=1e12, peak=1e15)
    steps = [{"loss": jnp.float32(i), "num_targets": jnp.float32(10), "num_tokens": jnp.int32(30)} for i in range(4)]
    assert meter.push(1, steps[0], data_seconds=0.5) == []
    [(step, values)] = meter.push(2, steps[1])
    assert step == 1 and values["data_seconds"] == 0.5 and "seconds" not in values
    [(step, values)] = meter.push(3, steps[2])
    assert step == 2 and values["targets_per_second"] == pytest.approx(10 / values["seconds"])
    assert values["tokens_per_second"] == pytest.approx(30 / values["seconds"])
    assert values["mfu"] == pytest.approx(1e12 / values["seconds"] / 1e15)
    meter.flops = 2e12  # of the step after, whose time is not averaged with those before
    meter.push(4, steps[3])
    [(step, values)] = meter.push(5, steps[2])
    assert step == 4 and values["mfu"] == pytest.approx(2e12 / values["seconds"] / 1e15)
    [(step, values)] = meter.flush()
    assert step == 5 and values["loss"] == 2 and "seconds" not in values and meter.flush() == []


def test_tensorboard_says_how_to_get_it(tmp_path, monkeypatch):
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        with pytest.raises(ImportError, match=r"maxlib\[tensorboard\]"):
            observability.TensorBoard(tmp_path)
        return
    writer = observability.TensorBoard(tmp_path)
    writer.resume(0)
    writer.write(1, {"loss": 1.0, "loads": np.array([1.0, 2.0, 6.0])})
    writer.close()
    (events,) = tmp_path.glob("events*")
    assert all(name in events.read_bytes() for name in (b"loss", b"loads/mean", b"loads/min", b"loads/max"))
    monkeypatch.setattr(jax, "process_index", lambda: 1)  # other processes write nothing
    other = observability.TensorBoard(tmp_path / "other")
    other.resume(0)
    other.write(1, {"loss": 1.0})
    other.close()
    assert not (tmp_path / "other").exists()


def test_jsonl_is_strict_json(tmp_path):
    writer = observability.Jsonl(tmp_path / "m.jsonl")
    writer.write(1, {"a": np.inf, "b": np.array([1.0, np.nan]), "c": True})
    refuse = lambda name: pytest.fail(f"{name} is no JSON")
    assert json.loads(writer.path.read_text(), parse_constant=refuse) == {
        "step": 1,
        "a": None,
        "b": [1.0, None],
        "c": True,
    }


def test_a_writer_that_raises_is_reported_once_and_the_others_go_on(tmp_path):
    class Unreachable:
        def resume(self, step):
            raise ConnectionError("no route")

        write = close = lambda self, *_: self.resume(0)

    said, good = [], observability.Jsonl(tmp_path / "metrics.jsonl")
    writers = Writers([Unreachable(), good], log=said.append)
    writers.resume(0)
    for step in (1, 2):
        writers.write(step, {"loss": 1.0})
    writers.close()
    assert [row["step"] for row in observability.read_jsonl(good.path)] == [1, 2]
    assert said == ["METRICS LOST: Unreachable failed with ConnectionError('no route'); training continues"]


def test_of_all_processes_counts_are_sums_and_other_numbers_means(monkeypatch):
    here = SimpleNamespace(metrics=lambda: {"reward": np.float32(0.5), "tokens": 3, "load": np.array([1.0, 2.0])})
    monkeypatch.setattr("jax.process_count", lambda: 2)
    there = {"reward": 1.0, "tokens": 4, "load": [3.0, 2.0], "late": 1}
    monkeypatch.setattr("maxlib.distributed.allgather_json", lambda mine: [json.loads(json.dumps(mine)), there])
    both = observability.collect_metrics(here, all_processes=True)
    assert both == {"reward": 0.75, "tokens": 7, "load": [2.0, 2.0], "late": 1}
