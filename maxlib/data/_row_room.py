"""Room of packed rows for images and clips of sound."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlib.data._sources import Document

if TYPE_CHECKING:
    from maxlib.nn.audio import Clips
    from maxlib.nn.vision import Patches

Row = dict[str, Any]


def lengths_of(document: Document) -> np.ndarray:
    """Returns the numbers of frames of a document's clips."""
    return document["audio"].lengths if "audio" in document else np.zeros(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Room:
    """Room of a row for images and clips: empty rows that say how many; None for none."""

    images: "Patches | None"
    audio: "Clips | None"

    @property
    def sizes(self) -> dict[str, int]:
        """Room of a row, by the names of columns that the bins count."""
        images = {} if self.images is None else {"patches": len(self.images.pixels), "grids": len(self.images.grids)}
        return images if self.audio is None else images | {"clips": len(self.audio.lengths)}

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Columns that are kept by document."""
        return (*(("pixels",) if self.images is not None else ()), *(("frames",) if self.audio is not None else ()))

    def counts(self, document: Document) -> list[tuple[str, int, int]]:
        """Lists what a row has room for: its name, how many a row holds, and how many a document has."""
        found: list[tuple[str, int, int]] = []
        if (blank := self.images) is not None:
            images = document.get("images", type(blank)(blank.pixels[:0], blank.grids[:0]))
            found += [
                ("patches", len(blank.pixels), len(images.pixels)),
                ("images", len(blank.grids), len(images.grids)),
            ]
        if self.audio is not None:
            (clips, frames, _), lengths = self.audio.frames.shape, lengths_of(document)
            found += [("clips", clips, len(lengths)), ("frames of a clip", frames, int(lengths.max(initial=0)))]
        return found

    def holds(self, document: Document) -> bool:
        """Returns True if a row has room for the document's images and clips."""
        return all(has <= most for _, most, has in self.counts(document))

    def columns(self, document: Document) -> Row:
        """Returns the columns of a document besides its tokens: what is counted, and pixels and frames."""
        found: Row = {}
        if (blank := self.images) is not None:
            images = document.get("images")
            pixels, grids = (blank.pixels[:0], blank.grids[:0]) if images is None else (images.pixels, images.grids)
            found |= {
                "patches": np.zeros(len(pixels), np.int8),
                "grids": np.asarray(grids),
                "pixels": np.asarray(pixels),
            }
        if self.audio is not None:
            from maxlib.nn.audio import stack_clips

            blank = self.audio
            clips = document.get("audio", type(blank)(blank.frames[:0], blank.lengths[:0]))
            row = stack_clips(clips.real, len(clips.lengths), *blank.frames.shape[1:])
            found |= {"clips": row.lengths, "frames": row.frames}
        return found

    def fill(self, row: Row, packed: dict[str, Any]) -> Row:
        """Adds the images and clips of all documents of a packed row, in their order."""
        put = lambda blank, parts: np.concatenate([*parts, blank[sum(map(len, parts)) :]])
        if self.images is not None:
            row["images"] = type(self.images)(put(self.images.pixels, packed["pixels"]), packed["grids"])
            # Positions depend on rows and columns of images, and the model computes them from the grids.
            del row["positions"]
        if self.audio is not None:
            row["audio"] = type(self.audio)(put(self.audio.frames, packed["frames"]), packed["clips"])
        return row
