"""The records of a step: JSON files with a checksum, among them the manifest of the leaves of its pytrees."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from maxlib._utils.paths import dotted
from maxlib.checkpoint import _checksum as checksum
from maxlib.checkpoint._errors import DamagedError
from maxlib.nn.tree import is_variable

FORMAT = 1


def to_text(content: Any) -> str:
    """Formats `content` as JSON with its checksum. Raises TypeError for values that JSON cannot represent."""
    body = json.dumps(json.loads(json.dumps(content)), sort_keys=True)  # keys as they will be read: strings
    return f'{{"crc32": "{zlib.crc32(body.encode()):08x}", "content": {body}}}\n'


def read(path: epath.Path) -> Any:
    """Reads the content of a record. Raises DamagedError."""
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, path: str) -> Any:
    """Returns the content of a record's text. Raises DamagedError, which names `path`."""
    try:
        record = json.loads(text)
        crc, content = record["crc32"], record["content"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    if f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}" != crc:
        raise DamagedError(f"{path} differs from what was written")
    return content


def describe(items: dict[str, dict[str, Any]], raws: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns shape, dtype and the asynchronous `checksum.digest` of every stored leaf."""
    return {item: {n: _entry(leaf, raws[item][n]) for n, leaf in leaves.items()} for item, leaves in items.items()}


def manifest_text(described: dict[str, dict[str, dict[str, Any]]]) -> str:
    """Returns the manifest's text, once the checksums are computed."""
    return to_text(manifest(described))


def manifest(described: dict[str, dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Returns the manifest, once the checksums are computed."""
    items = {
        item: {name: {**entry, "checksum": checksum.to_hex(entry["checksum"])} for name, entry in leaves.items()}
        for item, leaves in described.items()
    }
    return {"format": FORMAT, "items": items}


def abstract(entry: dict[str, Any], sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the stored leaf."""
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), stored_dtype(jnp.dtype(entry["dtype"])), sharding=sharding)


def damaged(entries: dict[str, dict[str, Any]], leaves: dict[str, Any]) -> list[str]:
    """Names the leaves whose content differs from what was saved."""
    return [name for name, digits in checksum.checksums(leaves).items() if digits != entries[name]["checksum"]]


def is_stored(entry: dict[str, Any]) -> bool:
    """Returns whether orbax stores the leaf: empty arrays are only in the manifest."""
    return 0 not in entry["shape"]


def _entry(leaf: Any, raw: Any) -> dict[str, Any]:
    entry = {"shape": list(np.shape(raw)), "dtype": str(raw.dtype), "checksum": checksum.digest(raw)}
    if is_key(leaf):
        return entry | {"key": str(jax.random.key_impl(leaf))}
    return entry | {"dtype": str(getattr(leaf, "dtype", raw.dtype))}


def flatten(tree: Any) -> dict[str, Any]:
    """Returns `{dotted path: leaf}`; variables are leaves, and empty ones (from `nn.partition`) are omitted."""
    leaves = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable):
        value = leaf.get_value() if is_variable(leaf) else leaf
        if value is not None:
            leaves[dotted(path)] = value
    return dict(sorted(leaves.items()))


def unflatten(tree: Any, leaves: dict[str, Any]) -> Any:
    """Returns `tree` with its leaves taken from `leaves`."""

    def put(path, leaf):
        new = leaves.get(dotted(path))
        return leaf if new is None else leaf.replace(new) if is_variable(leaf) else new

    return jax.tree_util.tree_map_with_path(put, tree, is_leaf=is_variable)


def snapshot(leaf: Any) -> Any:
    """Returns the stored form of a leaf: the data of a key, a wider dtype if its dtype cannot be stored, and a copy if
    it is not a `jax.Array`.
    """
    leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    leaf = leaf if isinstance(leaf, jax.Array) else np.array(leaf, order="C")
    return leaf.astype(stored_dtype(leaf.dtype)) if stored_dtype(leaf.dtype) != leaf.dtype else leaf


def stored_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype, or a wider one if tensorstore does not support it."""
    return np.dtype({"uint2": "uint8", "uint4": "uint8", "float8_e4m3": "float16"}.get(str(dtype), dtype))


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf, possibly abstract, consists of typed random keys."""
    return hasattr(leaf, "dtype") and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)
