"""Storage with orbax: steps on disk, written in the background and read in pieces.

Orbax and tensorstore are imported where a checkpoint is read or written: they take a tenth of the imports of a run.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import os
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from etils import epath

from maxlib.checkpoint import _replicas as replicas
from maxlib.checkpoint import _s3
from maxlib.distributed import PeerError, raise_on_all

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


_saves = itertools.count()
_PHASES = ("async_write_complete", "async_commit_complete")  # as orbax calls them


class SaveBarrier:
    """Barriers of orbax's asynchronous saves, its `barrier_sync_fn`.

    Orbax's threads wait at `_PHASES` when all arrays are written and when the step is committed. A host that fails
    would never arrive, and the others would wait for a timeout of 20 minutes. Here it arrives too, after storing its
    error at jax's coordinator, and the others raise PeerError as soon as their own part is done.
    """

    def __init__(self):
        self.start()

    def start(self) -> None:
        """Begins a save. All hosts must call it, in the same order."""
        self._name, self._thread = f"maxlib_save_{next(_saves)}", threading.get_ident()
        self._phase, self._failed = 0, False

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for all hosts.

        Args:
            key: Orbax's name for the barrier.
            timeout_ms: Milliseconds until the wait fails.

        Raises:
            PeerError: When another host's part of the save failed.
        """
        if jax.process_count() == 1:
            return
        if any(phase in key for phase in _PHASES):
            self._arrive(timeout_ms)
            self._check()
            return
        # Orbax's thread reaches its last barrier, which is neither of the two, while handling the error that ends it.
        error = sys.exc_info()[1] if threading.get_ident() != self._thread else None
        if error is not None and not self._failed and self._phase < len(_PHASES):
            self._tell(error)
            self._arrive(timeout_ms)
        _coordinator().wait_at_barrier(key, timeout_ms)

    def _arrive(self, timeout_ms: int) -> None:
        self._phase += 1
        _coordinator().wait_at_barrier(f"{self._name}_{self._phase}", timeout_ms)

    def _tell(self, error: BaseException) -> None:
        self._failed = True
        text = json.dumps([jax.process_index(), f"{type(error).__name__}: {error}"[:500]])
        _coordinator().key_value_set(f"{self._name}/{jax.process_index()}", text)

    def _check(self) -> None:
        if told := _coordinator().key_value_dir_get(self._name):
            self._failed = True
            process, error = json.loads(told[0][1])
            raise PeerError(f"saving failed in process {process}: {error}")


def _coordinator() -> Any:
    """Returns the client of jax's coordinator, which orbax uses too; it is not public."""
    from jax._src import distributed

    return distributed.global_state.client


class Steps:
    """Directory of one run's steps; one step is saved at a time.

    Args:
        directory: The run's directory.
        clean: True removes leftovers of killed saves.
    """

    def __init__(self, directory: epath.Path, *, clean: bool):
        import orbax.checkpoint.experimental.v1 as ocp

        self.directory = directory
        logging.getLogger("absl").addFilter(_without_traces)  # here, so that importing this module changes no logger
        if clean and jax.process_index() == 0:
            # Orbax would do this in the background, where a second removal fails all later saves.
            _remove_unfinished(directory)
        self._barrier = SaveBarrier()
        self._orbax = ocp.training.Checkpointer(directory, context=_context(self._barrier))
        self._deleted = 0  # deleted steps that orbax does not know about yet
        # Of the running save; it holds a thread and three descriptors until `result` is called.
        self._response: Any = None

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
                # More than orbax writes before its first barrier, at which others would wait if the disk is full.
                (probe / "space").write_bytes(bytes(1 << 16))
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
    directory = epath.Path(path)
    if str(directory).startswith(_s3.SCHEME):
        _s3.enable()
    return directory if "://" in str(directory) else directory.resolve()


def steps(directory: epath.Path) -> list[int]:
    """Lists the completely written steps, oldest first."""
    if not directory.is_dir():
        return []
    from orbax.checkpoint.path import step as step_names

    # Of the names alone: version 1 of orbax reads a file of every step, which another host may be deleting.
    return sorted(step.step for step in step_names.standard_name_format().find_all(directory))


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
    return replicas.load(
        functools.partial(_read, directory, item), functools.partial(read_here, directory, item), abstract
    )


def _read(directory: epath.Path, item: str, abstract: Arrays) -> Arrays:
    if not abstract:
        return {}
    import orbax.checkpoint.experimental.v1 as ocp

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
    import tensorstore

    base = urllib.parse.quote(str(directory / item), safe="/:")
    kvstore = {"driver": "ocdbt", "base": f"{base}/" if "://" in base else f"file://{base}/"}
    stores = {
        name: tensorstore.open({"driver": "zarr3", "kvstore": kvstore | {"path": f"{name}/"}}, open=True)
        for name in abstract
    }
    return {name: _piece(stores[name].result(), leaf) for name, leaf in abstract.items()}


def _piece(store: Any, leaf: jax.ShapeDtypeStruct) -> Any:
    if leaf.sharding is None:
        return store.read().result()
    places = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    reads = {device: store[index].read() for device, index in places.items()}
    pieces = [jax.device_put(read.result(), device) for device, read in reads.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, pieces)


def _context(barrier: SaveBarrier | None = None) -> Any:
    import orbax.checkpoint.experimental.v1 as ocp

    context = ocp.Context()
    if barrier is not None:  # orbax's first version of these options has the barrier, its present one hides it
        options = context.asynchronous.v0

        def with_barrier() -> Any:
            return dataclasses.replace(options(), barrier_sync_fn=barrier)

        context.asynchronous.v0 = with_barrier
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
