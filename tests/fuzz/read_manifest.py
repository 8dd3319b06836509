"""A checkpoint's records, arrays and owner file: damage is detected, or has no effect."""

import logging
from pathlib import Path

import numpy as np

from maxlib import checkpoint
from tests.fuzz.run import Target

ITEMS = {"params": {"w": np.arange(50, dtype=np.float32)}, "opt": {"count": np.array(3, np.int32)}}


def make(directory: Path) -> None:
    with checkpoint.Checkpointer(directory) as saving:
        saving.save(1, ITEMS, data={"0": {"n": 1}}, meta={"note": "x"})


def read(directory: Path) -> None:
    logging.disable()
    got = checkpoint.load(directory / "1")
    assert np.array_equal(got["params"]["w"], ITEMS["params"]["w"]) and got["opt"]["count"] == 3, "other weights"
    assert got["data"] == {"0": {"n": 1}} and got["meta"]["note"] == "x", "other records"


KINDS = {f"1/{name}/{name}.json": "json" for name in ("manifest", "meta", "data")}
KINDS |= {"1/params/manifest.ocdbt": "bytes", "1/params/_METADATA": "json", "1/_CHECKPOINT_METADATA": "json"}
# The stacks of tensorstore's and jax's threads count as address space.
TARGET = Target(make, read, KINDS, errors=(checkpoint.DamagedError, ValueError, FileNotFoundError), gib=16)
