"""The protocol of loaders, and prefetching of batches to the devices while earlier steps run."""

import collections
import time
from collections.abc import Callable, Iterable, Mapping, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxlib import sharding
from maxlib.observability import collect_metrics
from maxlib.training._placement import shard_batch
from maxlib.training.losses import Batch


@runtime_checkable
class StatefulLoader(Protocol):
    """Protocol of loaders that return this host's rows of every batch; `maxlib.data.Loader` is one.

    A state is a dictionary of JSON values. Of several processes, a checkpoint joins the states by their names, and each
    process gets all of them back: what only one process reads has a name of its own, such as the number of its shard.

    If it has a method `metrics()`, its counts are written at every step; with several processes their sums, and the
    means of other numbers, are written at saves and evaluations. If it has a method `follow(sharding)`, a `Trainer` of
    several processes calls it with the sharding of the batch, before anything is read.
    """

    def __next__(self) -> dict[str, np.ndarray]: ...
    def reset(self) -> None: ...
    def get_state(self) -> dict[str, Any]: ...
    def set_state(self, state: Any) -> None: ...


class IterableLoader:
    """Loader of any iterable of batches, such as a list or a generator. Its state is the number of batches read.

    To continue from a state it begins the iterable anew and drops that many batches. A generator cannot begin anew: a
    resumed run needs a new one, with the same batches.

    Args:
        batches: This host's rows of every batch.
    """

    def __init__(self, batches: Iterable[Batch]):
        self.batches, self._iterator = batches, iter(batches)
        self._read, self._last, self._again = 0, {}, False

    @property
    def is_one_pass(self) -> bool:
        """Returns True for a generator or another iterator, which cannot begin anew."""
        return iter(self.batches) is self.batches

    def __next__(self) -> Batch:
        if not self._again:
            self._last = next(self._iterator)
        self._read, self._again = self._read + 1, False
        return self._last

    def reset(self) -> None:
        if self.is_one_pass:
            raise ValueError(
                f"a {type(self.batches).__name__} cannot go back to its first batch: give a list of batches, or a loader "
                "such as data.Loader"
            )
        self._iterator, self._read, self._again = iter(self.batches), 0, False

    def get_state(self) -> dict[str, int]:
        return {"batches": self._read}

    def set_state(self, state: Any) -> None:
        read = state["batches"]
        if read == self._read - 1 and not self._again:  # the last batch was read, but not used
            self._read, self._again = read, True
            return
        if read < self._read:
            self.reset()
        while self._read < read:
            if next(self, None) is None:
                raise ValueError(
                    f"the run has read {read} batches, but this {type(self.batches).__name__} ends after {self._read}: a "
                    "resumed run needs the batches that it began with"
                )


def as_loader(loader: Any, name: str) -> StatefulLoader:
    """Returns a loader with a state, made of an iterable if needed.

    Raises:
        TypeError: for anything else; `name` is the argument's name.
        ValueError: for an empty list.
    """
    if isinstance(loader, StatefulLoader):
        return loader
    if not isinstance(loader, Iterable) or isinstance(loader, str | Mapping):
        raise TypeError(
            f"{name} must be a loader, such as data.Loader, or an iterable of batches, such as a list; got "
            f"{type(loader).__name__}"
        )
    if isinstance(loader, Sized) and len(loader) == 0:
        raise ValueError(f"{name} must have at least one batch, got an empty {type(loader).__name__}")
    return IterableLoader(loader)


@runtime_checkable
class Follows(Protocol):
    """Protocol of loaders that can return the rows of a process's devices."""

    def follow(self, sharding: Any) -> None: ...


def follow_layout(loader: Any, layout: sharding.Layout | None) -> None:
    """Tells a loader that can choose its rows to return those of this process's devices.

    Args:
        loader: Any loader; without a method `follow` nothing happens.
        layout: Layout of the batches.
    """
    if layout is not None and jax.process_count() > 1 and isinstance(loader, Follows):
        loader.follow(NamedSharding(layout.mesh, layout.spec("batch")))


class Prefetch:
    """Loader that copies batches to the devices `size` batches ahead of the loop.

    Copies are asynchronous, so no thread is needed for them. With `in_thread` the loader itself runs in a thread while
    the loop computes: completions are then sampled while the model trains, with weights that are `size` steps old
    (docs/guides/post-training.md).

    `get_state` is the state after the last returned batch, not after the prefetched ones, which a resumed run reads
    again.

    Args:
        loader: See `Trainer`; `metrics()` are those of the last returned batch.
        layout: As in `Trainer`.
        size: Number of batches ahead.
        in_thread: True reads batches in a thread, one at a time; contexts such as `jax.set_mesh` do not reach it.
        before_read: Called in the loop's thread before each batch is read, such as to hand weights to a sampler; what
            it hands over must be a copy, because the next step takes the state's arrays.

    Attributes:
        wait_seconds: Total time that `next` has waited for the loader, also the metric `data/wait_seconds`.
    """

    def __init__(
        self,
        loader: StatefulLoader | Iterable[Batch],
        *,
        layout: sharding.Layout | None = None,
        size: int = 2,
        in_thread: bool = False,
        before_read: Callable[[], Any] | None = None,
    ):
        if size < 1:
            raise ValueError(f"size must be at least 1, got {size}")
        self.loader, self.wait_seconds = as_loader(loader, "loader"), 0.0
        self._layout, self._size, self._before_read = layout, size, before_read
        self._thread = ThreadPoolExecutor(1, "prefetch") if in_thread else None
        self._ahead: collections.deque[Future] = collections.deque()
        follow_layout(loader, layout)
        self._begin()

    def __iter__(self) -> "Prefetch":
        return self

    def __next__(self) -> Batch:
        self._read_ahead()
        begin = time.perf_counter()
        try:
            entry = self._ahead.popleft().result() if self._ahead else None
        finally:
            self.wait_seconds += time.perf_counter() - begin
        if entry is None:
            self._ended = True
            raise StopIteration
        batch, self._state, self._metrics = entry
        if self._thread is not None:  # the next batch is read while the caller computes with this one
            self._read_ahead()
        return batch

    def follow(self, sharding: Any) -> None:
        if isinstance(self.loader, Follows):
            self.loader.follow(sharding)
        if not self._ahead:
            self._begin()

    def metrics(self) -> dict[str, Any]:
        return {**self._metrics, "data/wait_seconds": self.wait_seconds}

    def get_state(self) -> dict[str, Any]:
        return self._state

    def set_state(self, state: Any) -> None:
        self._drop()
        self.loader.set_state(state)
        self._begin()

    def reset(self) -> None:
        self._drop()
        self.loader.reset()
        self._begin()

    def _begin(self) -> None:
        self._drop()
        self._state, self._metrics, self._ended = self.loader.get_state(), {}, False

    def _drop(self) -> None:
        """Waits for the batch that is being read, so that nobody else moves the loader, and drops those ahead."""
        for future in self._ahead:
            if not future.cancel():
                future.exception()
        self._ahead.clear()

    def _read_ahead(self) -> None:
        while not self._ended and len(self._ahead) < self._size:
            if self._before_read is not None:
                self._before_read()
            self._ahead.append(self._submitted())

    def _submitted(self) -> Future:
        """Returns the next batch, read in the thread if there is one."""
        if self._thread is not None:
            return self._thread.submit(self._read)
        done, begin = Future(), time.perf_counter()
        try:
            done.set_result(self._read())
        finally:
            self.wait_seconds += time.perf_counter() - begin
        self._ended = done.result() is None
        return done

    def _read(self) -> tuple[Batch, Any, Mapping[str, Any]] | None:
        """Returns the next batch on the devices, and the loader's state and metrics after it; None at the end."""
        if (batch := next(self.loader, None)) is None:
            return None
        return shard_batch(batch, self._layout), self.loader.get_state(), collect_metrics(self.loader)
