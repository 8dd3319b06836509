"""A tier of checkpoints on the hosts' own disks, with copies on their peers."""

import functools
import math
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath

from maxlib import distributed
from maxlib.checkpoint import _policy as policy
from maxlib.checkpoint import _records as records
from maxlib.checkpoint import _restore as restore
from maxlib.checkpoint import _storage as storage
from maxlib.checkpoint._errors import DamagedError, SaveError
from maxlib.checkpoint._parts import Part, PartStore, ReadRange
from maxlib.checkpoint._tier import Tier, of_all_hosts

SECONDS = 60.0  # default interval between saves
Box = tuple[tuple[int, int], ...]  # start and stop along every axis of a leaf
Shard = tuple[str, str, Box, np.ndarray]  # item, path of the leaf, place in it, values


class Local(Tier):
    """Keeps the newest step near the devices, as a tier of `Tiers`: each host's shards on its disk and on a peer's.

    A lost host with its disk costs the steps since the last local save, as the peers have what it had. A step is
    complete when every process has written and copied its shards; then earlier local steps are deleted. `restore` may
    run with another number of processes, on another mesh: every process reads the shards that it needs from those
    that have them. All processes must make the same calls.

        Tiers(Local("/local/run", every=50), Checkpointer("gs://bucket/run", every=1000))

    Args:
        directory: Path on each host, on a disk or in memory (`/dev/shm/run`), with room for two steps of this host's
            shards and of those it keeps for its peers.
        every: Number of steps between saves.
        seconds: Seconds between saves; both may be given. The default, with neither, is a minute.
        peers: Number of other processes, on other hosts where possible, that keep a copy of this process's shards. As
            many hosts may be lost at once.
        max_failed_saves: Consecutive failed saves after which `unsaved` returns an error; None for no limit.
    """

    base = None

    def __init__(
        self,
        directory: Any,
        *,
        every: int | None = None,
        seconds: float | None = None,
        peers: int = 1,
        max_failed_saves: int | None = 3,
    ):
        positive = all(value is None or value > 0 for value in (every, seconds, max_failed_saves))
        if peers < 0 or not positive or "://" in str(directory):
            raise ValueError(
                "Local needs a path on this host, every, seconds and max_failed_saves above 0 and peers of at least 0; "
                f"got {directory}, {every}, {seconds}, {max_failed_saves} and {peers}."
            )
        when = policy.When(every, SECONDS if every is None and seconds is None else seconds)
        super().__init__(storage.absolute(directory), when, {}, max_failed_saves)
        try:
            self._store = PartStore(Path(self.directory), peers)
        except (OSError, distributed.PeerError) as error:
            raise SaveError(f"Checkpoints cannot be written to {self.directory}: {error}", step=0) from error
        self._thread = ThreadPoolExecutor(1, "maxlib-local")
        self._saved: int | None = None  # newest step that this object saved
        self._restored = False  # nothing was saved since a restore

    def save(
        self,
        step: int,
        items: Mapping[str, Any],
        *,
        data: Mapping[str, Any] | None = None,
        meta: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        overwrite: bool = True,
    ) -> None:
        """Copies this process's shards to host memory and starts to write them; see `Checkpointer.save`.

        A step that this object has already saved is not saved again, whatever `overwrite` is.

        Raises:
            SaveError: When the previous save failed; this one still runs.
        """
        failed = self._finish()
        if step != self._saved:
            meta, data = self._meta(step, meta, metrics), of_all_hosts(data)
            leaves = {item: records.flatten(tree) for item, tree in items.items()}
            raws = {item: {n: records.snapshot(x) for n, x in values.items()} for item, values in leaves.items()}
            described, shards = records.describe(leaves, raws), own_shards(raws)
            self._when.saved(step)
            self._restored = False
            self._saving = step, self._thread.submit(self._write, step, meta, data, described, shards)
        if failed is not None:
            raise failed

    def should_save(self, step: int) -> bool:
        """Returns whether a save is due after `step`; the first after a restore is, as copies may be lost."""
        return self._restored or super().should_save(step)

    def adopt(self, step: int) -> None:
        """Begins a new history after `step` was restored."""
        self._wait_quietly()
        self._saved, self._restored = None, True
        self._store.begin_run()
        self._when.saved(step)

    def steps(self) -> list[int]:
        """Lists the steps of which every shard exists on some host, oldest first, as of the last save's end."""
        return sorted(self._store.complete())

    def verify(self, step: int) -> list[str]:
        """Reads what this host has of a step and names the damaged leaves."""
        bad: list[str] = []
        for part in (part for part in self._store.held() if part.step == step):
            read_range = functools.partial(self._store.read_here, part)
            try:
                start, header = _read_header(part, read_range)
            except (OSError, DamagedError) as error:
                bad.append(str(error))
                continue
            for item, name, _, offset, size, crc in header["shards"]:
                if zlib.crc32(read_range(start + offset, size)) != crc:
                    bad.append(f"{item}: {name}")
        return sorted(set(bad))

    def _read(self, step: int, wanted: restore.Wanted) -> dict[str, Any]:
        complete = self._store.complete()
        if step not in complete:
            raise self._missing(step, [*complete])
        return restore.read_source(_Source(self.directory / str(step), self._store, complete[step]), wanted)

    def _release(self) -> None:
        self._thread.shutdown()
        self._store.close()

    def _write(self, step: int, meta: Any, data: Any, described: Any, shards: list[Shard]) -> None:
        """Writes this process's part, and copies it to the peers."""
        entries, offset = [], 0
        for item, name, box, array in shards:
            content = _bytes(array)
            entries.append([item, name, box, offset, content.nbytes, zlib.crc32(content)])
            offset += content.nbytes
        records_of_step = {"meta": meta, "data": data, "manifest": records.manifest(described), "shards": entries}
        header = records.to_text(records_of_step).encode()
        part = Part(step, self._store.run, jax.process_index(), jax.process_count())
        contents = [_bytes(array) for *_, array in shards]
        self._store.write(part, [len(header).to_bytes(8, "little"), header, *contents])
        self._store.copy(part)

    def _finish(self) -> SaveError | None:
        """Waits for the running save on all hosts, deletes the steps before it and returns its error, if any."""
        saving, self._saving = self._saving, None
        if saving is None:
            return None
        step, written = saving
        try:
            with distributed.raise_on_all("writing it"):
                written.result()
        except Exception as error:  # of the system or of another process
            return self._failed(step, error)
        self._failed_saves, self._saved = 0, step
        self._store.delete_others(step)
        self._store.refresh()
        return None


class _Source:
    """Reads a step from its parts, wherever they are."""

    def __init__(self, directory: epath.Path, store: PartStore, parts: list[Part]):
        self.directory, self._store, self._parts = directory, store, parts
        # Shards of each leaf: part, box, first byte, number of bytes, checksum.
        self._shards: dict[tuple[str, str], list[tuple[Part, Box, int, int, int]]] = {}

    def open(self) -> restore.StepRecords:
        """Reads the records of all parts. Raises DamagedError."""
        header: dict[str, Any] = {}
        self._shards.clear()
        for part in self._parts:
            try:
                start, header = self._store.read(part, functools.partial(_read_header, part))
            except OSError as error:
                raise DamagedError(str(error), leaves=(str(error),)) from error
            for item, name, box, offset, size, crc in header["shards"]:
                box = tuple((first, last) for first, last in box)
                self._shards.setdefault((item, name), []).append((part, box, start + offset, size, crc))
        return restore.StepRecords(header["manifest"]["items"], header["meta"], header["data"])

    def load(self, item: str, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves to their shardings, or to numpy arrays without one; on all hosts, or on none.

        Raises DamagedError with the leaves of which a shard is intact on no host.
        """
        leaves: dict[str, Any] = {}
        errors: dict[str, OSError] = {}
        with distributed.raise_on_all("reading a checkpoint"):
            for name, leaf in abstract.items():
                try:
                    leaves[name] = self._leaf(item, name, leaf)
                except OSError as error:
                    errors[name] = error
        unreadable = sorted({name for names in distributed.allgather_json([*errors]) for name in names})
        if unreadable:
            cause = next(iter(errors.values()), None)
            raise restore.damaged_step(self.directory, [f"{item}: {name}" for name in unreadable]) from cause
        return leaves

    def _leaf(self, item: str, name: str, leaf: jax.ShapeDtypeStruct) -> Any:
        if leaf.sharding is None:
            return self._box(item, name, leaf, tuple((0, size) for size in leaf.shape))
        values: dict[Box, np.ndarray] = {}

        def read(index: Any) -> np.ndarray:
            box = box_of(index, leaf.shape)
            if box not in values:  # devices may have copies
                values[box] = self._box(item, name, leaf, box)
            return values[box]

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    def _box(self, item: str, name: str, leaf: jax.ShapeDtypeStruct, box: Box) -> np.ndarray:
        """Assembles the part of a leaf inside `box` from the saved shards that overlap it."""
        values = np.empty([stop - start for start, stop in box], leaf.dtype)
        missing = values.size
        for part, saved, start, size, crc in {shard[1]: shard for shard in self._shards[item, name]}.values():
            common = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, saved, strict=True)]
            if any(a >= b for a, b in common):
                continue
            content = self._store.read(part, functools.partial(_read_shard, start, size, crc))
            shard = np.frombuffer(content, leaf.dtype).reshape([b - a for a, b in saved])
            values[_within(common, box)] = shard[_within(common, saved)]
            missing -= math.prod(b - a for a, b in common)
        if missing:
            raise OSError(f"{item}: {name} lacks {missing} values in {box}")
        return values


def own_shards(raws: Mapping[str, Mapping[str, Any]]) -> list[Shard]:
    """Copies the shards that this process saves to host memory.

    Of the copies of a leaf one is saved; which one changes from leaf to leaf, so that all hosts write as much.
    """
    shards: list[tuple[str, str, Box, Any]] = []
    for item, leaves in raws.items():
        for number, (name, raw) in enumerate(leaves.items()):
            if raw.size:
                shards += [(item, name, box, values) for box, values in _shards_of(raw, number)]
    for *_, values in shards:
        if isinstance(values, jax.Array):
            values.copy_to_host_async()
    return [(item, name, box, np.array(values, order="C")) for item, name, box, values in shards]


def _shards_of(raw: Any, number: int) -> Iterator[tuple[Box, Any]]:
    if not isinstance(raw, jax.Array):
        if jax.process_index() == 0:
            yield tuple((0, size) for size in raw.shape), raw
        return
    shard_size = math.prod(raw.sharding.shard_shape(raw.shape))
    copies = raw.sharding.num_devices * shard_size // raw.size
    for shard in raw.addressable_shards:
        if shard.replica_id == number % copies:
            yield box_of(shard.index, raw.shape), shard.data


def box_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns start and stop of each slice of an index into an array of this shape."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _within(inner: Any, outer: Any) -> tuple[slice, ...]:
    return tuple(slice(a - start, b - start) for (a, b), (start, _) in zip(inner, outer, strict=True))


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _read_header(part: Part, read_range: ReadRange) -> tuple[int, dict[str, Any]]:
    """Returns where a part's shards begin, and its records."""
    start = 8 + int.from_bytes(read_range(0, 8), "little")
    return start, records.parse(read_range(8, start - 8).decode(errors="replace"), str(part))


def _read_shard(start: int, size: int, crc: int, read_range: ReadRange) -> bytes:
    content = read_range(start, size)
    if zlib.crc32(content) != crc:
        raise DamagedError("its bytes differ from what was written")
    return content
