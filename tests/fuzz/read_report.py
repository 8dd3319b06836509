"""metrics.jsonl, goodput.jsonl, samples and settings, and the report rendered from them."""

import json
from pathlib import Path

from maxlib import observability
from tests.fuzz.run import Target


def make(directory: Path) -> None:
    rows = [{"step": i, "loss": 3.0 - i, "tokens_per_second": 5.0, "tokens": 9, "eval/loss": 2.0} for i in range(1, 6)]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "a", "text": "b"}) + "\n")
    (directory / "config.json").write_text(json.dumps({"lr": 1, "environment": {"devices": "x", "jax": "y"}}))
    lines = [{"session": 0, "time": 1.0, "begin": 0.0, "at": 0.0, "boot": "x"}]
    lines += [{"session": 0, "time": 2.0 + i, "at": 1.0 + i, "step": i, "seconds": {"step": 1.0}} for i in range(4)]
    (directory / "goodput.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(directory: Path) -> None:
    observability.read_jsonl(directory / "metrics.jsonl")
    str(observability.goodput(directory))
    observability.report(directory, out=directory / "report.html")


KINDS = {"metrics.jsonl": "jsonl", "goodput.jsonl": "jsonl", "samples.jsonl": "jsonl", "config.json": "json"}
TARGET = Target(make, read, KINDS)
