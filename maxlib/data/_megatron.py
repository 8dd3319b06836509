"""Megatron's `.bin` and `.idx` files, and the order in which Megatron's `GPTDataset` and `BlendedDataset` read them."""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import grain
import numpy as np

from maxlib.data._documents import Document, Row
from maxlib.data._storage import as_file, read_range, size_of
from maxlib.data._token_files import TokenFile
from maxlib.data._tokenize import end_ids

_HEADER = b"MMIDIDX\x00\x00"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_PARTS = ("train", "valid", "test")
_SURPLUS = 0.005  # samples that Megatron adds to each source of a blend


def megatron_documents(prefix: str) -> grain.MapDataset[Document]:
    """Reads the documents of a pair `prefix.bin` and `prefix.idx`, in the order of the files.

    Each sequence of the index is a document, as `GPTDataset` takes them. Files may be in a bucket.

    Raises:
        ValueError: when the files are no such pair, or are damaged.
    """
    return grain.MapDataset.source(_Pair(prefix))


def megatron_samples(
    prefixes: str | Sequence[str] | Mapping[str, float],
    *,
    length: int,
    num_samples: int | None = None,
    seed: int = 1234,
    split: Sequence[float] = (1,),
    part: Literal["train", "valid", "test"] = "train",
    eod_id: int | None = None,
) -> grain.MapDataset[Row]:
    """Reads rows `tokens targets` from Megatron's files: the same samples in the same order as Megatron reads them.

    The documents of all epochs are shuffled and concatenated, cut into samples of `length`, and the samples are
    shuffled. If less than 80 % of the last epoch is read, it is shuffled apart. Sample `i` is that of `GPTDataset`, or
    of `BlendedDataset` for several prefixes, of megatron-core 0.16.

        samples = megatron_samples("corpus_text_document", length=4096, num_samples=1000 * 256)
        loader = Loader(lambda part: samples[part], batch_size=256)

    Each batch of the loader has Megatron's samples; with `num_shards=1` its rows are in the same order too.

    Args:
        prefixes: The path before `.bin` and `.idx`; several with weights; or several in a list, each read once, with
            weights by their numbers of samples.
        length: Tokens of a row.
        num_samples: Samples to read in all, the number of steps times the batch size. It determines the number of
            epochs, and with it the order. None reads one epoch.
        seed: Megatron's `--seed`.
        split: Shares of training, validation and test documents, as in `--split 969,30,1`.
        part: The part of the split to read.
        eod_id: Token that ends documents. If given, rows also have `segment_ids` and `positions` that keep documents
            apart, and nothing is learned from this token: `--reset-attention-mask --reset-position-ids
            --eod-mask-loss`. By default a row is one text.

    Raises:
        ValueError: when the files are no such pairs, a part has no document, or a weight is not positive.
    """
    if length < 1 or (num_samples is not None and num_samples < 1):
        raise ValueError(f"length and num_samples must be at least 1, got {length} and {num_samples}.")
    if part not in _PARTS or not 1 <= len(split) <= 3 or min(split) < 0 or not sum(split) > 0:
        raise ValueError(f"split must have up to three shares and part be one of {_PARTS}, got {split} and {part!r}.")
    end_ids(None, eod_id)  # raises for what is no token id
    shares = np.pad(np.array(split, np.float64), (0, 3 - len(split)))
    bounds = np.concatenate([[0.0], np.cumsum(shares / shares.sum())])[_PARTS.index(part) :][:2]

    def samples(prefix: str, count: int | None) -> _Samples:
        return _Samples(_Pair(prefix), bounds, length, count, seed)

    if isinstance(prefixes, str):
        source = samples(prefixes, num_samples)
    else:
        source = _blend(prefixes, num_samples, samples)
    rows = grain.MapDataset.source(source)
    return rows.map(_as_row) if eod_id is None else rows.map(lambda text: _apart(_as_row(text), eod_id))


class _Pair:
    """A grain source of the sequences of `prefix.bin` and `prefix.idx`."""

    def __init__(self, prefix: str):
        index, data = as_file(f"{prefix}.idx"), as_file(f"{prefix}.bin")
        size = size_of(index)
        header = read_range(index, 0, 34)
        version, code = int.from_bytes(header[9:17], "little"), header[17] if len(header) > 17 else 0
        if not header.startswith(_HEADER) or version != 1 or code not in _TYPES or len(header) < 34:
            raise ValueError(f"{index}: this is no index of version 1 of Megatron's tokens: {header!r}.")
        count, _ = np.frombuffer(header, "<u8", 2, 18).tolist()
        body = read_range(index, 34, min(size, 34 + 12 * count))
        if len(body) != 12 * count:
            raise ValueError(f"{index}: the file ends within its {count} sequences: it was damaged.")
        dtype = np.dtype(_TYPES[code])
        self.lengths = np.frombuffer(body, "<i4", count)
        self._starts = np.frombuffer(body, "<i8", count, 4 * count) // dtype.itemsize
        self._tokens = TokenFile(data, dtype)
        least = min(self.lengths.min(initial=0), self._starts.min(initial=0))
        if least < 0 or (self._starts + self.lengths).max(initial=0) > len(self._tokens):
            raise ValueError(f"{index} names tokens that {data} does not have: one of them was damaged.")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Document:
        return {"tokens": self.read(int(index), 0, int(self.lengths[index]))}

    def read(self, sequence: int, start: int, stop: int) -> np.ndarray:
        """Reads tokens `start` to `stop` of a sequence."""
        first = int(self._starts[sequence])
        return self._tokens.read(first + start, first + stop)


class _Samples:
    """Samples of `length + 1` tokens in the order of `GPTDataset`.

    The documents of all epochs make one text. Before the samples are shuffled, sample k has its tokens `k * length` to
    `(k + 1) * length`, and the one after.
    """

    def __init__(self, pair: _Pair, bounds: np.ndarray, length: int, num_samples: int | None, seed: int):
        self._pair, self._length = pair, length
        begin, end = (round(bound * float(len(pair))) for bound in bounds.tolist())
        documents = np.arange(begin, end, dtype=np.int32)
        per_epoch = int(pair.lengths[documents].sum(dtype=np.int64))
        if per_epoch <= length:
            raise ValueError(
                f"The documents {begin} to {end} have {per_epoch} tokens, too few for a sample of {length} and the "
                "token after it: change split= or length=."
            )
        wanted = 0 if num_samples is None else num_samples * length + 1
        epochs = max(1, -(-wanted // per_epoch))
        total, before_last = (epochs * per_epoch - 1) // length, ((epochs - 1) * per_epoch - 1) // length
        last = 0 if num_samples is None else num_samples - before_last
        is_apart = epochs > 1 and last < int(0.8 * ((per_epoch - 1) // length))
        state = np.random.RandomState(seed)
        together = [epochs - 1, 1] if is_apart else [epochs]
        self._documents = np.concatenate([_shuffled(np.tile(documents, n), state) for n in together])
        self._ends = np.cumsum(pair.lengths[self._documents], dtype=np.int64)
        cuts = [0, before_last, total] if is_apart else [0, total]
        kind = np.uint32 if total < np.iinfo(np.uint32).max - 1 else np.int64
        spans = [np.arange(a, b, dtype=kind) for a, b in itertools.pairwise(cuts)]
        self._order = np.concatenate([_shuffled(span, state) for span in spans])

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: Any) -> np.ndarray:
        at = int(self._order[index]) * self._length
        stop, pieces = at + self._length + 1, []
        i = int(np.searchsorted(self._ends, at, side="right"))
        while at < stop:
            document, end = int(self._documents[i]), int(self._ends[i])
            begin = end - int(self._pair.lengths[document])
            pieces.append(self._pair.read(document, at - begin, min(stop, end) - begin))
            at, i = min(stop, end), i + 1
        return np.concatenate(pieces)


class _Blend:
    """Samples of several sources: number `samples[i]` of source `sources[i]`."""

    def __init__(self, parts: list[_Samples], sources: np.ndarray, samples: np.ndarray):
        self._parts, self._sources, self._samples = parts, sources, samples

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, index: Any) -> np.ndarray:
        return self._parts[self._sources[index]][self._samples[index]]


def _blend(prefixes: Sequence[str] | Mapping[str, float], num_samples: int | None, samples: Any) -> _Blend:
    if not prefixes:
        raise ValueError("megatron_samples needs at least one prefix, got none.")
    if isinstance(prefixes, Mapping):
        weights = np.array(list(prefixes.values()), np.float64)
        if num_samples is None or not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError(f"Prefixes with weights need positive ones and num_samples=, got {dict(prefixes)}.")
        weights = weights / weights.sum()
        counts = [math.ceil(num_samples * weight) for weight in weights.tolist()]
        parts = [samples(prefix, math.ceil(n * (1 + _SURPLUS))) for prefix, n in zip(prefixes, counts, strict=True)]
        size = sum(counts)
    else:
        parts = [samples(prefix, None) for prefix in prefixes]
        weights = np.array([len(part) for part in parts], np.float64)
        size = sum(map(len, parts)) if num_samples is None else min(num_samples, sum(map(len, parts)))
    sources, numbers = _blended(weights / weights.sum(), [len(part) for part in parts], size)
    return _Blend(parts, sources, numbers)


def _blended(weights: np.ndarray, lengths: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source and the number of each sample: always of the source that is furthest behind its share."""
    sources, numbers = np.zeros(size, np.int16), np.zeros(size, np.int64)
    taken, left = np.zeros(len(weights)), np.array(lengths)
    for i in range(size):
        behind = np.where(taken < left, weights * max(i, 1) - taken, -np.inf)
        source = int(np.argmax(behind))
        sources[i], numbers[i] = source, taken[source]
        taken[source] += 1
    return sources, numbers


def _shuffled(array: np.ndarray, state: Any) -> np.ndarray:
    state.shuffle(array)
    return array


def _as_row(text: np.ndarray) -> Row:
    return {"tokens": text[:-1], "targets": text[1:]}


def _apart(row: Row, eod_id: int) -> Row:
    """Keeps the documents of a row apart; the token that ends a document belongs to it."""
    is_end = row["tokens"] == eod_id
    begins = np.pad(is_end[:-1], (1, 0))  # a document begins after the end of the one before
    index = np.arange(len(is_end), dtype=np.int32)
    return {
        "tokens": row["tokens"],
        "targets": np.where(is_end, np.int32(-1), row["targets"]),
        "segment_ids": 1 + np.cumsum(begins, dtype=np.int32),
        "positions": index - np.maximum.accumulate(np.where(begins, index, 0)),
    }
