"""Arrays that wait in the host's memory, and copies of them where the devices compute."""

from typing import Any, TypeVar

import jax

Tree = TypeVar("Tree")
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def is_on_host(x: Any) -> bool:
    """Tells whether an array (or its shape, or a tracer of it inside `jit`) lies in the host's memory."""
    return isinstance(x, jax.Array | jax.ShapeDtypeStruct) and jax.typeof(x).memory_space == HOST


def to_device(tree: Tree) -> Tree:
    """Copies to the device what lies in the host's memory, and leaves all else as it is. For use inside `jit`."""
    return jax.tree.map(lambda x: jax.device_put(x, DEVICE) if is_on_host(x) else x, tree)


def to_host(tree: Tree) -> Tree:
    """Copies `tree` to the host's memory, sharded as it is. For use inside `jit`."""
    return jax.tree.map(lambda x: jax.device_put(x, HOST), tree)


def back_to(old: Any, new: Tree) -> Tree:
    """Copies those arrays of `new` to the host's memory whose counterparts in `old` are there. For use inside `jit`."""
    return jax.tree.map(lambda was, x: jax.device_put(x, HOST) if is_on_host(was) else x, old, new)
