"""Loops over chunks of queries on one device, so that what is computed for pairs of a query and a key takes bounded
memory; and the names by which devices split queries and heads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxlib._utils.loops import scan
from maxlib.hardware import current_device
from maxlib.sharding.layers import mesh_axes

# In float32: 256 MiB, or 4 MiB, which stay in the cache of a CPU (2.4 times as fast as 256).
NUMBERS = {"cpu": 2**20, "other": 2**26}

# Axis names of [B, T], [B, T, N], [B, T, N, H] and [B, S, R] within attention, as in `attend`.
QUERIES = ("batch", "q_seq")
WEIGHTS = (*QUERIES, "attn_heads")
HEADS = (*WEIGHTS, None)
ALL_KEYS = ("batch", None, None)


def over_queries(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, per_query: int):
    """Runs `step(carry, x) -> (carry, y)` for chunks of queries, as `jax.lax.scan` does.

    Args:
        step: Takes arrays `B C ...` of C queries, and returns such.
        carry: First carry.
        xs: Arrays `B T ...`. The last chunk is filled up with zeros.
        per_query: Numbers of intermediates that a query needs; a chunk has at most `NUMBERS`.

    Returns:
        The last carry, and the outputs of all queries, `B T ...`.
    """
    rows, queries = jax.tree.leaves(xs)[0].shape[:2]
    most = NUMBERS["cpu" if current_device()[0] == "cpu" else "other"]
    count = min(-(-rows * queries * per_query // most), queries)
    if count <= 1:
        return step(carry, xs)
    carry, ys = scan(step, carry, jax.tree.map(lambda a: _cut(a, count), xs))
    return carry, jax.tree.map(lambda a: _joined(a)[:, :queries], ys)


def _cut(a: jax.Array, count: int) -> jax.Array:
    """Splits `B T ...` into `count B C ...`."""
    size = -(-a.shape[1] // count)
    a = jnp.pad(a, [(0, 0), (0, count * size - a.shape[1])] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], count, size, *a.shape[2:]), 1, 0)


def _joined(a: jax.Array) -> jax.Array:
    """Inverts `_cut`, but for the padding."""
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], -1, *a.shape[3:])


def axes_between(name: str, size: int, local_size: int) -> Sequence[str]:
    """Returns the mesh axes that split a dimension of `size` into `local_size` within a `shard_map_by_name`.

    These are the first ones of the axis `name`, as those that do not divide the dimension are dropped.
    """
    splitting, parts = [], size // local_size
    for axis in mesh_axes(name):
        if parts > 1:
            splitting, parts = [*splitting, axis], parts // jax.lax.axis_size(axis)
    return splitting


def summed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums over mesh axes, of which there may be none."""
    return jax.lax.psum(x, tuple(axes)) if axes else x
