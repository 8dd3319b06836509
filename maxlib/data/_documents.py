"""Documents, and the checks of what enters them: token ids and messages."""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import grain
import numpy as np
from jaxtyping import Float32, Int32

Document = dict[str, Any]
Row = dict[str, Any]
_LIMITS = np.iinfo(np.int32)


def token_ids(ids: Any, what: str, *, targets: bool = False) -> Int32[np.ndarray, " n"]:
    """Returns ids as int32, to which numpy would wrap and round others.

    Args:
        ids: A sequence or an array.
        what: What has the ids, with its place, for the message.
        targets: Whether they are targets, which are negative where nothing is learned.

    Raises:
        ValueError: unless the ids are integers from 0 (for targets -2147483648) to 2147483647 in one dimension.
    """
    least = int(_LIMITS.min) if targets else 0
    must = f"{what} must be token ids, one-dimensional integers from {least} to {_LIMITS.max}"
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:  # rows of different lengths
        raise ValueError(f"{must}, got {ids!r:.100}") from error
    if array.ndim == 1 and not array.size:
        return array.astype(np.int32)
    # numpy counts a bool among integers as 0 or 1.
    mixed = isinstance(ids, list | tuple) and bool in set(map(type, ids))
    if array.ndim != 1 or array.dtype.kind not in "iu" or mixed:
        raise ValueError(f"{must}, got {array.dtype} of shape {array.shape}: {ids!r:.100}")
    if array.min() < least or array.max() > _LIMITS.max:
        at = int(np.flatnonzero((array < least) | (array > _LIMITS.max))[0])
        raise ValueError(f"{must}, got {array[at]} at index {at}")
    return array.astype(np.int32)


def tokens_and_targets(document: Document, *, weighted: bool = False) -> Row:
    """Returns the checked tokens and targets of a document; by default each token's target is the next one, and the
    last has none.

    Args:
        document: The document.
        weighted: True returns `loss_weights` too, 1 by default.
    """
    tokens = token_ids(document["tokens"], "A document's 'tokens'")
    targets = token_ids(document.get("targets", np.append(tokens[1:], -1)), "A document's 'targets'", targets=True)
    if len(targets) != len(tokens):
        raise ValueError(f"A document's 'targets' must be as long as 'tokens', got {len(targets)} and {len(tokens)}.")
    row = {"tokens": tokens, "targets": targets}
    return row | {"loss_weights": _loss_weights(document, len(tokens))} if weighted else row


def _loss_weights(document: Document, size: int) -> Float32[np.ndarray, " n"]:
    """Returns the weight of each target of a document."""
    weights = np.asarray(document.get("loss_weights", np.ones(size)))
    if (
        weights.shape != (size,)
        or weights.dtype.kind not in "iufb"
        or not (np.isfinite(weights) & (weights >= 0)).all()
    ):
        raise ValueError(
            f"A document's 'loss_weights' must be {size} finite numbers of at least 0, one per target, got {weights}."
        )
    return weights.astype(np.float32)


def is_system_error(error: Exception) -> bool:
    """Returns True for a missing file or a failing disk; an error of Pillow's about a damaged image has no number."""
    return isinstance(error, OSError) and error.errno is not None


def is_hf_dataset(table: Any) -> bool:
    """Returns True for a table of Hugging Face's `datasets`."""
    return hasattr(table, "features")


def without_nulls(value: Any) -> Any:
    """Returns what a table stores without the fields that are None: each object has the fields of all others."""
    if isinstance(value, Mapping):
        return {name: without_nulls(x) for name, x in value.items() if x is not None}
    if isinstance(value, list) and value and isinstance(value[0], Mapping | list):  # not of tokens
        return [without_nulls(x) for x in value]
    return value


def is_weight(weight: Any) -> bool:
    """Returns True for a number that is finite and not negative."""
    return isinstance(weight, numbers.Real) and math.isfinite(weight) and float(weight) >= 0


def text_of(document: Document) -> str:
    """Returns the text of a document. Raises ValueError for one without, and for half of a surrogate pair in it."""
    if "text" not in document:
        raise ValueError(f"To be tokenized, documents need 'text', got {sorted(document)}.")
    try:
        document["text"].encode()  # tokenizers only say that it is no text
    except UnicodeEncodeError as error:
        raise ValueError(f"A document's 'text' must be valid Unicode: {error}. Remove these characters.") from error
    return document["text"]


def is_messages(value: Any) -> bool:
    """Returns True for a list of messages, each an object with a role."""
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return False
    return all(isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value)


def with_content(record: Mapping[str, Any], name: str, content: Any) -> Document:
    """Returns a record as a document with one content, `text` or `messages`, without other fields of such names."""
    return {key: value for key, value in record.items() if key not in ("text", "messages", "tokens")} | {name: content}


def map_named(
    documents: grain.MapDataset[Document], function: Callable[[Document, int], Any], name: str
) -> grain.MapDataset[Any]:
    """Applies `function` to each document and its index; errors name the record.

    Args:
        documents: The documents.
        function: Called with a document and its index.
        name: Name, in errors, of documents without a `"record"`.

    Raises:
        ValueError: when reading a document on which `function` fails.
    """
    return documents.map_with_index(partial(_named, function=function, name=name, count=len(documents)))


def _named(index: int, document: Document, *, function: Callable[[Document, int], Any], name: str, count: int) -> Any:
    try:
        return function(document, index)
    except Exception as error:  # jinja raises many kinds
        record = document.get("record", f"{name} {index % count}")
        if is_system_error(error) and not isinstance(error, FileNotFoundError):  # which the record names
            error.add_note(f"While reading {record}.")
            raise
        raise ValueError(f"{record}: {type(error).__name__}: {error}") from error
