"""Batches of several shards joined into one, and filled up with rows of padding."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool

Batch = dict[str, Any]  # arrays with rows first, in dictionaries of any depth and other pytrees


def padding_row(batch: Batch) -> Batch:
    """Returns a batch with one row of padding: -1 in `targets`, and zeros in other arrays, such as `segment_ids`."""
    return _map_by_name(lambda name, a: np.full_like(a[:1], -1 if name == "targets" else 0), batch)


def join_shards(parts: Sequence[Batch | None], size: int, blank: Batch, kept: Bool[np.ndarray, " rows"]) -> Batch:
    """Joins the batches of shards, each filled up to `size` rows.

    Args:
      parts: one batch per shard; None for an exhausted shard.
      size: rows of a shard.
      blank: the row of padding.
      kept: selects rows of the joined batch, of `len(parts) * size`.
    """
    rows = [blank if part is None else part for part in parts]

    def join(name: str, blank: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([_fill(array, blank, size) for array in arrays])[kept]

    return _map_by_name(join, blank, *rows)


def _fill(array: np.ndarray, blank: np.ndarray, size: int) -> np.ndarray:
    """Pads to `size` rows with blank rows."""
    short = size - len(array)
    return np.concatenate([array, np.repeat(blank, short, axis=0)]) if short else array


def _map_by_name(function: Callable[..., Any], *batches: Batch) -> Batch:
    """Maps `function(name, *arrays)` over the arrays of batches, which may be in dictionaries of any depth and in other
    pytrees, such as `nn.vision.Patches`, whose arrays have its name.
    """
    import jax

    def map_entry(name: str) -> Any:
        entries = [batch[name] for batch in batches]
        if isinstance(entries[0], Mapping):
            return _map_by_name(function, *entries)
        return jax.tree.map(functools.partial(function, name), *entries)

    return {name: map_entry(name) for name in batches[0]}
