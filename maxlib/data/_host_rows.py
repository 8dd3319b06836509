"""Which shards and which rows of the global batch belong to a host."""

from typing import Any

import numpy as np


def host_shards(num_shards: int, *, host: int | None = None, num_hosts: int | None = None) -> range:
    """Returns the consecutive virtual shards that contain the rows of one host (default: this jax process).

    If the hosts do not divide the shards, some shards belong to two or more hosts.
    """
    host, num_hosts = _position(host, num_hosts)
    return range(host * num_shards // num_hosts, -(-(host + 1) * num_shards // num_hosts))


def _position(host: int | None, num_hosts: int | None) -> tuple[int, int]:
    if host is not None and num_hosts is not None:
        return host, num_hosts
    import jax

    return jax.process_index(), jax.process_count()


def equal_part(batch_size: int) -> range:
    """Returns this host's rows if all hosts have equally many."""
    host, num_hosts = _position(None, None)
    return range(host * batch_size // num_hosts, (host + 1) * batch_size // num_hosts)


def rows_of_process(sharding: Any, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of this process's devices, and those of them that no earlier process has."""
    import jax

    rows_only = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*sharding.spec[:1]))
    try:
        places = rows_only.devices_indices_map((batch_size,))
    except ValueError as error:
        raise ValueError(
            f"batch_size={batch_size} does not divide over the mesh {dict(sharding.mesh.shape)}."
        ) from error
    process = jax.process_index()
    mine, before = np.zeros((2, batch_size), bool)
    for device, index in places.items():
        mine[index] |= device.process_index == process
        before[index] |= device.process_index < process
    return np.flatnonzero(mine), np.flatnonzero(mine & ~before)
