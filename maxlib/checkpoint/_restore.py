"""Restoring a step from disk: leaves are verified, regrouped for the current model, cast and placed."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from maxlib._utils.varying import NO_MESH
from maxlib.checkpoint import _records as records
from maxlib.checkpoint import _storage as storage
from maxlib.checkpoint._errors import DamagedError, shorten
from maxlib.checkpoint._groupings import Groupings, Target, match_leaves
from maxlib.distributed import PeerError, allgather_json, raise_on_all

_log = logging.getLogger(__name__)
_RECORDS = ("manifest", "meta", "data")
Restored = dict[str, Any]


def load(
    path: Any,
    like: dict[str, Any] | None = None,
    *,
    items: Sequence[str] | None = None,
    groupings: Groupings | None = None,
    cast: bool = False,
) -> dict[str, Any]:
    """Reads a checkpoint as `{item: ..., "data": ..., "meta": ...}`; `meta["step"]` is its step.

    Args:
        path: A step's directory, or a run's directory to read its newest undamaged step.
        like: A pytree of arrays or `jax.ShapeDtypeStruct`s for each wanted item; their shardings place the leaves (no
            sharding: the default device; numpy arrays stay on the host).
        items: Without `like`, the items to read as `{path: numpy array}`; default: all.
        groupings: Groupings of the current model's stacks (`nn.tree.groupings(model)`), for steps saved with another
            prefix or period.
        cast: True permits dtypes that differ from the saved ones.

    Raises:
        FileNotFoundError: When there is no checkpoint.
        DamagedError: When leaves differ from what was saved; it names them.
        ValueError: When the checkpoint belongs to another model; the message lists the differences.
    """
    path = storage.absolute(path)
    wanted = Wanted(like, items, groupings, cast)
    steps = storage.steps(path)
    if not steps:
        _check_exists(path)
        return read(path, wanted)
    steps = reversed(allgather_json(steps)[0])  # one list for all hosts
    return first_undamaged(((step, functools.partial(read, path / str(step), wanted)) for step in steps), path)


def verify(path: Any) -> list[str]:
    """Reads a whole step and names damaged leaves, such as `"params: layers.groups.0.0.attn.q.w"`."""
    return damaged_leaves(storage.absolute(path), host=0, hosts=1)


def damaged_leaves(directory: epath.Path, *, host: int | None = None, hosts: int | None = None) -> list[str]:
    """Verifies this host's part of the leaves. It does not communicate, so it may run in the background."""
    host = jax.process_index() if host is None else host
    hosts = hosts or jax.process_count()
    try:
        stored = open_step(directory)
    except DamagedError as error:
        return list(error.leaves)
    bad: list[str] = []
    for item, entries in stored.items.items():
        names = [name for name, entry in sorted(entries.items()) if records.is_stored(entry)][host::hosts]
        for group in _groups(names, entries):
            bad += [f"{item}: {name}" for name in _damaged_of(directory, item, {n: entries[n] for n in group})]
    return bad


def metrics(directory: epath.Path) -> dict[str, Any]:
    """Reads the metrics saved with a step; none if its records are damaged. Raises OSError if they cannot be read."""
    try:
        return records.read(directory / "meta" / "meta.json").get("metrics", {})
    except DamagedError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        return {}


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A restore request: items and the wanted arrays."""

    like: dict[str, Any] | None = None
    items: Sequence[str] | None = None
    groupings: Groupings | None = None
    cast: bool = False


@dataclasses.dataclass(frozen=True)
class StepRecords:
    """Records of a step.

    Attributes:
        items: Shape, dtype and checksum of every leaf, by item and path.
        meta: What was passed to `Checkpointer.save`, with the step and the groupings of stacks (`layouts`).
        data: State of the data iterators.
    """

    items: dict[str, dict[str, dict[str, Any]]]
    meta: dict[str, Any]
    data: Any


def first_undamaged(steps: Iterable[tuple[int, Callable[[], Restored]]], where: Any) -> Restored:
    """Reads the first of several steps that is undamaged, with a warning for each damaged one.

    Args:
        steps: The number of each step, and the function that reads it; the newest first.
        where: Their directory, for messages.
    """
    problems: list[str] = []
    for step, read_step in steps:
        try:
            restored = read_step()
        except DamagedError as error:
            _log.warning("%s\nTrying the step before.", error)
            problems.append(str(error))
            continue
        if problems:
            _log.warning("Restored step %d of %s; newer ones are damaged.", step, where)
        return restored
    if problems:
        raise DamagedError(f"{where} has no undamaged step left:{shorten(problems)}")
    raise FileNotFoundError(f"{where} holds no complete step of a checkpoint.")


def read_records(path: Any) -> StepRecords:
    """Reads the records of a step's directory, or of the newest step in a run's whose records are intact, but no
    arrays.

    Raises:
        FileNotFoundError: when there is no checkpoint.
        DamagedError: when the records differ from what was saved.
    """
    path = storage.absolute(path)
    for step in reversed(storage.steps(path)):
        with contextlib.suppress(DamagedError):
            return open_step(path / str(step))
    _check_exists(path)
    return open_step(path)


def _check_exists(path: epath.Path) -> None:
    if not any((path / name).exists() for name in _RECORDS):
        held = sorted(p.name for p in path.iterdir()) if path.is_dir() else "nothing: it is no directory"
        raise FileNotFoundError(
            f"{path} is neither a complete step of a checkpoint nor a directory of steps; it has {held}."
        )


def open_step(directory: epath.Path) -> StepRecords:
    """Reads a step's records and checks that its items exist. Raises DamagedError."""
    contents, bad = {}, []
    storage.forget_listings(directory)
    for name in _RECORDS:
        try:
            contents[name] = records.read(directory / name / f"{name}.json")
        except DamagedError as error:
            bad.append(f"{name}: {error}")
    if not bad:
        _check_format(directory, contents["manifest"])
        for item, entries in contents["manifest"]["items"].items():
            if any(map(records.is_stored, entries.values())) and not (directory / item).is_dir():
                bad.append(f"{item}: missing entirely")
    if bad:
        raise damaged_step(directory, bad)
    return StepRecords(contents["manifest"]["items"], contents["meta"], contents["data"])


@runtime_checkable
class Source(Protocol):
    """A stored step, whatever its files are."""

    @property
    def directory(self) -> epath.Path:
        """Returns its name in messages."""
        ...

    def open(self) -> StepRecords:
        """Reads the records. Raises DamagedError."""
        ...

    def load(self, item: str, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        """Reads leaves to their shardings, on all hosts or on none; to numpy if there is none.

        Raises DamagedError, the same on all hosts, when it knows which leaves cannot be read.
        """
        ...


@dataclasses.dataclass(frozen=True)
class _StepDirectory:
    """A step that orbax has written."""

    directory: epath.Path

    def open(self) -> StepRecords:
        return open_step(self.directory)

    def load(self, item: str, abstract: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        return storage.load(self.directory, item, abstract)


def read(directory: epath.Path, wanted: Wanted) -> dict[str, Any]:
    """Reads one step."""
    return read_source(_StepDirectory(directory), wanted)


def read_source(source: Source, wanted: Wanted) -> dict[str, Any]:
    """Reads and verifies the wanted items of a stored step."""
    stored = _open_everywhere(source)
    names = _items(source.directory, stored, wanted)
    restored: dict[str, Any] = {}
    for item in names:
        like = None if wanted.like is None else wanted.like[item]
        with jax.set_mesh(NO_MESH):  # leaves may be placed on one device, independent of the caller's mesh
            leaves = _read_item(source, item, stored, like, wanted)
        restored[item] = leaves if like is None else records.unflatten(like, leaves)
    return {**restored, "data": stored.data, "meta": stored.meta}


def _open_everywhere(source: Source) -> StepRecords:
    """Opens the step, which must succeed on all hosts or on none, so that they do not continue with
    different steps.
    """
    try:
        with raise_on_all("reading its records"):
            return source.open()
    except PeerError as error:
        raise damaged_step(source.directory, [f"seen on another host: {error}"]) from error


def _read_item(source: Source, item: str, stored: StepRecords, like: Any, wanted: Wanted) -> dict[str, Any]:
    entries = stored.items[item]
    if like is None:
        leaves = _load(source, item, entries, {})
        return {name: leaf.astype(jnp.dtype(entries[name]["dtype"])) for name, leaf in leaves.items()}
    leaves = records.flatten(like)
    raws = {name: _raw(leaf) for name, leaf in leaves.items()}
    old, new = stored.meta["layouts"], wanted.groupings
    if any(isinstance(grouping, Mapping) for grouping in old.values()):
        raise ValueError(
            f"{source.directory} was saved by 0.1.0.dev0, which grouped layers in another way: export it with that "
            "version (`save_pretrained`) and load the export"
        )
    if not new or new == old:  # leaf by leaf
        old = new = {}
    targets = match_leaves(entries, old, raws, new, where=f"item {item!r} of {source.directory}", cast=wanted.cast)
    loaded = _load(source, item, entries, _shardings(targets))
    made = {name: _cast(_assemble(target, loaded), target.raw) for name, target in targets.items()}
    return {name: _as(leaf, leaves[name], entries, targets[name]) for name, leaf in made.items()}


def _shardings(targets: dict[str, Target]) -> dict[str, Any]:
    """Returns the sharding in which to read each stored leaf, that of the first target that needs it."""
    shardings: dict[str, Any] = {}
    for target in targets.values():
        for name, row in target.pieces:
            shardings.setdefault(name, _with_rows(target.raw.sharding, target.rows, row is not None))
    return shardings


def _with_rows(sharding: Any, has: bool, needs: bool) -> Any:
    """Returns the sharding of the same leaf with or without its layer axis."""
    if not isinstance(sharding, NamedSharding) or (not has and not needs):
        return sharding
    layer_axes = tuple(sharding.spec)[1:] if has else tuple(sharding.spec)
    spec = PartitionSpec(None, *layer_axes) if needs else PartitionSpec(*layer_axes)
    return NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def _load(source: Source, item: str, entries: dict, shardings: dict[str, Any]) -> dict[str, Any]:
    """Reads and verifies all leaves of an item in their saved form; to numpy if no sharding is given."""
    want = {n: records.abstract(e, shardings.get(n)) for n, e in entries.items() if records.is_stored(e)}
    try:
        leaves = source.load(item, want)
    except DamagedError:
        raise
    except Exception:
        bad = [name for name, leaf in want.items() if not _is_readable(source, item, name, leaf)]
        if not anywhere(bad):
            raise  # every leaf can be read, so the cause is something else
    else:
        bad = records.damaged(entries, leaves)
        if not anywhere(bad):
            empty = {n: np.zeros(e["shape"], records.abstract(e).dtype) for n, e in entries.items() if n not in leaves}
            places = {n: shardings.get(n) for n in empty}
            return {n: x if places[n] is None else jax.device_put(x, places[n]) for n, x in empty.items()} | leaves
    raise damaged_step(source.directory, [f"{item}: {name}" for name in bad] or [f"{item}: seen on another host"])


def _is_readable(source: Source, item: str, name: str, leaf: jax.ShapeDtypeStruct) -> bool:
    """Returns whether a leaf can be read by itself, to numpy; all hosts must call it."""
    try:
        source.load(item, {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)})
    except Exception:  # tensorstore raises ValueError, orbax many kinds
        return False
    return True


def anywhere(bad: list[str]) -> bool:
    """Returns whether any host found something. All hosts must call it."""
    if jax.process_count() == 1:
        return bool(bad)
    return bool(np.any(multihost_utils.process_allgather(np.array(len(bad)))))


def _assemble(target: Target, loaded: dict[str, Any]) -> Any:
    """Assembles the target's layers from the stored leaves; returns a leaf unchanged if it is stored in the wanted
    form.
    """
    name, row = target.pieces[0]
    if row is None and not target.rows:
        return loaded[name]
    if row is not None and target.rows and list(target.pieces) == [(name, i) for i in range(loaded[name].shape[0])]:
        return loaded[name]
    names = sorted({name for name, _ in target.pieces})
    picks = [(names.index(name), row) for name, row in target.pieces]
    np_or_jnp = np if target.raw.sharding is None else jnp

    def pick(arrays):
        layers = [arrays[i] if row is None else arrays[i][row] for i, row in picks]
        return np_or_jnp.stack(layers) if target.rows else layers[0]

    pick = pick if target.raw.sharding is None else jax.jit(pick, out_shardings=target.raw.sharding)
    return pick([loaded[name] for name in names])


def _cast(leaf: Any, raw: jax.ShapeDtypeStruct) -> Any:
    leaf = leaf if leaf.dtype == raw.dtype else leaf.astype(raw.dtype)
    return leaf if raw.sharding is None else jax.device_put(leaf, raw.sharding)


def _as(leaf: Any, like: Any, entries: dict, target: Target) -> Any:
    """Wraps the data in a typed key if one is wanted."""
    if not records.is_key(like):
        return leaf
    key = jax.random.wrap_key_data(leaf, impl=entries[target.pieces[0][0]].get("key"))
    if key.dtype != like.dtype:
        raise ValueError(
            f"The random key was saved as {key.dtype} and is wanted as {like.dtype}: make it with that impl=."
        )
    return key


def _raw(leaf: Any) -> jax.ShapeDtypeStruct:
    """Returns the stored form of the wanted leaf `like`."""
    if not hasattr(leaf, "shape") or isinstance(leaf, np.ndarray | np.generic):
        host = np.asarray(leaf)
        return jax.ShapeDtypeStruct(host.shape, host.dtype)
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    plain = jax.eval_shape(jax.random.key_data, leaf) if records.is_key(leaf) else leaf
    return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=sharding)


def _items(directory: epath.Path, stored: StepRecords, wanted: Wanted) -> list[str]:
    names = list(wanted.items or wanted.like or stored.items)
    for where, has in ((directory, stored.items), ("like", wanted.like or stored.items)):
        lacking = [name for name in names if name not in has]
        if lacking:
            raise ValueError(f"The items {lacking} were requested, but {where} only has {sorted(has)}.")
    return names


def _check_format(directory: epath.Path, manifest: dict[str, Any]) -> None:
    if manifest["format"] > records.FORMAT:
        raise ValueError(
            f"{directory} has format {manifest['format']}, this maxlib reads up to {records.FORMAT}: use a newer one."
        )


def damaged_step(directory: epath.Path, leaves: list[str]) -> DamagedError:
    """Returns the error that names these leaves of a step."""
    step = int(directory.name) if directory.name.isdecimal() else None
    what = f"Step {step} in {directory.parent}" if step is not None else f"The checkpoint {directory}"
    return DamagedError(
        f"{what} is damaged and differs from what was saved:{shorten(leaves)}", step=step, leaves=tuple(leaves)
    )


def _groups(names: list[str], entries: dict, most: int = 1 << 28) -> Iterator[list[str]]:
    """Splits names into groups of limited size, to limit host memory."""
    group, size = [], 0
    for name in names:
        leaf = records.abstract(entries[name])
        if group and size + leaf.size * leaf.dtype.itemsize > most:
            yield group
            group, size = [], 0
        group, size = [*group, name], size + leaf.size * leaf.dtype.itemsize
    if group:
        yield group


def _damaged_of(directory: epath.Path, item: str, entries: dict) -> list[str]:
    try:
        leaves = storage.read_here(directory, item, {n: records.abstract(e) for n, e in entries.items()})
    except Exception:  # tensorstore raises various errors for a broken file
        if len(entries) == 1:
            return list(entries)
        return [name for n, entry in entries.items() for name in _damaged_of(directory, item, {n: entry})]
    with jax.default_device(jax.local_devices(backend="cpu")[0]):  # the other devices are busy
        return records.damaged(entries, leaves)
