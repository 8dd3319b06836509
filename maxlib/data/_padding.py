"""Pads documents to rows of one length, one document per row; documents may be nested, like pairs."""

from typing import TYPE_CHECKING, Any, Literal, get_args

import grain
import numpy as np

from maxlib._utils.choices import check_choice
from maxlib.data._row_room import Room, lengths_of
from maxlib.data._token_ids import token_ids

if TYPE_CHECKING:
    from maxlib.nn.audio import Clips
    from maxlib.nn.vision import Patches

Row = dict[str, Any]
Overlong = Literal["error", "truncate", "drop"]


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
    `nn.audio.Clips`. Other numpy arrays and numbers are kept, such as `desirable` of `kto_examples`; other values, such
    as messages, are dropped.

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
    if overlong == "drop":
        documents = documents.filter(lambda document: _fits(document, length, images, audio))
    return documents.map(lambda document: padded(document, length, overlong, images, audio))


def padded(
    document: Row,
    length: int,
    overlong: Overlong = "error",
    images: "Patches | None" = None,
    audio: "Clips | None" = None,
) -> Row:
    """Returns a document and its nested documents as rows."""
    inner = {
        name: padded(x, length, overlong, images, audio)
        for name, x in document.items()
        if isinstance(x, dict) and "tokens" in x
    }
    out = inner | {name: x for name, x in document.items() if isinstance(x, np.ndarray | np.generic)}
    if "tokens" not in document:
        return out
    if "targets" not in document:
        raise ValueError("pad needs 'targets' in a document: use data.tokenize_chats, or set them to the next tokens")
    size, whole = len(document["tokens"]), len(_grids(document)) > 0 or len(lengths_of(document)) > 0
    if size > length and (overlong == "error" or whole):
        raise ValueError(
            f"a document of {size} tokens does not fit a row of {length}: give overlong='truncate' or 'drop'"
        )
    tokens = token_ids(document["tokens"], "A document's 'tokens'")
    targets = token_ids(document["targets"], "A document's 'targets'", targets=True)
    if len(targets) != size:
        raise ValueError(f"A document's 'targets' must be as long as 'tokens', got {len(targets)} and {size}.")
    room = max(length - size, 0)
    rows = {
        "tokens": np.pad(tokens[:length], (0, room)),
        "targets": np.pad(targets[:length], (0, room), constant_values=-1),
    }
    rows |= {"segment_ids": (np.arange(length) < size).astype(np.int32)}
    return out | rows | _images(document, images) | _audio(document, audio)


def _fits(document: Row, length: int, images: "Patches | None", audio: "Clips | None") -> bool:
    """Returns True if a document and its nested documents fit a row."""
    nested = all(_fits(value, length, images, audio) for value in document.values() if isinstance(value, dict))
    short = nested and len(document.get("tokens", ())) <= length
    return short and Room(images, audio).holds(document)


def _grids(document: Row) -> np.ndarray:
    return document["images"].grids if "images" in document else np.zeros((0, 3), np.int32)


def _images(document: Row, blank: "Patches | None") -> Row:
    """Returns the images of a document as a row of patches, of the size of `blank`."""
    if blank is None:
        if len(_grids(document)):
            raise ValueError("a document has images: pad it with images=, such as ImageProcessor.blank(patches)")
        return {}
    if not Room(blank, None).holds(document):
        found = document["images"]
        raise ValueError(
            f"a document with images must fit {len(blank.pixels)} patches and {len(blank.grids)} images of a row, got "
            f'{len(found.pixels)} and {len(found.grids)}: give images= more room, or overlong="drop"'
        )
    found = document.get("images", blank)
    put = lambda a, b: np.concatenate([np.asarray(a, b.dtype), b[len(a) :]])
    return {"images": type(blank)(put(found.pixels, blank.pixels), put(found.grids, blank.grids))}


def _audio(document: Row, blank: "Clips | None") -> Row:
    """Returns the clips of a document as a row of the size of `blank`."""
    if blank is None:
        if len(lengths_of(document)):
            raise ValueError("a document has clips: pad it with audio=, such as AudioProcessor.blank(clips, frames)")
        return {}
    from maxlib.nn.audio import stack_clips

    if not Room(None, blank).holds(document):
        raise ValueError(
            f"a document with audio must fit {len(blank.lengths)} clips of {blank.frames.shape[1]} frames, got clips of "
            f'{lengths_of(document).tolist()}: give audio= more room, or overlong="drop"'
        )
    found = document.get("audio", blank)
    return {"audio": stack_clips(found.real, *blank.frames.shape)}
