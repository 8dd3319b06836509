"""Skips and counts records that cannot be read or tokenized, up to a limit."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import grain


class SkipBadRecords:
    """Filter that skips bad documents, and stops the run when there are more than `limit` of them.

        bad_records = SkipBadRecords(limit=100, path="runs/1/bad_records.jsonl")
        documents = bad_records.guard(tokenize(text_files("corpus"), tokenizer), name="corpus")
        shuffled = documents.shuffle(seed=0).repeat()
        Loader(lambda part: pack(shuffled[part], length=512), batch_size=8, bad_records=bad_records)

    Missing files and failing disks are not bad records: their errors are raised.

    Args:
      limit: largest number of bad documents.
      path: file to which a line of JSON is appended for each: `source`, `record` (its index) and `error`. Records in an
          existing file count too, so a resumed run continues the count. Each host needs its own path.
    """

    def __init__(self, *, limit: int, path: str | os.PathLike | None = None):
        if limit < 0:
            raise ValueError(f"limit must be at least 0, got {limit}.")
        self._limit, self._path, self._lock = limit, None if path is None else Path(path), threading.Lock()
        self._seen: set[tuple[str, int]] = set()
        if self._path is not None and self._path.exists():
            lines = [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]
            self._seen = {(line["source"], line["record"]) for line in lines}

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
        except OSError:
            raise
        except Exception as error:
            self._bad_records.add(self._name, index % len(self), error)
            return None
