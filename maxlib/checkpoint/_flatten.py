"""Pytrees as flat dicts of arrays, and back."""

from typing import Any

import jax
import numpy as np

from maxlib.nn.tree import is_variable


def flatten(tree: Any) -> dict[str, Any]:
    """Returns `{dotted path: leaf}`; variables are leaves, and empty ones (from `nn.partition`) are omitted."""
    found = {_name(path): _value(leaf) for path, leaf in _leaves(tree)}
    return {name: leaf for name, leaf in sorted(found.items()) if leaf is not None}


def unflatten(tree: Any, leaves: dict[str, Any]) -> Any:
    """Returns `tree` with its leaves taken from `leaves`."""

    def put(path, leaf):
        new = leaves.get(_name(path))
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


def _leaves(tree: Any):
    return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)


def _value(leaf: Any) -> Any:
    return leaf.get_value() if is_variable(leaf) else leaf


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
