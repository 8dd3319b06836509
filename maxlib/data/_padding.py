"""Pads documents to rows of one length, one document per row; documents may be nested, like pairs."""

from typing import Any, Literal, get_args

import grain
import numpy as np

from maxlib._utils.choices import check_choice

Row = dict[str, Any]
Long = Literal["error", "truncate", "drop"]


def pad(documents: grain.MapDataset[Any], *, length: int, long: Long = "error") -> grain.MapDataset[Any]:
    """Pads documents with `tokens` and `targets`, including nested ones, to rows `tokens targets segment_ids` of one
    length.

    Other numpy arrays and numbers are kept, such as `desirable` of `kto_examples`; other values, such as messages, are
    dropped.

    Args:
        documents: Such as those of `tokenize_chats`, or pairs of them in a dictionary.
        length: Tokens of a row.
        long: Policy for longer documents: "error", "truncate" (keeps the beginning) or "drop".

    Raises:
        ValueError: when reading a document that is too long, has no `targets`, or has images (use `pack` for those).
    """
    check_choice("long", long, get_args(Long))
    if long == "drop":
        documents = documents.filter(lambda document: _longest(document) <= length)
    return documents.map(lambda document: padded(document, length, long))


def padded(document: Row, length: int, long: Long = "error") -> Row:
    """Returns a document and its nested documents as rows."""
    inner = {name: padded(x, length, long) for name, x in document.items() if isinstance(x, dict) and "tokens" in x}
    out = inner | {name: x for name, x in document.items() if isinstance(x, np.ndarray | np.generic)}
    if "tokens" not in document:
        return out
    if "images" in document:
        raise ValueError("a document with images is put into rows by data.pack(..., images=)")
    if "targets" not in document:
        raise ValueError("pad needs 'targets' in a document: use data.tokenize_chats, or set them to the next tokens")
    size = len(document["tokens"])
    if size > length and long == "error":
        raise ValueError(f"a document of {size} tokens does not fit a row of {length}: give long='truncate' or 'drop'")
    fill = lambda x, value: np.append(x[:length], np.full(max(length - size, 0), value)).astype(np.int32)
    rows = {"tokens": fill(document["tokens"], 0), "targets": fill(document["targets"], -1)}
    return out | rows | {"segment_ids": (np.arange(length) < size).astype(np.int32)}


def _longest(document: Row) -> int:
    nested = [_longest(value) for value in document.values() if isinstance(value, dict)]
    return max([*nested, len(document.get("tokens", ()))])
