"""Packs documents of any length into rows of one length."""

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import grain
import numpy as np
from grain.experimental import (
    BestFitPackIterDataset,
    ConcatThenSplitIterDataset,
    FirstFitPackIterDataset,
)

from maxlib._utils.arguments import check_choice
from maxlib.data._documents import Document, Row, tokens_and_targets
from maxlib.data._padding import Room, fits, has_media, misfit
from maxlib.data._reader import CountingIterator, FromIterators, check_patience, check_same, in_order, patience

if TYPE_CHECKING:
    from maxlib.nn.audio import Clips
    from maxlib.nn.vision import Patches

Overlong = Literal["split", "truncate", "drop", "error"]
SOURCE_NUMBER = "source_number"
Policies = Overlong | Mapping[str, Overlong]
_BINS = {"first_fit": FirstFitPackIterDataset, "best_fit": BestFitPackIterDataset}


def pack(
    documents: grain.MapDataset[Document] | grain.IterDataset[Document],
    *,
    length: int,
    strategy: Literal["first_fit", "best_fit", "concat_then_split"] = "first_fit",
    bins: int = 64,
    overlong: Policies = "split",
    images: "Patches | None" = None,
    audio: "Clips | None" = None,
    sources: Sequence[str] | None = None,
    loss_weights: bool = False,
) -> grain.IterDataset[Row]:
    """Packs documents with `"tokens"` into rows of int32 arrays `tokens targets segment_ids positions`.

    `targets` is the next token of the same document, and -1 where there is none: at a document's last token and on
    padding. A document longer than a row continues in another row, and the target at the cut is the first token there,
    so every token but a document's first is predicted exactly once. `segment_ids` number the pieces of a row from 1,
    and 0 is padding; `positions` count from 0 in each piece. A document may have its own `"targets"`, with -1 where
    nothing is learned.

    With `images` a row also has `"images"`, the `nn.vision.Patches` of its documents (`tokenize_chats`), and no
    positions, which the model computes from the grids. The number of patches per row is limited. A document with images
    is never split: if it is longer than a row, or has too many patches, it is an error, unless `overlong` drops it.
    With `audio` a row has `"audio"`, the `nn.audio.Clips` of its documents, in the same way.

        rows = pack(documents, length=512)
        loader = Loader(lambda part: pack(documents[part], length=512), batch_size=8)

    Args:
        documents: Documents with `"tokens"`.
        length: Tokens per row.
        strategy: "first_fit" only splits documents longer than a row, and puts each into the first row with room for
            it. "best_fit" puts it into the row with the least room that it fits (arXiv:2404.10830), which pads less.
            "concat_then_split" only pads the last row, and splits a document at the end of every row.
        bins: Number of rows that are filled at a time; more bins give less padding but a slower restore.
        overlong: Policy for documents longer than a row, or one by source of a `Mixture`: "split" continues in another
            row, "truncate" keeps the first row, "drop" skips the document, "error" raises an error. For chats use
            "truncate" or "drop": in a second row an answer would be learned without its question. Such documents, and
            their tokens beyond the first row (all tokens of a dropped one), are counted in the loader's metrics, in
            total and per source.
        images: An empty row that defines the capacity of every row (`ImageProcessor.blank`); None for none.
        audio: The same for clips (`AudioProcessor.blank`).
        sources: Names of sources. Rows then have `"sources"`, the number of each token's source in this list, which
            `training.BySource` reads; 0 on padding. Documents need a `"source"`, as those of a `Mixture` have.
        loss_weights: True keeps the `"loss_weights"` of documents, the weight of each of their targets in the mean of
            `training.NextToken`; those of a document without them are 1, and of padding 0.
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, one token and its target, got {length}.")
    check_choice("strategy", strategy, (*_BINS, "concat_then_split"))
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}.")
    for policy in (overlong,) if isinstance(overlong, str) else overlong.values():
        check_choice("overlong", policy, get_args(Overlong))
    if not isinstance(overlong, str) and (names := getattr(documents, "names", None)) is not None:
        for source in overlong:
            check_choice("a source of overlong", source, names)
    lengths, room = {"tokens": length, "targets": length}, Room(images, audio)
    if sources is not None:
        documents = documents.map(functools.partial(_numbered, names=tuple(sources)))
        lengths["sources"] = length
    if loss_weights:
        lengths["loss_weights"] = length
    cut = strategy != "concat_then_split"
    if room.sizes and not cut:
        raise ValueError(
            "documents with images or audio cannot be split: pack them with strategy='first_fit' or 'best_fit', not "
            f"{strategy!r}."
        )
    ordered, rows = in_order(documents), {"length": length, "strategy": strategy, "bins": bins if cut else None}

    def open_pieces() -> grain.DatasetIterator:
        return _PiecesIterator(
            iter(ordered), rows, overlong, room, cut=cut, weighted=loss_weights, patience=patience(documents)
        )

    pieces = FromIterators(open_pieces)
    if not cut:
        return ConcatThenSplitIterDataset(pieces, length_struct=lengths).map(_as_row)
    # The bins count the patches and clips of a row; they are concatenated when it is full.
    packed = _BINS[strategy](
        pieces, length_struct=lengths | room.sizes, num_packing_bins=bins, meta_features=room.uncounted
    )
    return packed.map(lambda columns: room.fill(_as_row(columns), columns))


class _PiecesIterator(CountingIterator):
    """Iterator over documents with targets, split into pieces as the policy and the packing require.

    Its state is the one before the current document, and the number of its pieces already returned; after
    the last of them it is the one after the document, so that another document may follow a resume. It also names how
    rows are packed, because a place in other rows would repeat documents and pass over others.
    """

    def __init__(
        self,
        parent: grain.DatasetIterator,
        rows: dict[str, Any],
        overlong: Policies,
        room: Room,
        *,
        cut: bool,
        weighted: bool,
        patience: int,
    ):
        super().__init__(parent)
        self._rows, self._length = rows, rows["length"]
        self._room, self._cut, self._weighted = room, cut, weighted
        self._overlong: Policies = overlong
        self._patience = patience
        self._pieces: list[Row] = []
        self._returned, self._before = 0, (parent.get_state(), Counter(self.counts))

    def __next__(self) -> Row:
        left_out = 0
        while self._returned >= len(self._pieces):
            check_patience(left_out, self._patience)
            self._before = self._position()
            self._pieces, self._returned = self._of(next(self._parent)), 0
            left_out += 1
        self._returned += 1
        return self._pieces[self._returned - 1]

    def get_state(self) -> dict[str, Any]:
        parent, counts = self._before = self._position()
        counted = [[name, n] for name, n in counts.items()]
        return {"parent": parent, "counts": counted, "given": self._returned, "rows": self._rows}

    def set_state(self, state: dict[str, Any]) -> None:
        check_same(state.get("rows", self._rows), self._rows, "rows packed with")
        self._parent.set_state(state["parent"])
        self.counts.clear()
        self.counts.update(dict(state["counts"]))
        self._before = (state["parent"], Counter(self.counts))
        self._returned = state["given"]
        self._pieces = self._of(next(self._parent)) if self._returned else []

    def _position(self) -> tuple[Any, Counter[str]]:
        """Returns the parent's state, and the counts, from which the pieces that are left are made."""
        if self._returned < len(self._pieces):
            return self._before
        self._pieces, self._returned = [], 0
        return self._parent.get_state(), Counter(self.counts)

    def _of(self, document: Document) -> list[Row]:
        """Returns the pieces of a document; one with images or clips stays in one piece."""
        self._room.check_expected(document, "pack")
        if "tokens" not in document:
            raise ValueError(
                f"To be packed, documents need 'tokens', got {sorted(document)}: use tokenize() or in_memory()."
            )
        if "loss_weights" in document and not self._weighted:
            raise ValueError("A document has 'loss_weights': pack it with loss_weights=True, or remove them.")
        row, source = tokens_and_targets(document, weighted=self._weighted), document.get("source")
        if SOURCE_NUMBER in document:
            row["sources"] = np.full(len(row["tokens"]), document[SOURCE_NUMBER], np.int32)
        if not has_media(document):
            no_media = self._room.columns({})
            return [piece | no_media for piece in self._cut_up(self._shortened(row, source))]
        counts = [("tokens", self._length, len(row["tokens"])), *self._room.counts(document)]
        if fits(counts):
            return [row | self._room.columns(document)]
        if self._policy(source) != "drop":
            raise ValueError(misfit(counts))
        self._count("dropped", len(row["tokens"]), source)
        return []

    def _cut_up(self, row: Row) -> list[Row]:
        size = len(row["tokens"])
        starts = range(0, size, self._length if self._cut else max(size, 1))
        return [{name: array[i : i + starts.step] for name, array in row.items()} for i in starts]

    def _policy(self, source: str | None) -> Overlong:
        return self._overlong if isinstance(self._overlong, str) else self._overlong.get(source or "", "split")

    def _shortened(self, row: Row, source: str | None) -> Row:
        """Applies the policy to a document, and counts it if it is longer than a row."""
        size, policy = len(row["tokens"]), self._policy(source)
        if size <= self._length:
            return row
        if policy == "split":
            self._count("split", size - self._length, source)
            return row
        if policy == "error":
            of = "" if source is None else f" of the source {source!r}"
            raise ValueError(
                f'A document{of} has {size} tokens, a row {self._length}, and overlong="error" allows none longer.'
            )
        keep = self._length if policy == "truncate" else 0
        self._count("truncated" if keep else "dropped", size - keep, source)
        return {name: array[:keep] for name, array in row.items()}

    def _count(self, what: str, tokens: int, source: str | None) -> None:
        for end in ("",) if source is None else ("", f"/{source}"):
            self.counts[f"{what}_documents{end}"] += 1
            self.counts[f"{what}_tokens{end}"] += tokens


def _numbered(document: Document, *, names: tuple[str, ...]) -> Document:
    """Returns a document with the number of its source.

    Raises:
        ValueError: when the source is not among the names.
    """
    if document.get("source") not in names:
        raise ValueError(
            f"with sources={list(names)}, each document's 'source' must be one of them, got {document.get('source')!r}: "
            "read it from a data.Mixture, or add its name"
        )
    return document | {SOURCE_NUMBER: names.index(document["source"])}


def _as_row(packed: Row) -> Row:
    segment_ids = packed["tokens_segment_ids"]
    optional = {name: packed[name] for name in ("sources", "loss_weights") if name in packed}
    return optional | {
        "tokens": packed["tokens"],
        "targets": np.where(segment_ids == 0, np.int32(-1), packed["targets"]),
        "segment_ids": segment_ids,
        "positions": packed["tokens_positions"],
    }
