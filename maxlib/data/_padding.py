"""Pads documents to rows of one length, one document per row; documents may be nested, like pairs."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import grain
import numpy as np

from maxlib._utils.arguments import check_choice
from maxlib.data._documents import Document, Row, tokens_and_targets
from maxlib.data._reader import check_patience, patience

if TYPE_CHECKING:
    from maxlib.nn.audio import Clips
    from maxlib.nn.vision import Patches

Overlong = Literal["error", "truncate", "drop"]
_BLANKS = {"images": "ImageProcessor.blank(patches)", "audio": "AudioProcessor.blank(clips, frames)"}


def pad(
    documents: grain.MapDataset[Any],
    *,
    length: int,
    overlong: Overlong = "error",
    images: "Patches | None" = None,
    audio: "Clips | None" = None,
) -> grain.MapDataset[Any]:
    """Pads documents with `tokens` and `targets`, including nested ones, to rows `tokens targets segment_ids` of one
    length.

    With `images` rows also have `"images"`, the `nn.vision.Patches` of their document, with `audio` its
    `nn.audio.Clips`. `loss_weights` of a document are padded with 0. Other arrays and numbers of numpy are kept,
    such as `desirable` of `kto_examples`; other values, such as messages and Python's numbers, are dropped.

    Args:
        documents: Such as those of `tokenize_chats`, or pairs of them in a dictionary.
        length: Tokens of a row.
        overlong: Policy for longer documents: "error", "truncate" (keeps the beginning) or "drop". Documents with
            images or clips are never truncated.
        images: An empty row with the capacity for images that every row has (`ImageProcessor.blank`); None for none.
        audio: The same for clips (`AudioProcessor.blank`).

    Raises:
        ValueError: when reading a document that is too long, has no `targets`, or has more images or clips than a row
            holds.
    """
    check_choice("overlong", overlong, get_args(Overlong))
    room = Room(images, audio)
    if overlong == "drop":
        documents = documents.filter(_Fits(length, room, patience(documents)))
    return documents.map(lambda document: _padded(document, length, overlong, room))


def pad_document(document: Document, *, length: int, images: "Patches | None" = None) -> Row:
    """Returns a document and its nested documents as rows, as `pad` does.

    Args:
        document: A document with `tokens` and `targets`.
        length: Tokens of a row.
        images: As for `pad`.
    """
    return _padded(document, length, "error", Room(images, None))


def _padded(document: Document, length: int, overlong: Overlong, room: "Room") -> Row:
    row: Row = {}
    for name, value in document.items():
        if isinstance(value, dict) and "tokens" in value:
            row[name] = _padded(value, length, overlong, room)
        elif isinstance(value, np.ndarray | np.generic):
            row[name] = value
    if "tokens" not in document:
        return row
    if "targets" not in document:
        raise ValueError("pad needs 'targets' in a document: use data.tokenize_chats, or set them to the next tokens")
    size = len(document["tokens"])
    if size > length and (overlong == "error" or has_media(document)):
        raise ValueError(
            f"a document of {size} tokens does not fit a row of {length}: make rows longer, cut it, or give `pad` "
            "overlong='truncate' or 'drop'"
        )
    room.check_expected(document, "pad")
    counts = room.counts(document)
    if not fits(counts):
        raise ValueError(misfit(counts))
    weighted = "loss_weights" in document
    ids = tokens_and_targets(document, weighted=weighted)
    if weighted:
        row["loss_weights"] = _to_length(ids["loss_weights"], length)
    row["tokens"] = _to_length(ids["tokens"], length)
    row["targets"] = _to_length(ids["targets"], length, fill=-1)
    row["segment_ids"] = (np.arange(length) < size).astype(np.int32)
    columns = room.columns(document)
    return room.fill(row, columns | {name: [columns[name]] for name in room.uncounted})


def _to_length(values: np.ndarray, length: int, *, fill: int = 0) -> np.ndarray:
    """Cuts values to a length, or fills them up to it; `np.pad` takes ten times as long for a row."""
    row = np.full(length, fill, values.dtype)
    row[: len(values)] = values[:length]
    return row


class _Fits:
    """Predicate of documents that fit a row. Raises ValueError after so many in succession that do not."""

    def __init__(self, length: int, room: "Room", patience: int):
        self._length, self._room, self._patience, self._dropped = length, room, patience, 0

    def __call__(self, document: Document) -> bool:
        fits = _fits(document, self._length, self._room)
        self._dropped = 0 if fits else self._dropped + 1  # of several threads, which may miss a few
        check_patience(self._dropped, self._patience)
        return fits


def _fits(document: Document, length: int, room: "Room") -> bool:
    """Returns True if a document and its nested documents fit a row."""
    nested = all(_fits(value, length, room) for value in document.values() if isinstance(value, dict))
    return nested and len(document.get("tokens", ())) <= length and fits(room.counts(document))


def has_media(document: Document) -> bool:
    """Returns True for a document with images or clips."""
    return any(_num_media(document, name) for name in _BLANKS)


def fits(counts: list[tuple[str, int, int]]) -> bool:
    """Returns True if a row has room for everything in `Room.counts`."""
    return all(size <= capacity for _, capacity, size in counts)


def misfit(counts: list[tuple[str, int, int]]) -> str:
    """Returns the message about a document that has more than a row has room for."""
    capacity = _listed([f"{capacity} {name}" for name, capacity, _ in counts])
    sizes = _listed([str(size) for _, _, size in counts])
    return (
        f"A document with {' or '.join(_BLANKS)} must fit a row of {capacity}, got {sizes}: make rows larger, or give "
        'overlong="drop".'
    )


@dataclasses.dataclass(frozen=True)
class Room:
    """Room of a row for images and clips: empty rows that say how many; None for none."""

    images: "Patches | None"
    audio: "Clips | None"

    @property
    def sizes(self) -> dict[str, int]:
        """Room of a row, by the names of columns that the bins of packing count."""
        images = {} if self.images is None else {"patches": len(self.images.pixels), "grids": len(self.images.grids)}
        return images if self.audio is None else images | {"clips": len(self.audio.lengths)}

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Columns that packing keeps by document."""
        return (*(("pixels",) if self.images is not None else ()), *(("frames",) if self.audio is not None else ()))

    def check_expected(self, document: Document, verb: str) -> None:
        """Raises ValueError for a document with images or clips if rows have no room for them."""
        for name, example in _BLANKS.items():
            if getattr(self, name) is None and _num_media(document, name):
                raise ValueError(f"A document has {name}: {verb} it with {name}=, such as {example}.")

    def counts(self, document: Document) -> list[tuple[str, int, int]]:
        """Lists what a row has room for: its name, how many a row holds, and how many a document has."""
        counts: list[tuple[str, int, int]] = []
        if self.images is not None:
            pixels, grids = self._images_of(document)
            counts.append(("patches", len(self.images.pixels), len(pixels)))
            counts.append(("images", len(self.images.grids), len(grids)))
        if self.audio is not None:
            (clips, frames, _), lengths = self.audio.frames.shape, self._clips_of(document).lengths
            counts.append(("clips", clips, len(lengths)))
            counts.append(("frames of a clip", frames, int(lengths.max(initial=0))))
        return counts

    def columns(self, document: Document) -> Row:
        """Returns the columns of a document besides its tokens: what is counted, and pixels and frames."""
        columns: Row = {}
        if self.images is not None:
            pixels, grids = self._images_of(document)
            columns["patches"] = np.zeros(len(pixels), np.int8)
            columns["grids"] = np.asarray(grids)
            columns["pixels"] = np.asarray(pixels)
        if self.audio is not None:
            from maxlib.nn.audio import stack_clips

            clips = self._clips_of(document)
            row = stack_clips(clips.real, len(clips.lengths), *self.audio.frames.shape[1:])
            columns["clips"] = row.lengths
            columns["frames"] = row.frames
        return columns

    def fill(self, row: Row, columns: Row) -> Row:
        """Adds the images and clips of all documents of a row, in their order; `uncounted` columns are lists."""
        if self.images is not None:
            pixels, grids = self.images.pixels, self.images.grids
            row["images"] = type(self.images)(_filled(pixels, columns["pixels"]), _filled(grids, [columns["grids"]]))
            # Positions depend on rows and columns of images, and the model computes them from the grids.
            row.pop("positions", None)
        if self.audio is not None:
            frames, lengths = self.audio.frames, self.audio.lengths
            row["audio"] = type(self.audio)(_filled(frames, columns["frames"]), _filled(lengths, [columns["clips"]]))
        return row

    def _images_of(self, document: Document) -> tuple[Any, Any]:
        assert self.images is not None
        images = document.get("images")
        return (self.images.pixels[:0], self.images.grids[:0]) if images is None else (images.pixels, images.grids)

    def _clips_of(self, document: Document) -> "Clips":
        assert self.audio is not None
        return document.get("audio", type(self.audio)(self.audio.frames[:0], self.audio.lengths[:0]))


def _num_media(document: Document, name: str) -> int:
    if name not in document:
        return 0
    return len(document[name].grids if name == "images" else document[name].lengths)


def _filled(blank: Any, arrays: Sequence[Any]) -> np.ndarray:
    """Joins arrays, and fills up with the rest of `blank`."""
    count = sum(map(len, arrays))
    return np.concatenate([*(np.asarray(array, blank.dtype) for array in arrays), blank[count:]])


def _listed(texts: list[str]) -> str:
    return f"{', '.join(texts[:-1])} and {texts[-1]}"
