"""The records of a checkpoint's step, without its arrays, for many inputs per second."""

from pathlib import Path

from etils import epath

from maxlib.checkpoint import DamagedError
from maxlib.checkpoint import _records as records
from maxlib.checkpoint import _restore as restore
from tests.fuzz.run import Target

LEAVES = {
    "embed.w": {"shape": [8, 4], "dtype": "float32", "checksum": "0123456789abcdef"},
    "key": {"shape": [2], "dtype": "uint32", "checksum": "fedcba9876543210", "key": "fry"},
}
RECORDS = {
    "manifest": {"format": 1, "items": {"params": LEAVES, "rest": {}}},
    "meta": {"step": 1, "layouts": {"layers": [[1, 4]]}, "metrics": {"loss": 2.5}},
    "data": {"0": {"next_index": 12, "nested": [1, {"a": None}]}},
}


def make(directory: Path) -> None:
    (directory / "1" / "params").mkdir(parents=True)
    for name, content in RECORDS.items():
        (directory / "1" / name).mkdir()
        (directory / "1" / name / f"{name}.json").write_text(records.to_text(content))


def read(directory: Path) -> None:
    (directory / "1" / "params").mkdir(exist_ok=True)
    stored = restore.open_step(epath.Path(directory / "1"))
    assert stored.items == RECORDS["manifest"]["items"], "another manifest"
    assert (stored.meta, stored.data) == (RECORDS["meta"], RECORDS["data"]), "other records"


KINDS = {f"1/{name}/{name}.json": "json" for name in RECORDS}
TARGET = Target(make, read, KINDS, errors=(DamagedError, ValueError))
