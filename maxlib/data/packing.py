"""Documents of any length to rows of one length."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import grain
import numpy as np
from grain.experimental import (
    ConcatThenSplitIterDataset,
    DatasetOptions,
    FirstFitPackIterDataset,
    FlatMapIterDataset,
    FlatMapTransform,
    WithOptionsIterDataset,
)
from jaxtyping import Int32

from maxlib.data.sources import Document

Row = dict[str, np.ndarray]


def pack(
    documents: grain.MapDataset[Document] | grain.IterDataset[Document],
    *,
    length: int,
    strategy: Literal["first_fit", "concat_then_split"] = "first_fit",
    bins: int = 64,
) -> grain.IterDataset[Row]:
    """Packs documents with `"tokens"` into rows of int32 arrays `tokens targets segment_ids positions`, each `length` long.

    `targets` is the next token of the same document and -1 where there is none: at a document's last token and on
    padding. Documents are never dropped: one longer than a row goes on in another row, and the target at the cut is the
    next row's first token, so every token but a document's first is predicted exactly once. `segment_ids` number the
    pieces of a row from 1, 0 is padding; `positions` count from 0 in each piece.

    `first_fit` cuts only documents longer than a row and fills `bins` rows at a time (more bins, less padding, a longer
    restore); `concat_then_split` has padding in the last row only and cuts a document at the end of every row.
    A document may bring its own `"targets"`, for example with -1 where nothing is to be learned.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, one token and its target, got {length}.")
    if strategy not in ("first_fit", "concat_then_split"):
        raise ValueError(f"strategy must be 'first_fit' or 'concat_then_split', got {strategy!r}.")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}.")
    lengths = {"tokens": length, "targets": length}
    pieces = _in_order(documents).map(_with_targets)
    if strategy == "concat_then_split":
        return ConcatThenSplitIterDataset(pieces, length_struct=lengths).map(_as_row)
    pieces = FlatMapIterDataset(pieces, _Cut(length))
    return FirstFitPackIterDataset(pieces, length_struct=lengths, num_packing_bins=bins).map(_as_row)


@dataclasses.dataclass(frozen=True)
class Statistics:
    """What rows hold. `a + b` adds up."""

    rows: int = 0
    slots: int = 0
    tokens: int = 0
    targets: int = 0
    pieces: int = 0
    documents: int = 0

    @property
    def padding(self) -> float:
        """The fraction of slots without a token."""
        return 1 - self.tokens / self.slots if self.slots else 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def statistics(batch: Mapping[str, Int32[np.ndarray, "B T"]]) -> Statistics:
    """Counts what a batch holds; `documents` are those that end in it, `pieces` all segments."""
    segments, targets = batch["segment_ids"], batch["targets"]
    used = segments > 0
    following = np.concatenate([segments[:, 1:], np.zeros_like(segments[:, :1])], axis=1)
    last = used & (segments != following)
    return Statistics(
        rows=segments.shape[0],
        slots=segments.size,
        tokens=int(used.sum()),
        targets=int((targets >= 0).sum()),
        pieces=int(last.sum()),
        documents=int((last & (targets < 0)).sum()),
    )


@dataclasses.dataclass(frozen=True)
class _Cut(FlatMapTransform):
    """Cuts a document into pieces of at most `length` tokens."""

    length: int

    def flat_map(self, element: Row) -> list[Row]:
        starts = range(0, len(element["tokens"]), self.length)
        return [{name: array[i : i + self.length] for name, array in element.items()} for i in starts]


def _in_order(documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
    """Reads in the calling thread: a read that hangs in a pool's thread would keep the process from ending."""
    if isinstance(documents, grain.IterDataset):
        return documents
    read = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    # `split` filters most documents out on purpose.
    return WithOptionsIterDataset(documents.to_iter_dataset(read), DatasetOptions(filter_warn_threshold_ratio=None))


def _with_targets(document: Document) -> Row:
    if "tokens" not in document:
        raise ValueError(
            f"To be packed, documents need 'tokens', got {sorted(document)}: use tokenize() or in_memory()."
        )
    tokens = np.asarray(document["tokens"], np.int32)
    targets = np.asarray(document.get("targets", np.append(tokens[1:], -1)), np.int32)
    if len(targets) != len(tokens):
        raise ValueError(f"A document's 'targets' must be as long as 'tokens', got {len(targets)} and {len(tokens)}.")
    return {"tokens": tokens, "targets": targets}


def _as_row(packed: Row) -> Row:
    segment_ids = packed["tokens_segment_ids"]
    return {
        "tokens": packed["tokens"],
        "targets": np.where(segment_ids == 0, np.int32(-1), packed["targets"]),
        "segment_ids": segment_ids,
        "positions": packed["tokens_positions"],
    }
