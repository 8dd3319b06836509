"""The zigzag order of a sequence, which gives all devices of the context axis equal work under a causal mask.

The sequence is split into `2 n` equal chunks; device `i` of `n` has chunk `i` and chunk `2 n - 1 - i`.
"""

# Queries of chunk c attend to c whole chunks and half of their own, so chunk c costs c + 1/2. With n = 3 devices:
#
#   natural order   0 1 | 2 3 | 4 5     cost 2 | 6 | 10     all wait for the last device
#   zigzag order    0 5 | 1 4 | 2 3     cost 6 | 6 | 6      i + (2 n - 1 - i) + 1 = 2 n on every device

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from maxlib.sharding._constrain import axis_of
from maxlib.sharding._layout import current
from maxlib.sharding._rules import drop_uneven, spec


def can_zigzag(length: int) -> bool:
    """Returns True if the active layout splits queries by sequence, and `length` divides into two chunks per device.

    Args:
        length: Tokens of a row.
    """
    axis, layout = axis_of("q_seq"), current()
    return axis is not None and layout is not None and length % (2 * layout.mesh.shape[axis]) == 0


def zigzag(x: jax.Array, *names: str | None) -> jax.Array:
    """Reorders the axis "seq" from natural to zigzag order; every chunk is sent once.

    Args:
        x: An array in natural order.
        names: One axis name (or None) for each dimension, "seq" among them.
    """
    return _exchange(x, names, _to_zigzag)


def unzigzag(x: jax.Array, *names: str | None) -> jax.Array:
    """Reorders the axis "seq" from zigzag back to natural order.

    Args:
        x: An array in zigzag order.
        names: One axis name (or None) for each dimension, "seq" among them.
    """
    return _exchange(x, names, _from_zigzag)


def natural_order(x: jax.Array, parts: int, axis: int = 1) -> jax.Array:
    """Reorders an array with the whole sequence from zigzag to natural order, without communication.

    Args:
        x: An array in zigzag order.
        parts: The number of devices whose chunks were concatenated.
        axis: The dimension of the sequence.
    """
    order = [c for i in range(parts) for c in (i, 2 * parts - 1 - i)]  # 3 devices: 0 5 | 1 4 | 2 3
    chunks = jnp.split(x, 2 * parts, axis=axis)
    return jnp.concatenate([chunks[order.index(c)] for c in range(2 * parts)], axis=axis)


def _exchange(x: jax.Array, names: tuple[str | None, ...], local: Callable[..., Any]) -> jax.Array:
    """Runs `local` on each device's part of x, whose axis "seq" is split over the context axis."""
    layout, axis = current(), axis_of("q_seq")
    assert layout is not None and axis is not None  # `can_zigzag` was checked before
    wanted = spec(names, {**layout.rules, "seq": axis}, what=f"activation {x.shape}")
    place, _ = drop_uneven(wanted, x.shape, layout.mesh)

    def exchange(x):
        return local(x, names.index("seq"), axis)

    return jax.shard_map(exchange, mesh=layout.mesh, in_specs=(place,), out_specs=place, check_vma=False)(x)


def _holder(chunk: int, parts: int) -> int:
    """Returns the device that holds `chunk` in zigzag order."""
    return min(chunk, 2 * parts - 1 - chunk)


def _to_zigzag(x, dim: int, axis: str):
    """Sends a device's chunks in natural order, `2 j` and `2 j + 1`, to the devices that hold them in zigzag order."""
    n = lax.axis_size(axis)
    # i and 2 n - 1 - i have different parity, so each device receives one even and one odd chunk. All even chunks are
    # therefore one permutation of the devices, and all odd chunks another: two ppermutes of half the sequence.
    even, odd = (
        lax.ppermute(chunk, axis, [(j, _holder(2 * j + k, n)) for j in range(n)])
        for k, chunk in enumerate(jnp.split(x, 2, axis=dim))
    )
    # Device i now has chunk i and chunk 2 n - 1 - i. The early one is the even one where i is even.
    is_even = lax.axis_index(axis) % 2 == 0
    return jnp.concatenate([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=dim)


def _from_zigzag(x, dim: int, axis: str):
    """Sends a device's chunks in zigzag order back, by the inverse permutations of `_to_zigzag`."""
    n = lax.axis_size(axis)
    early, late = jnp.split(x, 2, axis=dim)
    is_even = lax.axis_index(axis) % 2 == 0
    # (early, late) -> (even, odd)
    chunks = jnp.where(is_even, early, late), jnp.where(is_even, late, early)
    moved = [
        lax.ppermute(chunk, axis, [(_holder(2 * j + k, n), j) for j in range(n)]) for k, chunk in enumerate(chunks)
    ]
    return jnp.concatenate(moved, axis=dim)
