"""Storage with orbax: steps on disk, written in the background and read in pieces."""

import contextlib
import dataclasses
import functools
import logging
import os
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp
import tensorstore
from etils import epath
from orbax.checkpoint.path import step as step_names

from maxlib.checkpoint import _replicas as replicas
from maxlib.checkpoint import _s3, _tensorstore_leaks
from maxlib.checkpoint._barrier import SaveBarrier
from maxlib.distributed import raise_on_all

Arrays = dict[str, Any]


def forget_listings(directory: epath.Path) -> None:
    """Clears cached listings of a bucket, because other hosts and tensorstore also write there."""
    # etils keeps one client per scheme, and fsspec's clients cache listings; local disks have no client.
    filesystem_of = getattr(getattr(directory, "_backend", None), "fs", None)
    if filesystem_of is not None:
        filesystem_of(directory).invalidate_cache()


class _WithoutTraces(logging.Filter):
    """Filters the stack traces that orbax logs in every thread of a failed save; the error is raised anyway."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not ("orbax" in record.pathname and (record.exc_info or "run() raised" in str(record.msg)))


_without_traces = _WithoutTraces()


class Steps:
    """Directory of one run's steps; one step is saved at a time.

    Args:
        directory: The run's directory.
        clean: True removes leftovers of killed saves.
    """

    def __init__(self, directory: epath.Path, *, clean: bool):
        self.directory = directory
        logging.getLogger("absl").addFilter(_without_traces)  # here, so that importing this module changes no logger
        _tensorstore_leaks.avoid()
        if clean and jax.process_index() == 0:
            _remove_unfinished(
                directory
            )  # orbax would do this in the background, where a second removal fails all later saves
        self._barrier = SaveBarrier()
        self._orbax = ocp.training.Checkpointer(directory, context=_context(self._barrier))
        self._deleted = 0  # deleted steps that orbax does not know about yet
        self._response: Any = (
            None  # of the running save; it holds a thread and three descriptors until `result` is called
        )

    def save(self, step: int, arrays: dict[str, Arrays], texts: dict[str, Callable[[], str]]) -> None:
        """Writes `arrays` by item, and texts, which are functions called in the background, to `<name>/<name>.json`,
        atomically.
        """
        self._check_possible(step)
        self._barrier.start()
        items = {name: leaves for name, leaves in arrays.items() if leaves}  # orbax refuses an empty one
        files = {name: _Text(f"{name}.json", make) for name, make in texts.items()}
        self._response = self._orbax.save_checkpointables_async(step, items | files, force=True)

    def _check_possible(self, step: int) -> None:
        """Raises on all hosts or on none: orbax would wait for a host that cannot create the directory, and leaks
        half-made event loops if it runs out of file descriptors.
        """
        with raise_on_all("making its directory"):
            _check_descriptors()
            if jax.process_index() == 0 and jax.process_count() > 1:
                probe = self.directory / f"{step}.orbax-checkpoint-tmp-probe"
                probe.mkdir(parents=True, exist_ok=True)
                probe.rmtree(missing_ok=True)  # in object stores the directory may not exist

    def wait(self) -> None:
        """Waits for the running save, if any, and raises its error. Any thread may call it."""
        response, self._response = self._response, None
        if response is not None:
            response.result()  # ends its event loop and thread for any result

    def make_room(self, step: int) -> None:
        """Deletes a step before it is saved again. All hosts must call it."""
        with raise_on_all(f"deleting step {step}"):
            self.delete([step])
        self._orbax.reload()

    def close(self) -> None:
        """Ends the running save, if any, and orbax's threads. Errors of a save are not raised again."""
        self._settle()
        self._orbax.close()

    def _settle(self) -> None:
        """Waits silently, also for a save that could not be started; orbax reports an error once per thread."""
        for wait in (self.wait, self._orbax.wait):
            with contextlib.suppress(Exception):
                wait()

    def clean(self, step: int, patience: float = 10.0) -> None:
        """Removes leftovers of a failed save of `step`, which may fill the disk; other threads of the save may still
        write.
        """
        self._settle()
        end = time.monotonic() + patience
        while jax.process_index() == 0 and time.monotonic() < end:
            left = list(self.directory.glob(f"{step}.orbax-checkpoint-tmp*")) if self.directory.is_dir() else []
            if not left:
                return
            for path in left:
                with contextlib.suppress(OSError):
                    path.rmtree(missing_ok=True)
            time.sleep(0.05)

    def delete(self, steps: list[int]) -> None:
        """Deletes whole steps; orbax's own policies would do so before the new step is verified."""
        if jax.process_index() == 0:
            for step in steps:
                (self.directory / str(step)).rmtree(missing_ok=True)
        self._deleted += len(steps)
        if self._deleted >= 100:  # orbax keeps a list of all saved steps and searches it at every save
            self._deleted = 0
            self._orbax.reload()

    def set_aside(self, step: int) -> epath.Path:
        """Renames a step so that it no longer counts as a step. All hosts must call it."""
        aside = self.directory / f"{step}.damaged"
        with raise_on_all(f"renaming step {step}"):
            if jax.process_index() == 0:
                if aside.exists():
                    aside.rmtree()
                _s3.rename(self.directory / str(step), aside)
        self._orbax.reload()
        return aside


def absolute(path: Any) -> epath.Path:
    """Resolves `path` from the root of its file system; a URL such as "gs://bucket/run" is returned as it is."""
    found = epath.Path(path)
    if str(found).startswith(_s3.SCHEME):
        _s3.enable()
    return found if "://" in str(found) else found.resolve()


def steps(directory: epath.Path) -> list[int]:
    """Lists the completely written steps, oldest first."""
    if not directory.is_dir():
        return []
    # Of the names alone: version 1 of orbax reads a file of every step, which another host may be deleting.
    return sorted(found.step for found in step_names.standard_name_format().find_all(directory))


def _remove_unfinished(directory: epath.Path) -> None:
    """Removes leftovers of killed saves: by name if directories can be renamed, else all incomplete steps."""
    complete, renames = {str(step) for step in steps(directory)}, "://" not in str(directory)
    for path in directory.iterdir() if directory.is_dir() else ():
        number, _, rest = path.name.partition(".")
        killed = rest.startswith("orbax-checkpoint-tmp") or not (rest or renames or path.name in complete)
        if number.isdigit() and killed:
            path.rmtree(missing_ok=True)


def load(directory: epath.Path, item: str, abstract: Arrays) -> Arrays:
    """Reads leaves of one item to the sharding of a `jax.ShapeDtypeStruct`, or to numpy if it has none."""
    everywhere, here = functools.partial(_read, directory, item), functools.partial(read_here, directory, item)
    return replicas.load(everywhere, here, abstract)


def _read(directory: epath.Path, item: str, abstract: Arrays) -> Arrays:
    if not abstract:
        return {}
    want = {
        name: leaf if leaf.sharding is not None else np.empty(leaf.shape, leaf.dtype) for name, leaf in abstract.items()
    }
    context = _context()
    # Orbax's own wait for other hosts does not report failures; `replicas.load` does.
    context.multiprocessing.primary_host = jax.process_index()
    context.multiprocessing.active_processes = {jax.process_index()}
    with context:
        return dict(ocp.load_checkpointables(directory, {item: want})[item])


def read_here(directory: epath.Path, item: str, abstract: Arrays) -> Arrays:
    """Reads this host's part of each leaf, independently of other hosts."""
    base = urllib.parse.quote(str(directory / item), safe="/:")
    kvstore = {"driver": "ocdbt", "base": f"{base}/" if "://" in base else f"file://{base}/"}
    spec = lambda name: {"driver": "zarr3", "kvstore": kvstore | {"path": f"{name}/"}}
    stores = {name: tensorstore.open(spec(name), open=True) for name in abstract}
    return {name: _piece(stores[name].result(), leaf) for name, leaf in abstract.items()}


def _piece(store: Any, leaf: jax.ShapeDtypeStruct) -> Any:
    if leaf.sharding is None:
        return store.read().result()
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    reads = {device: store[index].read() for device, index in places.items()}
    pieces = [jax.device_put(read.result(), device) for device, read in reads.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def unreadable(directory: epath.Path, item: str, abstract: Arrays) -> list[str]:
    """Names the leaves that cannot be read individually. Either all hosts call it or none."""
    return [name for name, leaf in abstract.items() if not _readable(directory, item, name, leaf)]


def _readable(directory: epath.Path, item: str, name: str, leaf: jax.ShapeDtypeStruct) -> bool:
    try:
        load(directory, item, {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)})
    except Exception:  # tensorstore raises ValueError, orbax many kinds
        return False
    return True


def _context(barrier: SaveBarrier | None = None) -> ocp.Context:
    context = ocp.Context()
    if barrier is not None:  # orbax's first version of these options has the barrier, its present one hides it
        plain = context.asynchronous.v0
        context.asynchronous.v0 = lambda: dataclasses.replace(plain(), barrier_sync_fn=barrier)
    # Fail immediately if a directory cannot be created, instead of in five threads that wait minutes for it.
    context.asynchronous.create_directories_asynchronously = False
    context.pytree.loading.partial_load = True
    context.array.saving.use_compression = False  # compression saves 8 % and takes a third more time
    context.array.saving.array_metadata_store = None  # unused files; orbax would fail if one is damaged
    return context


class _Text:
    """A separate file within a step, whose text is created while writing, so that it may wait for the devices."""

    def __init__(self, name: str, make: Callable[[], str]):
        self._name, self._make = name, make

    async def save(self, directory: Any) -> Any:
        return self._write(directory)

    async def _write(self, directory: Any) -> None:
        directory = await directory.await_creation()
        if jax.process_index() == 0:
            (directory / self._name).write_text(self._make())

    async def load(self, directory: Any) -> Any:
        raise NotImplementedError("read it with records.read")


def _check_descriptors(needed: int = 48) -> None:
    """Raises OSError unless the process may open as many more files as a save does at once."""
    opened: list[int] = []
    try:
        for _ in range(needed):
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        raise OSError(
            error.errno,
            f"a save opens some {needed} files at once, and this process may open only {len(opened)} more: raise the "
            "limit (ulimit -n), or close what is open",
        ) from None
    finally:
        for descriptor in opened:
            os.close(descriptor)
