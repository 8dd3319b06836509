"""Sources of documents: random-access grain datasets of `{"text": str}` or `{"tokens": int array}`."""

import ast
import hashlib
import json
import sysconfig
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import grain
import numpy as np

from maxlib._utils.files import without_duplicates
from maxlib.data._documents import Document, is_messages, token_ids, with_content
from maxlib.data._storage import File, Paths, find_files, local_copy, read_range

Piece = Literal["file", "line", "paragraph"]

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def text_files(paths: Paths, *, document: Piece = "file") -> grain.MapDataset[Document]:
    """Reads documents `{"text": str}` from UTF-8 files.

    Every file is read once at construction, so that a bad byte is found at the start of a run; only offsets stay in
    memory.

    Args:
        paths: Files, folders (all files below them in sorted order, without hidden ones) or glob patterns.
        document: Unit of a document: the "file", each "line", or each "paragraph" between blank lines. Blank lines are
            never documents.

    Raises:
        FileNotFoundError: when a path or pattern matches no file.
        ValueError: when a file is empty or not UTF-8; the message names the file and the byte.
    """
    if document not in _PIECES:
        raise ValueError(f"document must be one of {sorted(_PIECES)}, got {document!r}.")
    return grain.MapDataset.source(_Spans(find_files(paths), _PIECES[document], _as_text))


def jsonl(paths: Paths, *, field: str = "text") -> grain.MapDataset[Document]:
    """Reads one document per line: the JSON object of the line, with the value of `field` also stored as `"text"`.

    Paths and errors are as in `text_files`; a line that is not a JSON object or has no text in `field` raises an error
    that names the file and the byte.
    """
    return grain.MapDataset.source(_Spans(find_files(paths), _lines, partial(_as_record, field=field)))


def chats(paths: Paths, *, field: str = "messages") -> grain.MapDataset[Document]:
    """Reads one chat per line of jsonl files: the line's object, with the list of messages in `field` also stored as
    `"messages"`.

    Each message is an object with `role` and `content`. `"record"` is the chat's origin, and `"folder"` the folder of
    its images. Paths and errors are as in `jsonl`.
    """
    return grain.MapDataset.source(_Spans(find_files(paths), _lines, partial(_as_chat, field=field)))


def array_record(paths: Paths, *, field: str | None = None) -> grain.MapDataset[Document]:
    """Reads documents from ArrayRecord files, the format for corpora too large to be scanned at every start.

    A record is UTF-8 text, or with `field` a JSON object. Only the index is read at construction: a bad record raises
    an error when it is reached, with its file and index.
    """
    decode = _as_text if field is None else partial(_as_record, field=field)
    return grain.MapDataset.concatenate([_array_record_file(path, decode) for path in find_files(paths)])


def in_memory(documents: Sequence[Any]) -> grain.MapDataset[Document]:
    """Makes documents from a sequence of strings, or of one-dimensional integer arrays (or lists) of tokens."""
    if isinstance(documents, str | bytes):
        raise ValueError("in_memory takes a sequence of documents, got one string: put it in a list.")
    if len(documents) == 0:
        raise ValueError("in_memory needs at least one document, got none.")
    return grain.MapDataset.source([_as_document(i, document) for i, document in enumerate(documents)])


def split(
    documents: grain.MapDataset[Document], *, validation: float
) -> tuple[grain.MapDataset[Document], grain.MapDataset[Document]]:
    """Splits documents into training and validation documents by a hash of each document's content.

    The side of a document only depends on its content and on `validation`, not on order, files, seeds or other
    documents. Equal documents are always on the same side. Documents are filtered while reading.

    Args:
        documents: The documents.
        validation: Expected fraction of documents to hold out.

    Raises:
        ValueError: when `validation` is not between 0 and 1, or a side has no document.
    """
    if not 0 < validation < 1:
        raise ValueError(f"validation must be a fraction between 0 and 1, got {validation}.")
    held_out = documents.filter(partial(_is_held_out, fraction=validation))
    training = documents.filter(partial(_is_training, fraction=validation))
    for name, side in (("training", training), ("validation", held_out)):
        if all(side[i] is None for i in range(len(side))):
            raise ValueError(
                f"validation={validation} of {len(documents)} documents leaves no {name} document: "
                "change the fraction, or split the text into more documents (files and text_files have "
                "document='paragraph')."
            )
    return training, held_out


def python_docs() -> grain.MapDataset[Document]:
    """Reads about 2.2 million characters of English: Python's help topics and the docstrings of its standard library.

    One document per topic and one per module, always in the same order, for experiments without a corpus or a network.
    The text differs between Python versions.
    """
    return in_memory(_python_docs())


@cache
def _python_docs() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    modules = (path for path in root.rglob("*.py") if left_out.isdisjoint(path.relative_to(root).parts))
    texts = ["\n\n".join(_docstrings(ast.parse(path.read_bytes()))) for path in sorted(modules)]
    return tuple(text for text in [*(topics[name] for name in sorted(topics)), *texts] if text.strip())


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Yields docstrings in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
        for child in ast.iter_child_nodes(node):
            yield from _docstrings(child)


class _Spans:
    """A grain source of documents at byte spans of files."""

    def __init__(self, files: list[File], pieces: Callable[[File], Iterator[tuple[int, bytes]]], decode: Callable):
        self._files, self._decode = files, decode
        spans = array("q")
        for number, path in enumerate(files):
            before = len(spans)
            for start, data in pieces(path):
                decode(data, path=path, start=start)
                spans.extend((number, start, len(data)))
            if len(spans) == before:
                raise ValueError(
                    f"{path}: byte 0: there is no text in this file. Remove it or exclude it from the paths."
                )
        self._spans = np.frombuffer(spans, np.int64).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index) -> Document:
        number, start, size = self._spans[index].tolist()
        file = self._files[number]
        return self._decode(read_range(file, start, start + size), path=file, start=start)

    def __repr__(self) -> str:
        return f"{len(self)} documents in {len(self._files)} files"


def _raw_lines(path: File) -> Iterator[tuple[int, bytes]]:
    """Yields (first byte, bytes including the line ending) of every line that is not blank."""
    start = 0
    with path.open("rb") as file:
        for line in file:
            mark = _mark(line) if start == 0 else 0
            if line[mark:].strip():
                yield start + mark, line[mark:]
            start += len(line)


def _lines(path: File) -> Iterator[tuple[int, bytes]]:
    return ((start, line.rstrip(b"\r\n")) for start, line in _raw_lines(path))


def _paragraphs(path: File) -> Iterator[tuple[int, bytes]]:
    """Yields (first byte, bytes) of every run of lines between blank ones."""
    begin, end, block = 0, 0, []
    for start, line in _raw_lines(path):
        if block and start > end:
            yield begin, b"".join(block).rstrip(b"\r\n")
            block = []
        begin, end = begin if block else start, start + len(line)
        block.append(line)
    if block:
        yield begin, b"".join(block).rstrip(b"\r\n")


def _files(path: File) -> Iterator[tuple[int, bytes]]:
    data = path.read_bytes()
    mark = _mark(data)
    if data[mark:].strip():
        yield mark, data[mark:]


def _mark(data: bytes) -> int:
    """Counts the bytes of a byte order mark to skip."""
    return len(_BYTE_ORDER_MARK) if data.startswith(_BYTE_ORDER_MARK) else 0


_PIECES = {"file": _files, "line": _lines, "paragraph": _paragraphs}


_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")  # gzip, bzip2, xz, Zstandard


def _as_text(data: bytes, *, path: Any, start: int) -> Document:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if start == 0 and data.startswith(_COMPRESSED):
            raise ValueError(f"{path}: byte {start}: this file is compressed: unpack it first.") from error
        at = start + error.start
        bad = f"0x{data[error.start]:02x} ({error.reason})"
        raise ValueError(f"{path}: byte {at}: text must be UTF-8, got {bad}. Convert the file to UTF-8.") from error
    if not text.strip():
        raise ValueError(f"{path}: byte {start}: the document is empty. Remove it.")
    return {"text": text}


def _as_record(data: bytes, *, path: Any, start: int, field: str) -> Document:
    record = _as_object(data, path=path, start=start)
    value = record.get(field)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(
            f"{path}: byte {start}: the field {field!r} must hold text, got {value!r}; fields here: {sorted(record)}. "
            "Name the right field=, or remove the line."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON may have half of a surrogate pair, "\\ud800"
        raise ValueError(f"{path}: byte {start}: the field {field!r} must be valid Unicode: {error}.") from error
    return with_content(record, "text", value)


def _as_chat(data: bytes, *, path: Any, start: int, field: str) -> Document:
    record = _as_object(data, path=path, start=start)
    value = record.get(field)
    if not is_messages(value):
        raise ValueError(
            f"{path}: byte {start}: the field {field!r} must hold messages, a list of objects with 'role', got {value!r}; "
            f"fields here: {sorted(record)}. Name the right field=, or remove the line."
        )
    origin = {"record": f"{path}: byte {start}", "folder": str(path.parent)}
    return with_content(record, "messages", value) | origin


def _as_object(data: bytes, *, path: Any, start: int) -> dict[str, Any]:
    text = _as_text(data, path=path, start=start)["text"]
    try:
        record = json.loads(text, object_pairs_hook=without_duplicates)
    except json.JSONDecodeError as error:
        at = start + len(text[: error.pos].encode())
        raise ValueError(f"{path}: byte {at}: each line must be one JSON object: {error.msg}.") from error
    except (RecursionError, ValueError) as error:  # nested too deeply, too many digits, or a name given twice
        raise ValueError(f"{path}: byte {start}: each line must be one JSON object: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path}: byte {start}: each line must be a JSON object, got a {type(record).__name__}.")
    return record


class ArrayRecords(grain.sources.ArrayRecordDataSource):
    """Source of the records of ArrayRecord files. Raises ValueError that names the file for damaged ones."""

    def __init__(self, paths: Sequence[File]):
        self._where = str(paths[0]) if len(paths) == 1 else f"{paths[0]} or a file after it"
        try:
            super().__init__([str(local_copy(path)) for path in paths])
        except (RuntimeError, ValueError) as error:
            raise self._damaged("", error) from error

    def __getitem__(self, record_key: Any) -> bytes:
        try:
            return super().__getitem__(record_key)
        except RuntimeError as error:
            raise self._damaged(f": record {record_key}", error) from error

    def __getitems__(self, record_keys: Sequence[int]) -> Sequence[Any]:
        try:
            return super().__getitems__(record_keys)  # pyright: ignore[reportAttributeAccessIssue]
        except RuntimeError as error:
            raise self._damaged(f": one of the records {list(record_keys)[:20]}", error) from error

    def _damaged(self, at: str, error: Exception) -> ValueError:
        return ValueError(
            f"{self._where}{at}: this is no ArrayRecord file, or a damaged one ({error}). Write it again."
        )


def _array_record_file(path: File, decode: Callable) -> grain.MapDataset[Document]:
    source: Any = ArrayRecords([path])
    if len(source) == 0:
        raise ValueError(f"{path}: byte 0: there is no record in this file. Remove it or exclude it from the paths.")
    return grain.MapDataset.source(source).map_with_index(
        partial(_decode_record, path=path, decode=decode, count=len(source))
    )


def _decode_record(index: int, data: bytes, *, path: File, decode: Callable, count: int) -> Document:
    return decode(data, path=f"{path}: record {index % count}", start=0)


def _as_document(index: int, document: Any) -> Document:
    if isinstance(document, str):
        if not document.strip():
            raise ValueError(f"Document {index} is empty: remove it.")
        return {"text": document}
    tokens = token_ids(document, f"Document {index}, if it is not text,")
    if not tokens.size:
        raise ValueError(f"Document {index} is empty: remove it.")
    return {"tokens": tokens}


def _hash(document: Document) -> float:
    """Returns a number in [0, 1) that only depends on the document's text (or messages, or tokens)."""
    if "text" in document:
        data = document["text"].encode()
    elif "messages" in document:
        data = json.dumps(document["messages"], sort_keys=True).encode()
    else:
        data = np.asarray(document["tokens"], "<i4").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest()) / 2**56


def _is_held_out(document: Document, *, fraction: float) -> bool:
    return _hash(document) < fraction


def _is_training(document: Document, *, fraction: float) -> bool:
    return _hash(document) >= fraction
