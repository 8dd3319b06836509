"""The loader: returns this host's rows of every global batch, prefetched, with a state that any number of hosts can
resume.
"""

import functools
import math
import queue
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from jaxtyping import Bool

from maxlib._utils.text import ranges
from maxlib.data._bad_records import SkipBadRecords
from maxlib.data._reader import Reader, in_order, stop_readers, total

State = dict[str, Any]
Batch = dict[str, Any]  # arrays with rows first, in dictionaries of any depth and other pytrees


class Loader:
    """Iterates over this host's rows of the global batches.

    The global batch of `batch_size` rows is split into `num_shards` virtual shards with equal numbers of rows.
    `rows_of_shard(part)` makes the rows of one shard; `part` is the `slice` of its documents:

        Loader(lambda part: pack(documents[part], length=512), batch_size=8)

    Each jax process returns an equal part of the rows, and reads the shards that have them. The rows of a shard only
    depend on `num_shards`, never on the hosts, so a run may continue on another number of hosts with identical global
    batches. If the hosts do not divide `num_shards`, several hosts read the same shard, and each returns its own rows
    of it. Processes that share rows, such as the stages of a pipeline, return the same rows once the loader knows the
    sharding of the batch: `Trainer` calls `follow`.

    Iteration ends when every shard is exhausted, or after `num_batches`. A shard that ends earlier returns rows of
    padding, with `targets` of -1 and zeros elsewhere, so your own loss must ignore rows by their targets or
    `segment_ids`. Hosts do not communicate: for finite data, pass `num_shards=1`, which all hosts read to the same end,
    or `num_batches`. A thread prefetches each shard, because packing produces rows in bursts. At the end of the program
    the threads are asked to stop, never killed.

    Args:
        rows_of_shard: From a shard's slice to its rows. Those of a `grain.MapDataset`, such as `pad` returns, are read
            in order in the shard's thread.
        batch_size: Rows of the global batch.
        num_shards: Fixed for a run; by default the greatest common divisor of `batch_size` and 8.
        num_batches: Number of batches after which iteration ends; None continues to the end of the data.
        prefetch: Maximum number of prefetched batches per shard.
        timeout: Maximum seconds to wait for a batch; a longer wait is a `TimeoutError` with the reading threads'
            stacks.
        bad_records: The `SkipBadRecords` of the documents, whose count appears in `metrics()`.

    Attributes:
        rows: The global rows of this host's batches, in order.
        batches: Number of batches returned since the beginning of the data.
        wait_seconds: Total time that `next` has waited for data.
    """

    def __init__(
        self,
        rows_of_shard: Callable[[slice], grain.IterDataset | grain.MapDataset],
        *,
        batch_size: int,
        num_shards: int | None = None,
        num_batches: int | None = None,
        prefetch: int = 8,
        timeout: float = 300.0,
        bad_records: SkipBadRecords | None = None,
    ):
        if not callable(rows_of_shard):
            raise TypeError(
                "rows_of_shard must be a function from a slice to rows, such as lambda part: pack(documents[part], length=512), "
                f"got {type(rows_of_shard).__name__}."
            )
        num_shards = math.gcd(batch_size, 8) if num_shards is None else num_shards
        if num_shards < 1 or batch_size < 1 or batch_size % num_shards:
            raise ValueError(
                f"batch_size must be a positive multiple of num_shards, got batch_size={batch_size} and "
                f"num_shards={num_shards}: every shard owns the same number of rows."
            )
        if not (prefetch >= 1 and timeout > 0):  # nor NaN
            raise ValueError(f"prefetch must be at least 1 and timeout positive, got {prefetch} and {timeout}.")
        if num_batches is not None and not num_batches >= 0:
            raise ValueError(f"num_batches must be at least 0, or None to read all, got {num_batches}.")
        self._rows_of_shard, self._batch_size, self.num_shards = rows_of_shard, batch_size, num_shards
        self._num_batches, self._prefetch, self._timeout = num_batches, prefetch, timeout
        self.wait_seconds, self._bad_records = 0.0, bad_records
        self._readers: dict[int, Reader] = {}
        weakref.finalize(self, stop_readers, self._readers)  # a forgotten loader stops its threads
        self._set_rows(_equal_share(batch_size))
        self._counted_rows, self._num_hosts = self.rows, _num_processes()

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        if self._num_batches is not None and self.batches >= self._num_batches:
            raise StopIteration
        self._check_rows()
        self._collect()
        batches = [self._ready[s][0] for s in self.shards]
        self._counts = {s: self._ready[s][2] for s in self.shards}
        if all(batch is None for batch in batches):
            self._check_end()
        joined = self._join(batches)
        self._states = {s: self._ready[s][1] for s in self.shards}
        for s in [s for s, ready in self._ready.items() if ready[0] is not None]:
            del self._ready[s]
            # Only now, because reading threads would compete with this one for the interpreter.
            self._readers[s].room.release()
        self.batches += 1
        return joined

    def metrics(self) -> dict[str, float]:
        """Returns counts of what this host's shards have read since the beginning of the data.

        For example `data/tokens/web` of a mixture, `data/dropped_documents` of packing, `data/bad_records` of
        `SkipBadRecords`. Packing reads ahead, so counts may be ahead of the batches; a resumed run counts as if never
        stopped.
        """
        size = self._batch_size // self.num_shards
        # If several hosts read a shard, the one with its first row counts it.
        counted = (c for s, c in self._counts.items() if s * size in self._counted_rows)
        counts: dict[str, float] = {**total(counted)}
        if self._bad_records is not None:
            counts["bad_records"] = len(self._bad_records)
        return {f"data/{name}": count for name, count in counts.items()}

    def follow(self, sharding: Any) -> None:
        """Returns the rows of this process's devices from now on. Call it before the first batch, as `Trainer` does.

        Args:
            sharding: A `jax.sharding.NamedSharding` of the batch.

        Raises:
            ValueError: when the loader has already returned batches of other rows, or `batch_size` does not divide over
                the mesh.
        """
        rows, counted = _rows_of_process(sharding, self._batch_size)
        self._num_hosts = 1  # rows follow the mesh: there are no equal shares to check
        if not np.array_equal(rows, self.rows):
            if self.batches:
                raise ValueError(
                    f"This process's devices hold the rows {', '.join(ranges(rows))} of each global batch, but its loader "
                    f"returns {', '.join(ranges(self.rows))}: let the loader follow the mesh before its first batch."
                )
            self._set_rows(rows)
        self._counted_rows = counted

    def get_state(self) -> dict[str, State]:
        """Returns the position after the last returned batch: a JSON-compatible dict for each shard of this host.

        The union of all hosts' states, `a | b | ...`, is the state of the run.
        """
        common = {"num_shards": self.num_shards, "batch_size": self._batch_size, "batches": self.batches}
        return {str(s): {**common, "iterator": self._states[s]} for s in self.shards}

    def set_state(self, state: Mapping[str, State]) -> None:
        """Continues from `state`, which may include shards of other hosts.

        Raises:
            ValueError: when a shard of this host is missing, the shards are at different batches, or the state has
                another `num_shards` or `batch_size`.
        """
        self._start(*self._checked(state))

    def reset(self) -> None:
        """Goes back to the first batch."""
        self._start(0, dict.fromkeys(self.shards))

    def close(self) -> None:
        """Stops prefetching. The loader keeps its position and continues reading at the next batch."""
        stop_readers(self._readers)
        self._ready = {}

    def _set_rows(self, rows: np.ndarray) -> None:
        """Returns these rows from the first batch on."""
        size = self._batch_size // self.num_shards
        self.rows, self.shards = rows, sorted({int(row) // size for row in rows})
        self._returned = np.isin([s * size + i for s in self.shards for i in range(size)], rows)
        self.reset()

    def _start(self, batches: int, states: dict[int, Any]) -> None:
        self.close()
        self.batches, self._states = batches, states
        self._counts: dict[int, dict[str, int]] = {}
        self._padding_row: Batch | None = None

    def _check_rows(self) -> None:
        """Raises ValueError on all hosts if some of them have no rows."""
        if self._batch_size < self._num_hosts:
            raise ValueError(
                f"Every process returns an equal part of each global batch, but there are {self._num_hosts} processes for "
                f"batch_size={self._batch_size}: use at least as many rows; or, where processes share rows or each trains alone, "
                "let the loader follow the layout (`training.follow_layout`)."
            )

    def _collect(self) -> None:
        """Waits until every shard of this host has its next batch; batches that have arrived are kept if the wait is
        interrupted.
        """
        if not self._readers:
            for s in self.shards:
                self._readers[s] = Reader(self._shard_batches(s), self._states[s], self._prefetch)
        begin = time.perf_counter()
        try:
            for s in self.shards:
                if s not in self._ready:
                    self._ready[s] = self._wait(s, begin + self._timeout)
        finally:
            self.wait_seconds += time.perf_counter() - begin

    def _wait(self, shard: int, deadline: float) -> tuple[Batch | None, Any, dict[str, int]]:
        reader = self._readers[shard]
        try:
            item = reader.ready.get(timeout=max(0.0, deadline - time.perf_counter()))
        except queue.Empty:
            raise TimeoutError(
                f"No data within {self._timeout:g} s: waited for batch {self.batches} of shard {shard} of "
                f"{self.num_shards}. Its reader stands at\n{reader.where()}"
                "If the data is slow rather than stuck, raise timeout= or prefetch=."
            ) from None
        if isinstance(item, BaseException):
            self.close()
            item.add_note(f"While reading batch {self.batches} of data shard {shard} of {self.num_shards}.")
            raise item
        return item

    def _shard_batches(self, shard: int) -> Callable[[], grain.IterDataset]:
        rows, part, size = self._rows_of_shard, slice(shard, None, self.num_shards), self._batch_size // self.num_shards
        return lambda: in_order(rows(part)).batch(size, drop_remainder=False)

    def _check_end(self) -> None:
        """Ends the iteration when every shard of this host is exhausted; otherwise exhausted shards return padding."""
        everything = len(self.shards) == self.num_shards
        if self._num_batches is None and everything and self.batches > 0:
            raise StopIteration
        if self._padding_row is None:
            raise ValueError(
                f"The shards {self.shards} of {self.num_shards} have no rows: their documents are exhausted, empty or "
                "all filtered out. Use fewer shards or more documents."
            )
        if self._num_batches is None:
            raise RuntimeError(
                f"This host's shards {self.shards} ended after {self.batches} batches while other hosts may go on: "
                "repeat the documents, or pass num_shards=1, which every host reads to the same end, or num_batches=, "
                "up to which an exhausted host returns rows of padding."
            )

    def _join(self, batches: list[Batch | None]) -> Batch:
        """Joins one batch of all shards, filled up with rows of padding."""
        example = next((batch for batch in batches if batch is not None), None)
        if example is not None:
            self._padding_row = _make_padding_row(example)
        assert self._padding_row is not None  # ensured by _check_end
        return _join_shards(batches, self._batch_size // self.num_shards, self._padding_row, self._returned)

    def _checked(self, state: Mapping[str, State]) -> tuple[int, dict[int, Any]]:
        self._check_rows()
        missing = [s for s in self.shards if str(s) not in state]
        if missing:
            raise ValueError(
                f"The data state lacks the shards {missing} of {self.num_shards}; it has {sorted(state)}. The number of "
                "shards is fixed for a run: use the num_shards it began with, and combine the states of all hosts."
            )
        mine = [state[str(s)] for s in self.shards]
        for name, here in (("batch_size", self._batch_size), ("num_shards", self.num_shards)):
            if any(shard[name] != here for shard in mine):
                raise ValueError(
                    f"The data state has {name}={mine[0][name]}, but this loader has {name}={here}: a run must keep "
                    "the value it began with; start another run in a new directory."
                )
        batches = {shard["batches"] for shard in mine}
        if len(batches) > 1:
            raise ValueError(
                f"The shards of the data state are at different batches {sorted(batches)}: use the states of one step."
            )
        return batches.pop(), {s: state[str(s)]["iterator"] for s in self.shards}


def _num_processes() -> int:
    import jax

    return jax.process_count()


def _equal_share(batch_size: int) -> np.ndarray:
    """Returns this process's rows if all have equally many."""
    import jax

    process, count = jax.process_index(), _num_processes()
    return np.arange(process * batch_size // count, (process + 1) * batch_size // count)


def _rows_of_process(sharding: Any, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
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


def _make_padding_row(batch: Batch) -> Batch:
    """Returns a batch with one row of padding: -1 in `targets`, and zeros in other arrays, such as `segment_ids`."""
    return _map_by_name(lambda name, a: np.full_like(a[:1], -1 if name == "targets" else 0), batch)


def _join_shards(
    batches: Sequence[Batch | None], size: int, blank: Batch, returned: Bool[np.ndarray, " rows"]
) -> Batch:
    """Joins the batches of shards, each filled up to `size` rows.

    Args:
        batches: One batch per shard; None for an exhausted shard.
        size: Rows of a shard.
        blank: The row of padding.
        returned: Selects rows of the joined batch, of `len(batches) * size`.
    """

    def fill(array: np.ndarray, blank: np.ndarray) -> np.ndarray:
        missing = size - len(array)
        return np.concatenate([array, np.repeat(blank, missing, axis=0)]) if missing else array

    def join(name: str, blank: np.ndarray, *arrays: np.ndarray) -> np.ndarray:
        return np.concatenate([fill(array, blank) for array in arrays])[returned]

    return _map_by_name(join, blank, *(blank if batch is None else batch for batch in batches))


def _map_by_name(function: Callable[..., Any], *batches: Batch) -> Batch:
    """Maps `function(name, *arrays)` over the arrays of batches, which may be in dictionaries of any depth and in other
    pytrees, such as `nn.vision.Patches`, whose arrays have its name.
    """
    import jax

    def map_entry(name: str) -> Any:
        entries = [batch[name] for batch in batches]
        if isinstance(entries[0], Mapping):
            return _map_by_name(function, *entries)
        return jax.tree.map(functools.partial(function, name), *entries)

    return {name: map_entry(name) for name in batches[0]}
