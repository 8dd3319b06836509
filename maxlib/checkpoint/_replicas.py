"""Reads replicated arrays on one replica's hosts and sends them to the others.

Orbax's single-replica handler sums the copies as numbers, which turns -0.0 into 0.0, and the other hosts wait forever
if a reading host fails. This module sums bits, after all hosts know that reading succeeded.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxlib._utils.varying import NO_MESH
from maxlib.checkpoint._checksum import is_narrow
from maxlib.distributed import raise_on_all

Arrays = dict[str, Any]
Read = Callable[[Arrays], Arrays]


def load(read: Read, read_here: Read, abstract: Arrays) -> Arrays:
    """Reads all leaves of `abstract` on all hosts, or on none: raises PeerError if only another host failed.

    `read` and `read_here` both return this host's part, without waiting for others.
    """
    groups: dict[tuple[Mesh, int], list[str]] = {}
    for name, leaf in abstract.items():
        if (axis := replica_axis(leaf)) is not None:
            groups.setdefault((leaf.sharding.mesh, axis), []).append(name)
    together = {name for names in groups.values() for name in names}
    with raise_on_all("reading a checkpoint"):
        loaded = read({name: leaf for name, leaf in abstract.items() if name not in together})
    for (mesh, axis), names in groups.items():
        loaded |= _load_once(read_here, {name: abstract[name] for name in names}, mesh, axis)
    return loaded


def replica_axis(leaf: jax.ShapeDtypeStruct) -> int | None:
    """Returns the mesh axis along which other hosts hold full copies of the array; None if there is none."""
    sharding = leaf.sharding
    if jax.process_count() == 1 or not isinstance(sharding, NamedSharding) or not _has_bits(leaf.dtype):
        return None
    assert isinstance(sharding.mesh, Mesh)
    used = {name for axes in sharding.spec for name in (axes if isinstance(axes, tuple) else (axes,))}
    free = [i for i, name in enumerate(sharding.mesh.axis_names) if name not in used]
    return next((i for i in free if len(_hosts(sharding.mesh, i)) > 1 and _apart(_hosts(sharding.mesh, i))), None)


def _load_once(read_here: Read, abstract: Arrays, mesh: Mesh, axis: int) -> Arrays:
    first = sorted(_hosts(mesh, axis)[0])
    replica = Mesh(np.take(mesh.devices, [0], axis), mesh.axis_names)
    there = {n: _on(leaf, replica) for n, leaf in abstract.items()}
    with raise_on_all(f"reading {list(abstract)[:3]} ..."):
        leaves = read_here(there) if jax.process_index() in first else {}
        stacked = {name: _stacked(leaves.pop(name, None), leaf, axis) for name, leaf in abstract.items()}
    return {name: _merge(leaf.sharding, leaf.dtype)(stacked[name]) for name, leaf in abstract.items()}


def _stacked(source: jax.Array | None, leaf: jax.ShapeDtypeStruct, axis: int) -> jax.Array:
    """Makes bits [replicas, *shape] on all devices: the bits of `source` on the first replica's hosts, zeros
    elsewhere.
    """
    assert isinstance(leaf.sharding, NamedSharding) and isinstance(
        leaf.sharding.mesh, Mesh
    )  # ensured by `replica_axis`
    mesh, spec = leaf.sharding.mesh, leaf.sharding.spec
    stacked = NamedSharding(mesh, PartitionSpec(mesh.axis_names[axis], *spec))
    shape = (mesh.devices.shape[axis], *leaf.shape)
    have = {} if source is None else {shard.device: shard.data for shard in source.addressable_shards}
    size, bits = leaf.sharding.shard_shape(leaf.shape), _bits(leaf.dtype)
    with jax.set_mesh(NO_MESH):  # each piece is on one device, independent of the caller's mesh
        pieces = [
            have[d].view(bits)[None] if d in have else jax.device_put(np.zeros((1, *size), bits), d)
            for d in stacked.addressable_devices
        ]
    return jax.make_array_from_single_device_arrays(shape, stacked, pieces)


@functools.lru_cache(maxsize=64)
def _merge(sharding: NamedSharding, dtype: Any) -> Callable[[jax.Array], jax.Array]:
    def merge(copies: jax.Array) -> jax.Array:
        return jnp.sum(copies, axis=0, dtype=copies.dtype).view(dtype)  # all but one are zero

    return jax.jit(merge, out_shardings=sharding, donate_argnums=0)


def _bits(dtype: Any) -> np.dtype:
    return np.dtype(f"uint{8 * np.dtype(dtype).itemsize}")


def _has_bits(dtype: Any) -> bool:
    """Returns whether an element uses all bits of its bytes, at most 32."""
    narrow_or_wide = is_narrow(dtype) or np.dtype(dtype).itemsize > 4
    return not (narrow_or_wide or jnp.issubdtype(dtype, jnp.complexfloating))


def _hosts(mesh: Mesh, axis: int) -> list[set[int]]:
    """Returns the hosts of each replica along a mesh axis."""
    return [{d.process_index for d in np.take(mesh.devices, [i], axis).flat} for i in range(mesh.devices.shape[axis])]


def _apart(replicas: list[set[int]]) -> bool:
    return sum(map(len, replicas)) == len(set().union(*replicas))


def _on(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    assert isinstance(leaf.sharding, NamedSharding)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec))
