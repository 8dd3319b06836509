"""The manifest of pretokenized data, and the owner file of checkpoint directories."""

import json
from pathlib import Path

from etils import epath

from maxlib import data
from maxlib.checkpoint import _lock as lock
from tests.fuzz.run import Target

COUNTS = {"documents": 6, "tokens": 70, "characters": 140, "longest": 12}


def make(directory: Path) -> None:
    file = {"name": "tokens-00000.array_record", "bytes": 900, **COUNTS}
    job = {"format": 1, "description": "some", "records": 6, "tokenizer": "00ff", "vocab_size": 300, "dtype": "<u2"}
    more = {"bos_id": None, "eos_id": 1, "documents_per_file": 50_000, "bad_records": 0}
    manifest = {**job, **more, "total": COUNTS, "files": [file]}
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))
    owner = {"run": "a" * 32, "pid": 12, "host": "there", "since": "2026-01-01 00:00:00"}
    (directory / lock.FILE).write_text(json.dumps(owner))


def read(directory: Path) -> None:
    if (owner := lock._read(epath.Path(directory / lock.FILE), tries=1)) is not None:
        assert not lock._is_mine(owner) and lock._describe(owner)
    manifest = data.read_manifest(directory)
    for file in manifest["files"]:
        assert (directory / file["name"]).parent == directory, "outside of its directory"


TARGET = Target(make, read, {"manifest.json": "json", lock.FILE: "json"})
