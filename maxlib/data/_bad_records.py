"""Skips and counts records that cannot be read or tokenized, up to a limit."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import grain

from maxlib.data._documents import is_system_error


class SkipBadRecords:
    """Filter that skips bad documents, and stops the run when there are more than `limit` of them.

        bad_records = SkipBadRecords(limit=100, path="runs/1/bad_records.jsonl")
        documents = bad_records.guard(tokenize(text_files("corpus"), tokenizer), name="corpus")
        shuffled = documents.shuffle(seed=0).repeat()
        Loader(lambda part: pack(shuffled[part], length=512), batch_size=8, bad_records=bad_records)

    Missing files of a source and failing disks are not bad records: their errors are raised.

    Args:
        limit: Largest number of bad documents.
        path: File to which a line of JSON is appended for each: `source`, `record` (its index) and `error`. Records in
            an existing file count too, so a resumed run continues the count; a last line that a kill cut off is
            removed, and its record counts when it is read again. Each host needs its own path.
    """

    def __init__(self, *, limit: int, path: str | os.PathLike | None = None):
        if not limit >= 0:  # nor NaN
            raise ValueError(f"limit must be at least 0, got {limit}.")
        self._limit, self._path, self._lock = limit, None if path is None else Path(path), threading.Lock()
        self._seen: set[tuple[str, int]] = set()
        if self._path is not None and self._path.exists():
            _cut_torn_line(self._path)
            lines = self._path.read_bytes().splitlines()
            self._seen = {_entry(line, self._path, number) for number, line in enumerate(lines, 1)}

    def __len__(self) -> int:
        """Returns the number of bad records."""
        return len(self._seen)

    def guard(self, documents: grain.MapDataset, *, name: str = "") -> grain.MapDataset:
        """Skips documents that raise an error, in this dataset or an earlier stage. Call it before `shuffle`."""
        return _Guarded(documents, self, name)

    def add(self, source: str, record: int, error: Exception) -> None:
        """Records a bad record once, no matter how often it is read. Raises ValueError over the limit."""
        with self._lock:
            if (source, record) in self._seen:
                return
            self._seen.add((source, record))
            if self._path is not None:
                self._append({"source": source, "record": record, "error": f"{type(error).__name__}: {error}"})
        if len(self) > self._limit:
            listed = "" if self._path is None else f" All are listed in {self._path}."
            raise ValueError(
                f"{len(self)} bad records, more than limit={self._limit}; the last, record {record} of {source!r}: "
                f"{error}{listed} Repair the data, or raise the limit."
            ) from error

    def _append(self, line: dict[str, Any]) -> None:
        assert self._path is not None
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _cut_torn_line(path: Path) -> None:
    """Removes what follows the last line ending, since the process was stopped while it wrote that."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def _entry(line: bytes, path: Path, number: int) -> tuple[str, int]:
    """Reads the source and the record of a line."""
    try:
        entry = json.loads(line)
        source, record = entry["source"], entry["record"]
    except (ValueError, KeyError, TypeError) as error:
        source, record = None, error
    if not isinstance(source, str) or type(record) is not int:
        raise ValueError(
            f"{path}: line {number} must be an object with a 'source' and a 'record', its index, got {line!r:.100}: remove "
            "the line, or give another path"
        )
    return source, record


def is_guarded(documents: Any) -> bool:
    """Returns True for documents that pass through a `SkipBadRecords`."""
    return isinstance(documents, _Guarded) or any(map(is_guarded, documents.parents))


class _Guarded(grain.MapDataset):
    def __init__(self, parent: grain.MapDataset, bad_records: SkipBadRecords, name: str):
        super().__init__(parent)
        self._bad_records, self._name = bad_records, name

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        try:
            return self._parent[index]
        except Exception as error:
            if is_system_error(error):
                raise
            self._bad_records.add(self._name, index % len(self), error)
            return None
