"""Manifest of a step: its leaves and their checksums."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.checkpoint import _checksum as checksum
from maxlib.checkpoint import _checksummed_json as records
from maxlib.checkpoint import _flatten as trees

FORMAT = 1


def describe(items: dict[str, dict[str, Any]], raws: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns shape, dtype and the asynchronous `checksum.digest` of every stored leaf; `finish` waits for them."""
    return {item: {n: _entry(leaf, raws[item][n]) for n, leaf in leaves.items()} for item, leaves in items.items()}


def finish(described: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the manifest's text."""
    to_hex = lambda entry: {**entry, "checksum": checksum.to_hex(entry["checksum"])}
    items = {item: {name: to_hex(e) for name, e in leaves.items()} for item, leaves in described.items()}
    return records.to_text({"format": FORMAT, "items": items})


def abstract(entry: dict[str, Any], sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the stored leaf."""
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), trees.stored_dtype(jnp.dtype(entry["dtype"])), sharding=sharding)


def damaged(entries: dict[str, dict[str, Any]], leaves: dict[str, Any]) -> list[str]:
    """Names the leaves whose content differs from what was saved."""
    sums = {name: checksum.digest(leaf) for name, leaf in leaves.items()}  # all at once, then wait
    return [name for name, found in sums.items() if checksum.to_hex(found) != entries[name]["checksum"]]


def is_stored(entry: dict[str, Any]) -> bool:
    """Returns whether orbax stores the leaf: empty arrays are only in the manifest."""
    return 0 not in entry["shape"]


def _entry(leaf: Any, raw: Any) -> dict[str, Any]:
    entry = {"shape": list(np.shape(raw)), "dtype": str(raw.dtype), "checksum": checksum.digest(raw)}
    if trees.is_key(leaf):
        return entry | {"key": str(jax.random.key_impl(leaf))}
    return entry | {"dtype": str(getattr(leaf, "dtype", raw.dtype))}
