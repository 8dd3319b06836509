"""Files of tokens: arrays of integers that are memory-mapped, or read by ranges from an object store."""

import bisect
import functools
import io
from itertools import accumulate
from typing import Any, Literal

import grain
import numpy as np
from jaxtyping import Int32

from maxlib.data._documents import Document, token_ids
from maxlib.data._storage import File, Paths, find_files, is_remote, read_range, size_of

TokenType = Literal["uint8", "uint16", "uint32", "uint64", "int32", "int64"]
_NPY = b"\x93NUMPY"
_SCANNED = 1 << 24  # tokens at a time


class TokenFile:
    """The tokens of a file by ranges.

    Args:
        file: The file.
        dtype: Their type.
        offset: Bytes before the first one.

    Raises:
        ValueError: when the file's size is no number of tokens.
    """

    def __init__(self, file: File, dtype: np.dtype, offset: int = 0):
        self._file, self.dtype, self._offset = file, dtype, offset
        size = size_of(file) - offset
        if size < 0 or size % dtype.itemsize:
            raise ValueError(f"{file}: {size} bytes are no array of {dtype}: name the dtype it was written with.")
        self._length = size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_mapped"}

    def read(self, start: int, stop: int) -> Int32[np.ndarray, " n"]:
        """Reads tokens `start` to `stop`."""
        return token_ids(self.raw(start, stop), f"{self._file}: from token {start}, the file")

    def raw(self, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop` in the file's type."""
        if not is_remote(self._file):
            return self._mapped[start:stop]
        width = self.dtype.itemsize
        data = read_range(self._file, self._offset + start * width, self._offset + stop * width)
        return np.frombuffer(data, self.dtype)

    @functools.cached_property
    def _mapped(self) -> np.ndarray:
        if not self._length:
            return np.zeros(0, self.dtype)
        return np.memmap(str(self._file), self.dtype, "r", self._offset, (self._length,))


def numpy_tokens(
    paths: Paths, *, dtype: TokenType | None = None, length: int | None = None, eos_id: int | None = None
) -> grain.MapDataset[Document]:
    """Reads documents from arrays of tokens, such as those of OLMo and Dolma.

    Files are memory-mapped; those in a bucket are read a range per document. OLMo's `.npy` files are arrays without a
    header, so `dtype` must be the one that its configuration names.

        samples = numpy_tokens("tokens/*.npy", dtype="uint32", length=4096)  # as OLMo's NumpyFSLDataset
        documents = numpy_tokens("tokens/*.npy", dtype="uint32", eos_id=100257)

    Args:
        paths: Files, folders or glob patterns.
        dtype: Type of the tokens; None only for files that `numpy.save` wrote, which name it.
        length: Tokens of a document; what remains at the end of a file is left out, as OLMo does. `pack` with the same
            length makes a row of each.
        eos_id: Token that ends each document, instead of `length`. The files are scanned for it at construction. What
            follows the last one in a file is a document too.

    Raises:
        ValueError: when a file is no array of that type, or has no document.
    """
    if (length is None) == (eos_id is None):
        raise ValueError(f"numpy_tokens needs either length= or eos_id=, got length={length} and eos_id={eos_id}.")
    if length is not None and length < 1:
        raise ValueError(f"length must be at least 1, got {length}.")
    files = find_files(paths)
    opened = [_open(file, None if dtype is None else np.dtype(dtype)) for file in files]
    ends = [_ends(tokens, length, eos_id) for tokens in opened]
    if empty := [str(file) for file, end in zip(files, ends, strict=True) if not len(end)]:
        raise ValueError(f"{empty[0]}: there is no document in this file: remove it, or check dtype and length.")
    return grain.MapDataset.source(_Documents(opened, ends))


class _Documents:
    """A grain source of the documents of token files that end at `ends`."""

    def __init__(self, files: list[TokenFile], ends: list[Any]):
        self._files, self._ends = files, ends
        self._begins = [0, *accumulate(map(len, ends))]

    def __len__(self) -> int:
        return self._begins[-1]

    def __getitem__(self, index: Any) -> Document:
        number = bisect.bisect_right(self._begins, int(index)) - 1
        ends, i = self._ends[number], int(index) - self._begins[number]
        return {"tokens": self._files[number].read(int(ends[i - 1]) if i else 0, int(ends[i]))}


def _open(file: File, dtype: np.dtype | None) -> TokenFile:
    start = read_range(file, 0, min(1 << 12, size_of(file)))
    if not start.startswith(_NPY):
        if dtype is None:
            raise ValueError(f"{file} has no header of numpy.save: name the dtype of its tokens, such as 'uint16'.")
        return TokenFile(file, dtype)
    header = io.BytesIO(start)
    version = np.lib.format.read_magic(header)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, stored = read(header)
    if len(shape) != 1 or stored.kind not in "iu" or dtype not in (None, stored):
        wanted = "integers" if dtype is None else dtype
        raise ValueError(f"{file} must be a one-dimensional array of {wanted}, got {stored} of shape {shape}.")
    return TokenFile(file, stored, header.tell())


def _ends(tokens: TokenFile, length: int | None, eos_id: int | None) -> Any:
    """Returns where the documents of a file end."""
    if length is not None:
        return range(length, len(tokens) + 1, length)
    if eos_id is not None and not 0 <= eos_id <= np.iinfo(tokens.dtype).max:
        raise ValueError(f"{tokens.dtype} holds no eos_id={eos_id}: name the tokenizer's id, and the files' dtype")
    starts = range(0, len(tokens), _SCANNED)
    pieces = [i + 1 + np.flatnonzero(tokens.raw(i, min(i + _SCANNED, len(tokens))) == eos_id) for i in starts]
    ends = np.concatenate([np.zeros(1, np.int64), *pieces])[1:]
    is_open = len(tokens) and not (len(ends) and ends[-1] == len(tokens))
    return np.append(ends, len(tokens)) if is_open else ends
