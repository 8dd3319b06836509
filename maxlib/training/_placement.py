"""Placement of batches and models on a mesh, or on the default device."""

import collections
import functools
import zlib
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from maxlib import distributed, nn, sharding
from maxlib.training._batch_checks import check_batch
from maxlib.training.losses import Batch


def batch_axes(x: Any) -> tuple[str | None, ...]:
    """Returns the axis names of an array of a batch: rows, then tokens where there are two axes."""
    return ("batch", "seq") if x.ndim == 2 else ("batch", *[None] * x.ndim)[: x.ndim]


def shard_batch(batch: dict[str, Any], layout: sharding.Layout | None) -> Batch:
    """Puts this host's rows on its devices, as their part of a global batch. Arrays on devices are returned unchanged.

    Processes whose devices share rows (stages of a pipeline, tensor or context parallelism wider than a host) must pass
    the same rows. They compare the first batch of a layout, so all processes must call this.

    Args:
        batch: Arrays with rows first (`B T` for token arrays), in dictionaries of any depth; always whole rows, even if
            the layout splits the tokens.
        layout: Layout of the global batch; None for the default device.

    Raises:
        TypeError: for a batch that is no dictionary, and for lists and other libraries' arrays in it.
        ValueError: for rows or tokens that do not divide over the mesh, or when processes pass different data for the
            same rows.
    """
    check_batch(batch)
    sharding.check_layout(layout)
    if layout is None:
        return jax.device_put(batch)
    mesh = layout.mesh
    count, held = _row_blocks(layout)
    here = held.get(jax.process_index(), (0,))
    _check_shared_rows(batch, layout)

    def put(path: Any, x: Any) -> jax.Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        sharding_of_batch = NamedSharding(mesh, layout.spec(*batch_axes(x), what=name))
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding_of_batch, x.ndim):
            return x
        x = np.asarray(x)
        shape = x.shape and (x.shape[0] * count // len(here), *x.shape[1:])
        try:
            return jax.make_array_from_process_local_data(sharding_of_batch, x, shape)
        except ValueError:
            degrees = {axis: size for axis, size in mesh.shape.items() if size > 1}
            raise ValueError(
                f"the batch's {name} ({x.shape} on this host) must divide over the mesh {degrees} as "
                f"{sharding_of_batch.spec} says: choose a batch size that is a multiple of those degrees, or another mesh"
            ) from None

    return jax.tree_util.tree_map_with_path(put, batch)


@functools.lru_cache
def _row_blocks(layout: sharding.Layout) -> tuple[int, dict[int, list[int]]]:
    """Counts the blocks into which a layout splits a batch's rows, and lists the blocks of each process."""
    count, held = layout.axis_size("batch"), collections.defaultdict(set)
    rows = NamedSharding(layout.mesh, layout.spec("batch"))
    for device, (block,) in rows.devices_indices_map((count,)).items():
        held[device.process_index].add(block.start or 0)
    return count, {process: sorted(blocks) for process, blocks in held.items()}


_compared: set[sharding.Layout] = set()


def _check_shared_rows(batch: Any, layout: sharding.Layout) -> None:
    """Raises ValueError in all processes if some pass different data for the same rows of a layout's first batch."""
    count, held = _row_blocks(layout)
    if layout in _compared or sum(map(len, held.values())) == count:
        return
    _compared.add(layout)
    arrays = [np.asarray(x) for x in jax.tree.leaves(batch) if not _is_global(x) and np.ndim(x)]
    mine = held.get(jax.process_index(), [])
    parts = zip(*(np.array_split(x, len(mine)) for x in arrays), strict=True) if mine else ()
    sums = [f"{zlib.crc32(b''.join(x.tobytes() for x in part)):08x}" for part in parts]
    seen: dict[int, tuple[int, str]] = {}
    for process, said in enumerate(distributed.allgather_json(list(zip(mine, sums, strict=False)))):
        for block, checksum in said:
            first, other = seen.setdefault(block, (process, checksum))
            if checksum != other:
                raise ValueError(
                    f"processes {first} and {process} hold the same rows of a batch on the mesh {dict(layout.mesh.shape)}, but "
                    "were given different ones. Give each process the rows that its devices hold: data.Loader does so in "
                    "a Trainer, or after loader.follow(NamedSharding(mesh, layout.spec('batch')))"
                )


def _is_global(x: Any) -> bool:
    return isinstance(x, jax.Array) and not x.is_fully_addressable


def place_like_parameters(tree: Any, params: dict[str, Any], rest: Any, *, optimizer: bool = False) -> Any:
    """Constrains gradients, moments and other arrays of a parameter's rank to its sharding, as far as their sizes
    divide; everything else is replicated.

    Without this XLA chooses the sharding, and may gather a gradient or reshard a donated buffer.

    Args:
        tree: Arrays, keyed by parameter paths at some level.
        params: Trained parameters by path.
        rest: The rest of the model, with the axis names.
        optimizer: True uses the sharding of the parameter's optimizer state instead.
    """
    if sharding.current() is None:
        return tree
    specs = specs_like_parameters(tree, params, rest, optimizer=optimizer)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)


def specs_like_parameters(tree: Any, params: dict[str, Any], rest: Any, *, optimizer: bool = False) -> Any:
    """Returns the spec of every array of `tree` under the active layout; see `place_like_parameters`."""
    layout = sharding.current()
    assert layout is not None
    names = nn.tree.axes(rest)
    spec_of = layout.optimizer_spec if optimizer else layout.parameter_spec

    def spec(path: Any, leaf: Any) -> P:
        spec = P()
        for name in (getattr(part, "key", None) for part in path):
            if name in params and leaf.ndim == params[name].ndim:
                spec = spec_of(names[name], params[name].shape, path=name)
                if leaf.shape != params[name].shape:  # such as scales of blocks, or one number for each row
                    spec, _ = sharding.layers.drop_uneven(spec, leaf.shape, layout.mesh)
        return spec

    return jax.tree_util.tree_map_with_path(spec, tree)


def place_beside(tree: Any, params: dict[str, Any]) -> Any:
    """Commits arrays to the device to which the parameters are committed, if it is one and no layout is active.

    A program with one committed input commits all its outputs. So a step whose first state is committed in part gets
    another kind of state at the second step, and would be compiled twice.
    """
    fixed = [x for x in params.values() if isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed]
    devices = {device for x in fixed for device in x.sharding.device_set}
    if sharding.current() is not None or len(devices) != 1:
        return tree
    (device,) = devices

    def commit(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, Tracer) or x.committed:
            return x
        return jax.device_put(x, SingleDeviceSharding(device, memory_kind=x.sharding.memory_kind))

    return jax.tree.map(commit, tree)


def host_rows(batch: Batch) -> Batch:
    """Returns this host's whole rows of a batch, before or after `shard_batch`; all processes must call it."""

    def rows(x: Any) -> Any:
        if not _is_global(x):
            return x
        mesh, spec = x.sharding.mesh, P(*x.sharding.spec[:1])
        assert isinstance(mesh, Mesh)  # of shard_batch
        all_tokens = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, spec))(x)
        return multihost_utils.global_array_to_host_local_array(all_tokens, mesh, spec)

    return jax.tree.map(rows, batch)


def copy_model(model: Any, layout: sharding.Layout | None = None) -> Any:
    """Returns the model with arrays of its own, with the layout's shardings; a step deletes those of its state.

    Args:
        model: A module, or a pytree of them.
        layout: None for the default device.

    Raises:
        ValueError: when a parameter occurs twice in the model (`self.head = self.embed`).
    """
    sharding.check_no_aliases(model)

    def copied(x: Any, to: Any) -> Any:
        if to is not None and not to.is_fully_addressable and getattr(x, "is_fully_addressable", True):
            return jax.device_put(np.array(x), to)  # of several processes, each of which has the whole array
        # To more devices, `device_put` may share the buffer on the first of them whatever `may_alias` says.
        copy = jax.device_put(x, getattr(x, "sharding", None), may_alias=False)
        return copy if to is None else jax.device_put(copy, to)

    if layout is None:
        return jax.tree.map(lambda x: copied(x, None), model)
    return jax.tree.map(copied, model, sharding.shardings(model, layout))
