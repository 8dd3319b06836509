"""Mesh degrees and strategies, as parsed by the commands."""

from pathlib import Path

from maxlib.distributed import xla_flags
from maxlib.sharding import Layout, parse_degrees, preset, preset_name
from tests.fuzz.run import Target

LINES = ["fsdp=-1,tensor=4 fsdp_tp", "data=2 dp+zero1", "stage=4 fsdp=2 pp:16x2", "expert=8 ep_tp", "context=4 cp_ring"]


def make(directory: Path) -> None:
    for i, line in enumerate(LINES):
        (directory / str(i)).mkdir()
        (directory / str(i) / "layout").write_text(line)


def read(directory: Path) -> None:
    *degrees, name = (directory / "layout").read_bytes().decode(errors="replace").split() or [""]
    strategy = preset(name)
    assert preset(preset_name(strategy)) == strategy, "another strategy"
    layout = Layout(parse_degrees(*degrees), strategy)
    assert layout.strategy == strategy and dict(layout.mesh.degrees) == parse_degrees(*degrees)
    xla_flags.options(name)


KINDS = {f"{i}/layout": "arguments" for i in range(len(LINES))}
TARGET = Target(make, read, KINDS, names_file=False, alone=True)
