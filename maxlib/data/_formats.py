"""Sources in other formats: Parquet, tables of records, Hugging Face streams, folders of mixed files."""

import bisect
import copy
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol, runtime_checkable

import grain

from maxlib.data._documents import Document, is_hf_dataset, token_ids, with_content, without_nulls
from maxlib.data._reader import FromIterators
from maxlib.data._sources import Piece, array_record, jsonl, text_files
from maxlib.data._storage import File, Paths, RemoteFile, find_files
from maxlib.data._streams import Stream, check_epoch


@runtime_checkable
class Table(Protocol):
    """Records by index: a Hugging Face `Dataset`, a `tfds.data_source(...)`, a list of dicts."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def records(table: Table, *, field: str = "text") -> grain.MapDataset[Document]:
    """Reads documents from a table of records by index, for example a Hugging Face `Dataset` or a `tfds.data_source`.

    The type of `field` decides the key of a document: text (or UTF-8 bytes) is `"text"`, integers are `"tokens"`,
    objects with a role are `"messages"`. Records are read lazily: a bad record raises an error with its index when it
    is reached.

    Args:
        table: The records.
        field: Name of the field to read.
    """
    if len(table) == 0:
        raise ValueError("There is no record in the table.")
    return grain.MapDataset.source(_Records(table, field))


def parquet(paths: Paths, *, field: str = "text") -> grain.MapDataset[Document]:
    """Reads documents from the column `field` of Parquet files, as `records` does; beside messages also the columns
    `tools`, `documents` and `chat_template_kwargs`. Needs pyarrow (the extra `parquet`).

    Random access reads a whole row group for one document; the last few groups are cached. To shuffle a large corpus,
    tokenize it first (`write_tokens`).

    Args:
        paths: Files, folders or glob patterns.
        field: Name of the column.
    """
    return grain.MapDataset.source(_Parquet(find_files(paths), field))


def files(paths: Paths, *, field: str = "text", document: Piece = "file") -> grain.MapDataset[Document]:
    """Reads documents from files and folders of any format, chosen by file extension.

    `.jsonl`, `.parquet` and `.array_record` (records of JSON) have the documents in `field`; other files are text, and
    a document is a "file", a "line" or a "paragraph" (see `text_files`).
    """
    by_ending: dict[str, list[File]] = {}
    for path in find_files(paths):
        ending = path.suffix.lower() if path.suffix.lower() in _FORMATS else ""
        by_ending.setdefault(ending, []).append(path)
    sources = []
    for ending, group in by_ending.items():
        read = _FORMATS.get(ending)
        sources.append(text_files(group, document=document) if read is None else read(group, field=field))
    return sources[0] if len(sources) == 1 else grain.MapDataset.concatenate(sources)


class HFStream(Stream):
    """Documents from a Hugging Face `IterableDataset`, read as a stream. Needs the extra `hf`.

        source = HFStream(datasets.load_dataset("name", split="train", streaming=True), field="text")
        tokens = tokenize(source, tokenizer)
        Loader(lambda part: pack(tokens[part], length=512), batch_size=8)

    A loader's shards divide the stream's files if their number allows it; otherwise each shard reads the whole stream
    and keeps every n-th record. `epochs=None` repeats forever. Resuming is exact, unless the stream has a shuffle
    buffer, whose contents datasets does not save.
    """

    def __init__(self, dataset: Any, *, field: str = "text", epochs: int | None = 1):
        self._dataset, self._field, self._epochs = dataset, field, epochs

    def open(self, part: slice) -> grain.IterDataset[Document]:
        return FromIterators(partial(_StreamIterator, self._dataset, self._field, self._epochs, part))


class _StreamIterator(grain.DatasetIterator):
    def __init__(self, dataset: Any, field: str, epochs: int | None, part: slice):
        super().__init__()
        first, every = part.start or 0, part.step or 1
        divides = dataset.num_shards % every == 0
        with _copying:
            self._dataset = dataset.shard(num_shards=every if divides else 1, index=first if divides else 0)
        self._first, self._every = 0 if divides else first, 1 if divides else every
        self._field, self._epochs = field, epochs
        self._begin(epoch=0)

    def __next__(self) -> Document:
        while self._epochs is None or self._epoch < self._epochs:
            for record in self._reading:
                self._count += 1
                if (self._count - 1) % self._every == self._first:
                    at = f"record {self._count - 1} of epoch {self._epoch}"
                    return _as_fields(without_nulls(record), self._field, at)
            ends = self._epochs is not None and self._epoch + 1 >= self._epochs
            check_epoch(self._count, slice(self._first, None, self._every), ends, "The stream")
            self._begin(self._epoch + 1)
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "count": self._count, "dataset": copy.deepcopy(self._dataset.state_dict())}

    def set_state(self, state: dict[str, Any]) -> None:
        self._begin(state["epoch"])
        self._dataset.load_state_dict(copy.deepcopy(state["dataset"]))
        self._reading, self._count = iter(self._dataset), state["count"]

    def _begin(self, epoch: int) -> None:
        self._epoch, self._count = epoch, 0
        self._dataset.set_epoch(epoch)
        self._reading: Iterator[Mapping[str, Any]] = iter(self._dataset)


_copying = threading.Lock()  # two threads must not copy a dataset at the same time


class _Records:
    def __init__(self, table: Table, field: str):
        self._table, self._field = table, field

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: Any) -> Document:
        record = self._table[int(index)]
        record = without_nulls(record) if is_hf_dataset(self._table) else record
        return _as_fields(record, self._field, f"record {index}")


_BESIDE_MESSAGES = ("tools", "documents", "chat_template_kwargs")  # variables of chat templates
# Where nothing is learned, in tokenized data of other libraries.
_LABELS = {"labels", "completion_mask", "assistant_masks", "assistant_mask", "loss_mask", "prompt_mask"}


class _Parquet:
    """Rows by index; caches the last row groups."""

    def __init__(self, paths: list[File], field: str, keep: int = 8):
        self._paths, self._field, self._keep = paths, field, keep
        self._files = [_parquet_file(path) for path in paths]
        for path, file in zip(paths, self._files, strict=True):
            names = file.schema_arrow.names
            if field not in names:
                raise ValueError(f"{path}: there is no column {field!r}, only {names}: name the right field=.")
            if _has_ids(file.schema_arrow.field(field).type):
                _check_all_learned(names, path)
        self._groups = [(f, g) for f, file in enumerate(self._files) for g in range(file.metadata.num_row_groups)]
        rows = (self._files[f].metadata.row_group(g).num_rows for f, g in self._groups)
        self._begins = [0, *accumulate(rows)]
        if negative := [paths[f] for f, g in self._groups if self._files[f].metadata.row_group(g).num_rows < 0]:
            raise ValueError(
                f"{negative[0]}: this is a damaged Parquet file: it says that it has fewer rows than none."
            )
        if not self._begins[-1]:
            raise ValueError(f"There is no row in {', '.join(map(str, paths))}.")
        self._cache: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: Any) -> Document:
        group = bisect.bisect_right(self._begins, index) - 1
        row = int(index) - self._begins[group]
        file, number = self._groups[group]
        at = f"{self._paths[file]}: row group {number}, row {row}"
        with _naming(at):
            record = {name: column[row].as_py() for name, column in self._columns(group).items()}
        return _as_fields(without_nulls(record), self._field, at)

    def _columns(self, group: int) -> dict[str, Any]:
        """Returns the columns of a row group: the field, and what belongs to messages."""
        with self._lock:  # only one thread at a time may read a pyarrow file
            if group not in self._cache:
                file, number = self._groups[group]
                names = {self._field, *_BESIDE_MESSAGES}.intersection(self._files[file].schema_arrow.names)
                table = self._files[file].read_row_group(number, columns=sorted(names))
                self._cache[group] = {name: table.column(name) for name in names}
            self._cache.move_to_end(group)
            while len(self._cache) > self._keep:
                self._cache.popitem(last=False)
            return self._cache[group]


def _has_ids(kind: Any) -> bool:
    """Returns True for the type of a column of lists of integers."""
    from pyarrow import types

    return (types.is_list(kind) or types.is_large_list(kind)) and types.is_integer(kind.value_type)


def _parquet_file(path: File) -> Any:
    try:
        from pyarrow import parquet as pq
    except ImportError as error:
        raise ImportError('Parquet files need pyarrow: pip install "maxlib[parquet]"') from error
    with _naming(path):
        file = pq.ParquetFile(
            path.open() if isinstance(path, RemoteFile) else path, page_checksum_verification=True
        )  # few writers write checksums
        _ = file.schema_arrow, file.metadata.num_row_groups  # both are read lazily
        return file


@contextmanager
def _naming(where: Any) -> Iterator[None]:
    """Turns pyarrow's errors for damaged files into a ValueError that names the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, UnicodeDecodeError, IndexError, OSError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the disk
            raise
        raise ValueError(f"{where}: this is no Parquet file, or a damaged one: {error}") from error


def _check_all_learned(names: Iterable[str], at: Any) -> None:
    """Raises ValueError for other libraries' labels and masks beside tokens, which are not read."""
    if unread := sorted(_LABELS.intersection(names)):
        raise ValueError(
            f"{at}: beside the tokens there are {', '.join(unread)}, which are not read, so every token would be learned: "
            "make documents with 'tokens' and 'targets', the token after each or -1, by "
            "grain.MapDataset.source(table).map(...), or remove these columns"
        )


def _as_fields(record: Any, field: str, at: str) -> Document:
    """Makes a document from the value of a record's field."""
    value = record.get(field) if isinstance(record, Mapping) else None
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{at}: {field!r} must be UTF-8 ({error}).") from error
    if isinstance(value, str) and value.strip():
        return {"text": value}
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        rest = {name: x for name, x in record.items() if name != field}
        return with_content(rest, "messages", value) | {"record": at}
    if isinstance(value, Sized) and not isinstance(value, str | Mapping) and len(value):
        _check_all_learned(record, at)
        return {"tokens": token_ids(value, f"{at}: the field {field!r}, which holds neither text nor messages,")}
    fields = sorted(record) if isinstance(record, Mapping) else type(record).__name__
    raise ValueError(
        f"{at}: the field {field!r} must hold text, integers or messages, and not be empty, got {value!r}; the record "
        f"has {fields}."
    )


_FORMATS: dict[str, Callable[..., grain.MapDataset]] = {
    ".jsonl": jsonl,
    ".parquet": parquet,
    ".array_record": array_record,
}
