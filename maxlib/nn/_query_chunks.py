"""Loops over chunks of queries, so that what is computed for pairs of a query and a key takes bounded memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlib.hardware import current_device
from maxlib.ops._loops import scan
from maxlib.sharding.layers import axis_size

# Of a chunk on a device, in float32: 256 MiB, or 4 MiB, which stay in the cache of a CPU (2.4 times as fast as 256).
NUMBERS = {"cpu": 2**20, "other": 2**26}


def over_queries(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, per_query: int):
    """Runs `step(carry, x) -> (carry, y)` for chunks of queries, as `jax.lax.scan` does.

    Args:
        step: Takes arrays `B C ...` of C queries, and returns such.
        carry: First carry.
        xs: Arrays `B T ...`. Chunks are filled up with zeros.
        per_query: Numbers of intermediates that a query needs; they bound C.

    Returns:
        The last carry, and the outputs of all queries, `B T ...`.
    """
    rows, queries = jax.tree.leaves(xs)[0].shape[:2]
    count = _count(rows, queries, per_query)
    if count == 1:
        return step(carry, xs)
    carry, ys = scan(step, carry, jax.tree.map(lambda a: _cut(a, count), xs))
    return carry, jax.tree.map(lambda a: _joined(a)[:, :queries], ys)


def _count(rows: int, queries: int, per_query: int) -> int:
    """Returns the number of chunks of which each fits into `NUMBERS` on a device."""
    most = NUMBERS["cpu" if current_device()[0] == "cpu" else "other"] * axis_size("batch") * axis_size("seq")
    return min(-(-rows * queries * per_query // most), queries)


def _cut(a: jax.Array, count: int) -> jax.Array:
    """Splits `B T ...` into `count B C ...`.

    A chunk takes every `count`-th query, so that where a mesh splits the sequence, each device has a part of it.
    """
    size = -(-a.shape[1] // (count * axis_size("seq"))) * axis_size("seq")
    a = jnp.pad(a, [(0, 0), (0, count * size - a.shape[1])] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], size, count, *a.shape[2:]), 2, 0)


def _joined(a: jax.Array) -> jax.Array:
    """Inverts `_cut`, but for the padding."""
    a = jnp.moveaxis(a, 0, 2)
    return a.reshape(a.shape[0], -1, *a.shape[3:])
