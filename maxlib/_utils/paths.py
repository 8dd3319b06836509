"""Names of leaves of pytrees."""

from typing import Any

import jax


def dotted(path: Any) -> str:
    """Joins a path of `jax.tree_util` with dots: `"layers.0.attn.q.w"`."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
