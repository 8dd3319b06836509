"""Names of hardware and of layouts, as `maxlib plan` takes them."""

from pathlib import Path

from maxlib.plan._targets import parse_target
from maxlib.sharding._presets import preset
from tests.fuzz.run import Target

NAMES = ["v4-128", "v5p-256x2", "v5e-16", "v5p:4x4x8*2", "h100x8", "h200x16", "cpu", "fsdp", "fsdp|tensor", "dp+zero1"]


def make(directory: Path) -> None:
    for i, name in enumerate(NAMES):
        (directory / str(i)).mkdir()
        (directory / str(i) / "name").write_text(name)


def read(directory: Path) -> None:
    name = (directory / "name").read_bytes().decode(errors="replace")
    problems = []
    for parse in (parse_target, preset):
        try:
            parse(name)
        except ValueError as error:
            problems.append(error)
    assert all(str(problem).strip() for problem in problems)


TARGET = Target(make, read, {f"{i}/name": "bytes" for i in range(len(NAMES))}, names_file=False, alone=True)
