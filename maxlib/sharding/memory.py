"""Copies arrays between host memory and the devices."""

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(x: Any) -> bool:
    """Returns True if an array is in host memory.

    Args:
        x: An array, its `jax.ShapeDtypeStruct`, or a tracer inside `jit`; anything else is not on the host.
    """
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and jax.typeof(x).memory_space == HOST


def to_device(tree: Tree) -> Tree:
    """Copies arrays in host memory to the device and returns the others unchanged. For use inside `jit`.

    Args:
        tree: A pytree of arrays.
    """
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE) if is_on_host(x) else x, tree)


def to_host(tree: Tree) -> Tree:
    """Copies arrays to host memory with the same sharding. For use inside `jit`.

    Args:
        tree: A pytree of arrays.
    """
    return jax.tree.map(lambda x: jax.device_put(x, HOST), tree)


def to_host_like(old: Any, new: Tree) -> Tree:
    """Copies arrays to host memory if their counterparts in another tree are there. For use inside `jit`.

    Args:
        old: A pytree of arrays, some of them on the host.
        new: Arrays to copy, with the same structure.
    """
    return jax.tree.map(lambda was, x: jax.device_put(x, HOST) if is_on_host(was) else x, old, new)
