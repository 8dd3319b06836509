"""Checks token ids where they enter, from files and from callers, before they become int32."""

from typing import Any

import numpy as np
from jaxtyping import Int32

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
