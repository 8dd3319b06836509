"""Pretokenization: writes documents to ArrayRecord files of tokens with a manifest, and reads them back."""

import collections
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tokenizers import Tokenizer

from maxlib._utils.files import read_json_object, write_atomically
from maxlib.data._bad_records import SkipBadRecords
from maxlib.data._documents import Document, text_of, token_ids
from maxlib.data._sources import ArrayRecords
from maxlib.data._storage import as_file, exists, local_copy, size_of
from maxlib.data._tokenize import check_not_truncated, end_ids

MANIFEST, TOKENIZER, BAD = "manifest.json", "tokenizer.json", "bad_records.jsonl"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of token files. `a + b` adds them; `longest` is the maximum."""

    documents: int = 0
    tokens: int = 0
    characters: int = 0
    longest: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        longest = max(self.longest, other.longest)
        tokens, characters = self.tokens + other.tokens, self.characters + other.characters
        return Counts(self.documents + other.documents, tokens, characters, longest)


def write_tokens(
    documents: grain.MapDataset[Document],
    directory: str | Path,
    tokenizer: Tokenizer,
    *,
    bos_id: int | None = None,
    eos_id: int | None = None,
    documents_per_file: int = 50_000,
    batch: int = 256,
    bad_records: int = 0,
    description: str = "",
    progress: Callable[[Counts], Any] = lambda counts: None,
) -> dict[str, Any]:
    """Tokenizes documents with `"text"` into ArrayRecord files, which `read_tokens(directory)` reads.

    Every file is written under a temporary name and then renamed, so an interrupted run continues with the first
    missing file.

    Args:
        documents: Documents with `"text"`.
        directory: Directory of the files.
        tokenizer: The tokenizer, which encodes a batch on its own threads.
        bos_id: Token before each document, or None.
        eos_id: Token after each document, or None.
        documents_per_file: Number of documents in a file.
        batch: Number of documents encoded at a time.
        bad_records: Largest number of failing documents to skip; they are listed in `bad_records.jsonl`.
        description: Description of the documents for the manifest; a continued run must have the same.
        progress: Function that is called after every batch.

    Returns:
        The manifest.

    Raises:
        ValueError: when the tokenizer truncates or pads, `bos_id` or `eos_id` is no token id, or the directory has
            tokens of other documents, another tokenizer or other options.
    """
    check_not_truncated(tokenizer)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    job = _job(documents, tokenizer, bos_id, eos_id, documents_per_file, description)
    _check_job(directory, job)
    skipped = SkipBadRecords(limit=bad_records, path=directory / BAD)
    texts = skipped.guard(documents.map(text_of))
    files, total = [], Counts()
    for number, first in enumerate(range(0, len(documents), documents_per_file)):
        path = directory / f"tokens-{number:05}.array_record"
        counts = _read_counts(path)
        if counts is None:
            indices = range(first, min(first + documents_per_file, len(documents)))
            before = total
            counts = _write_file(
                texts, indices, path, tokenizer, job, batch, lambda now, before=before: progress(before + now)
            )
        total += counts
        progress(total)
        files.append({"name": path.name, "bytes": path.stat().st_size, **dataclasses.asdict(counts)})
    if not total.documents:
        raise ValueError(f"No document could be tokenized; see {directory / BAD}.")
    manifest = {**job, "bad_records": len(skipped), "total": dataclasses.asdict(total), "files": files}
    write_atomically(directory / TOKENIZER, tokenizer.to_str(pretty=True))
    write_atomically(directory / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def read_tokens(directory: str | Path) -> grain.MapDataset[Document]:
    """Reads the documents `{"tokens": int32 array}` that `write_tokens` (`python -m maxlib.data tokenize`) wrote.

    A directory may be in a bucket; its files are copied into the cache directory.

    Raises:
        FileNotFoundError: when the manifest or one of its files is missing.
        ValueError: when a file differs from the written one.
    """
    manifest = read_manifest(directory)
    files = [file for file in manifest["files"] if file["documents"]]
    paths = [as_file(f"{directory}/{file['name']}") for file in files]
    for file, path in zip(files, paths, strict=True):
        if not exists(path):
            raise FileNotFoundError(
                f"{path} is missing; the manifest beside it names it. Tokenize again to replace it."
            )
        if (size := size_of(path)) != file["bytes"]:
            raise ValueError(f"{path} has {size} bytes, the manifest says {file['bytes']}: it was damaged.")
    source: Any = ArrayRecords(paths)
    if len(source) != manifest["total"]["documents"]:
        raise ValueError(
            f"{directory}/{MANIFEST} counts {manifest['total']['documents']} documents, its files have {len(source)}: "
            "tokenize again."
        )
    return grain.MapDataset.source(source).map(partial(_decode, dtype=manifest["dtype"], where=str(directory)))


def read_manifest(directory: str | Path) -> dict[str, Any]:
    """Reads the manifest: what was tokenized, how, and the counts."""
    path = as_file(f"{directory}/{MANIFEST}")
    if not exists(path):
        raise FileNotFoundError(
            f"{path} does not exist: tokenization has not been run there, or has not been finished."
        )
    manifest = read_json_object(local_copy(path))
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{path} is of format {manifest.get('format')}, this maxlib reads {FORMAT}: tokenize again.")
    total: Any = manifest.get("total")
    files: Any = manifest.get("files")
    listed = _has_counts(total) and isinstance(files, list) and all(map(_is_file, files))
    if not listed or not 0 < total["documents"] == sum(file["documents"] for file in files):
        raise ValueError(f"{path} must list files of this directory with their counts: tokenize again.")
    if manifest.get("dtype") not in _DTYPES:
        raise ValueError(f"{path}: dtype must be one of {_DTYPES}, got {manifest.get('dtype')!r:.100}: tokenize again.")
    return manifest


_DTYPES = ["<u2", "<i4"]


def _has_counts(entry: Any) -> bool:
    """Returns whether an entry of a manifest has counts."""
    names = [field.name for field in dataclasses.fields(Counts)]
    return isinstance(entry, dict) and all(type(entry.get(name)) is int and entry[name] >= 0 for name in names)


def _is_file(entry: Any) -> bool:
    """Returns whether an entry of a manifest has counts, and names a file beside it."""
    name = entry.get("name") if _has_counts(entry) else None
    if not isinstance(name, str) or not name.isprintable() or len(name.encode()) > 255:
        return False
    return Path(name).name == name not in ("", "..") and type(entry.get("bytes")) is int


def _decode(data: bytes, *, dtype: str, where: str) -> Document:
    if len(data) % np.dtype(dtype).itemsize:
        raise ValueError(f"{where}: a record of {len(data)} bytes holds no tokens of {dtype}. Tokenize again.")
    return {"tokens": token_ids(np.frombuffer(data, dtype), f"{where}: a record")}


def _job(documents: Any, tokenizer: Tokenizer, bos_id: Any, eos_id: Any, per_file: int, description: str) -> dict:
    """Collects the settings that determine the files' contents, apart from the documents."""
    if documents is None or len(documents) == 0:
        raise ValueError("There is no document to tokenize.")
    begin, end = end_ids(bos_id, eos_id)
    largest = max([*tokenizer.get_vocab().values(), *begin, *end])  # ids may have gaps
    return {
        "format": FORMAT,
        "description": description,
        "records": len(documents),
        "tokenizer": hashlib.blake2b(tokenizer.to_str().encode(), digest_size=16).hexdigest(),
        "vocab_size": tokenizer.get_vocab_size(),
        "dtype": "<u2" if largest < 2**16 else "<i4",
        "bos_id": bos_id,
        "eos_id": eos_id,
        "documents_per_file": per_file,
    }


def _check_job(directory: Path, job: dict) -> None:
    """Raises ValueError if another job started the directory."""
    path = directory / "job.json"
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        other = {name: (before.get(name), job[name]) for name in job if before.get(name) != job[name]}
        if other:
            said = ", ".join(f"{name} was {a!r} and is now {b!r}" for name, (a, b) in other.items())
            raise ValueError(
                f"{directory} was started with other settings: {said}. Use another directory, or remove this one."
            )
    write_atomically(path, json.dumps(job, indent=1) + "\n")


def _write_file(
    documents: grain.MapDataset,
    indices: range,
    path: Path,
    tokenizer: Tokenizer,
    job: dict,
    batch: int,
    progress: Callable,
) -> Counts:
    from array_record.python.array_record_module import ArrayRecordWriter

    begun = path.with_name(path.name + ".part")
    writer = ArrayRecordWriter(str(begun), "group_size:1")
    counts = Counts()
    for texts, records in _ahead(_records(_ahead(_texts(documents, indices, batch)), tokenizer, job)):
        for record in records:
            writer.write(record)
        width = np.dtype(job["dtype"]).itemsize
        sizes = [len(record) // width for record in records]
        counts += Counts(len(records), sum(sizes), sum(map(len, texts)), max(sizes, default=0))
        progress(counts)
    writer.close()
    write_atomically(_counts_path(path), json.dumps(dataclasses.asdict(counts)))
    begun.replace(path)
    return counts


def _texts(documents: grain.MapDataset, indices: range, batch: int) -> Iterator[list[str]]:
    for first in indices[::batch]:
        read = (documents[i] for i in range(first, min(first + batch, indices.stop)))
        yield [text for text in read if text is not None]


def _records(batches: Iterator[list[str]], tokenizer: Tokenizer, job: dict) -> Iterator[tuple[list[str], list[bytes]]]:
    begin, end = end_ids(job["bos_id"], job["eos_id"])
    for texts in batches:
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        yield texts, [np.array(begin + e.ids + end, job["dtype"]).tobytes() for e in encoded]


def _ahead(items: Iterator[Any], size: int = 4) -> Iterator[Any]:
    """Yields the same items; a thread produces the next few ahead."""
    with ThreadPoolExecutor(1, "maxlib-tokenize") as thread:
        ready = collections.deque(thread.submit(next, items, None) for _ in range(size))
        while (item := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, items, None))
            yield item


def _read_counts(path: Path) -> Counts | None:
    """Reads the counts of a file that is complete."""
    return Counts(**json.loads(_counts_path(path).read_text(encoding="utf-8"))) if path.exists() else None


def _counts_path(path: Path) -> Path:
    return path.with_suffix(".json")
