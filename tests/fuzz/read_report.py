"""metrics.jsonl, goodput.jsonl, samples and settings, and the report rendered from them."""

from pathlib import Path

from maxlib import observability
from tests.fuzz import read_metrics
from tests.fuzz.run import Target


def read(directory: Path) -> None:
    read_metrics.read(directory)
    observability.report(directory, out=directory / "report.html")


KINDS = {"metrics.jsonl": "jsonl", "goodput.jsonl": "jsonl", "samples.jsonl": "jsonl", "config.json": "json"}
TARGET = Target(read_metrics.make, read, KINDS)
