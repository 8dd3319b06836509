"""Packs documents of any length into rows of one length."""

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

import grain
import numpy as np
from grain.experimental import (
    ConcatThenSplitIterDataset,
    DatasetOptions,
    FirstFitPackIterDataset,
    WithOptionsIterDataset,
)
from jaxtyping import Int32

from maxlib.data._counting import CountingIterator
from maxlib.data._row_room import Room
from maxlib.data._sources import Document
from maxlib.data._token_ids import token_ids

if TYPE_CHECKING:
    from maxlib.nn.audio import Clips
    from maxlib.nn.vision import Patches

Overlong = Literal["split", "truncate", "drop", "error"]
Policies = Overlong | Mapping[str, Overlong]
Row = dict[str, np.ndarray]
_BLANKS = {"images": "ImageProcessor.blank(patches)", "audio": "AudioProcessor.blank(clips, frames)"}


def pack(
    documents: grain.MapDataset[Document] | grain.IterDataset[Document],
    *,
    length: int,
    strategy: Literal["first_fit", "concat_then_split"] = "first_fit",
    bins: int = 64,
    overlong: Policies = "split",
    images: "Patches | None" = None,
    audio: "Clips | None" = None,
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
      documents: documents with `"tokens"`.
      length: tokens per row.
      strategy: "first_fit" only splits documents longer than a row. "concat_then_split" only pads the last row, and
          splits a document at the end of every row.
      bins: number of rows that `first_fit` fills at a time; more bins give less padding but a slower restore.
      overlong: policy for documents longer than a row, or one by source of a `Mixture`: "split" continues in another
        row, "truncate" keeps the first row, "drop" skips the document, "error" raises an error. For chats use
        "truncate" or "drop": in a second row an answer would be learned without its question. Such documents, and
        their tokens beyond the first row (all tokens of a dropped one), are counted in the loader's metrics, in total
        and per source.
      images: an empty row that defines the capacity of every row (`ImageProcessor.blank`); None for none.
      audio: the same for clips (`AudioProcessor.blank`).
    """
    if length < 2:
        raise ValueError(f"length must be at least 2, one token and its target, got {length}.")
    if strategy not in ("first_fit", "concat_then_split"):
        raise ValueError(f"strategy must be 'first_fit' or 'concat_then_split', got {strategy!r}.")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}.")
    _check_policies(overlong)
    lengths = {"tokens": length, "targets": length}
    if images is not None or audio is not None:
        return _pack_whole(_in_order(documents), lengths, Room(images, audio), strategy, bins, overlong)
    pieces = _Segments(_in_order(documents), length, overlong, cut=strategy == "first_fit")
    if strategy == "concat_then_split":
        return ConcatThenSplitIterDataset(pieces, length_struct=lengths).map(_as_row)
    return FirstFitPackIterDataset(pieces, length_struct=lengths, num_packing_bins=bins).map(_as_row)


def _pack_whole(documents, lengths: dict[str, int], room: Room, strategy: str, bins: int, overlong: Policies):
    if strategy != "first_fit":
        raise ValueError(
            f"documents with images or audio cannot be split: pack them with strategy='first_fit', not {strategy!r}."
        )
    pieces = _Segments(documents, lengths["tokens"], overlong, cut=True, room=room)
    # The bins count the patches and clips of a row; they are concatenated when it is full.
    options: Any = dict(length_struct=lengths | room.sizes, num_packing_bins=bins, meta_features=room.uncounted)
    return FirstFitPackIterDataset(pieces, **options).map(lambda packed: room.fill(_as_row(packed), packed))


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of rows. `a + b` adds them."""

    rows: int = 0
    slots: int = 0
    tokens: int = 0
    targets: int = 0
    pieces: int = 0
    documents: int = 0

    @property
    def padding(self) -> float:
        """Returns the fraction of slots without a token."""
        return 1 - self.tokens / self.slots if self.slots else 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))


def statistics(batch: Mapping[str, Int32[np.ndarray, "B T"]]) -> Statistics:
    """Computes the statistics of a batch.

    `pieces` counts all segments, and `documents` those whose last token has no target: where a document ends, and where
    a chat is cut within a turn that is not learned.
    """
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


class _Segments(grain.IterDataset):
    """Documents with targets, split into pieces as the policy and the packing require."""

    def __init__(
        self, parent: grain.IterDataset, length: int, overlong: Policies, *, cut: bool, room: Room | None = None
    ):
        super().__init__(parent)
        self._length, self._cut, self._room = length, cut, room
        self._overlong: Policies = overlong

    def __iter__(self) -> grain.DatasetIterator:
        return _PiecesIterator(iter(self._parent), self._length, self._overlong, cut=self._cut, room=self._room)


class _PiecesIterator(CountingIterator):
    """Iterator whose state is the one before the current document, and the number of its pieces already returned."""

    def __init__(
        self,
        parent: grain.DatasetIterator,
        length: int,
        overlong: Policies,
        *,
        cut: bool,
        room: Room | None = None,
    ):
        super().__init__(parent)
        self._length, self._cut, self._room = length, cut, room
        self._overlong: Policies = overlong
        self._pieces: list[Row] = []
        self._given, self._before = 0, (parent.get_state(), Counter(self.counts))

    def __next__(self) -> Row:
        while self._given >= len(self._pieces):
            self._before = (self._parent.get_state(), Counter(self.counts))
            self._pieces, self._given = self._of(next(self._parent)), 0
        self._given += 1
        return self._pieces[self._given - 1]

    def get_state(self) -> dict[str, Any]:
        parent, counts = self._before
        return {"parent": parent, "counts": [[name, n] for name, n in counts.items()], "given": self._given}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])
        self.counts.clear()
        self.counts.update(dict(state["counts"]))
        self._before = (state["parent"], Counter(self.counts))
        self._given = state["given"]
        self._pieces = self._of(next(self._parent)) if self._given else []

    def _of(self, document: Document) -> list[Row]:
        for name, example in _BLANKS.items():
            if name in document and getattr(self._room, name, None) is None:
                raise ValueError(f"A document has {name}: pack it with {name}=, such as {example}.")
        if self._room is not None:
            return self._whole(document, self._room)
        row = self._kept(_with_targets(document), document.get("source"))
        return self._cut_up(row)

    def _cut_up(self, row: Row) -> list[Row]:
        size = len(row["tokens"])
        starts = range(0, size, self._length if self._cut else max(size, 1))
        return [{name: array[i : i + starts.step] for name, array in row.items()} for i in starts]

    def _whole(self, document: Document, room: Room) -> list[Row]:
        """Returns a document with images or clips in one piece; one without may be split."""
        row, source = _with_targets(document), document.get("source")
        counts = [("tokens", self._length, len(row["tokens"])), *room.counts(document)]
        if not any(got for _, _, got in counts[1:]):
            return [text | room.columns({}) for text in self._cut_up(self._kept(row, source))]
        if all(got <= most for _, most, got in counts):
            return [row | room.columns(document)]
        if self._policy(source) != "drop":
            most, got = _listed([f"{most} {name}" for name, most, _ in counts]), _listed([str(n) for _, _, n in counts])
            raise ValueError(
                f"A document with {' or '.join(_BLANKS)} must fit a row of {most}, got {got}: make rows larger, or give "
                'overlong="drop".'
            )
        self._count("dropped", len(row["tokens"]), source)
        return []

    def _policy(self, source: str | None) -> Overlong:
        return self._overlong if isinstance(self._overlong, str) else self._overlong.get(source or "", "split")

    def _kept(self, row: Row, source: str | None) -> Row:
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


def _listed(parts: list[str]) -> str:
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def _check_policies(overlong: Policies) -> None:
    for policy in (overlong,) if isinstance(overlong, str) else overlong.values():
        if policy not in get_args(Overlong):
            raise ValueError(
                f"overlong must be one of {get_args(Overlong)}, or one of them per source, got {policy!r}."
            )


def _in_order(documents: grain.MapDataset | grain.IterDataset) -> grain.IterDataset:
    """Reads in the calling thread, because a hanging read in a pool's thread would keep the process from ending."""
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
    tokens = token_ids(document["tokens"], "A document's 'tokens'")
    targets = token_ids(document.get("targets", np.append(tokens[1:], -1)), "A document's 'targets'", targets=True)
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
