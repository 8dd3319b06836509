"""Loads weights from a directory into a model: one leaf at a time, by slices, directly to its devices."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import nn, sharding
from maxlib._utils.arguments import check_dtype
from maxlib.weights._packed import quantization_of, unpacked
from maxlib.weights._table import Copy, Ignore, Renamed, Table
from maxlib.weights.files import Stored, find_tensors, is_float
from maxlib.weights.mapping import Conversion, Cut, Piece, Tensor, WeightMapping, resolve

Model = TypeVar("Model")
_ALIGNMENT = 64  # of a buffer that a CPU device can use without copying
_SHOWN = 20


def load(
    build: Callable[[], Model],
    table: Table,
    directory: str | Path,
    *,
    layout: sharding.Layout | None = None,
    dtype: Any = None,
) -> Model:
    """Loads the weights of `directory` into the model that `build()` describes.

    Args:
        build: Returns a model; it is only traced, and run only for leaves that `table` declares absent.
        table: The model's weight table.
        directory: Has the safetensors, one file or several with an index.
        layout: Placement over a mesh, so that every device only reads its own part; None reads onto one device.
        dtype: The dtype of the floating weights; None keeps the stored dtype.

    Returns:
        The model.

    Raises:
        ValueError: Before any tensor is read, if tensors are missing, left over or of another shape; names all of them.
    """
    sharding.check_layout(layout)
    check_dtype(dtype)
    abstract = jax.eval_shape(build)
    tensors = unpacked(find_tensors(directory), quantization_of(directory))
    stored, plan = _renamed(tensors, table), resolve(abstract, table)
    plan = _applicable(plan, stored)
    _check(abstract, plan, stored, table, directory)
    leaves = nn.variables(abstract)
    at = {path: None if layout is None else layout.sharding(path, v) for path, v in leaves.items()}
    arrays = _initial(build, {path: at[path] for path in plan.absent}, dtype)
    for path, variable in leaves.items():
        if path not in plan.absent:
            arrays[path] = _Leaf(path, variable.get_value(), plan, stored, dtype).on(at[path])
    return nn.combine(arrays, abstract)


def _renamed(stored: Mapping[str, Stored], table: Table) -> dict[str, Stored]:
    """Returns the tensors under the table's names, see `Renamed`; its entries apply in order."""
    renamed: dict[str, Stored] = {}
    for name, tensor in stored.items():
        new = functools.reduce(lambda n, entry: entry.applied(n), [e for e in table if isinstance(e, Renamed)], name)
        if new in renamed:
            raise ValueError(f"{name} is another name of {new}, which also exists: keep only one.")
        renamed[new] = tensor
    return renamed


def _initial(build: Callable[[], Any], places: Mapping[str, Any], dtype: Any) -> dict[str, jax.Array]:
    """Computes the initial values of some leaves; jit removes everything else."""

    def cast(value: jax.Array) -> jax.Array:
        return value if dtype is None or not is_float(value.dtype) else value.astype(dtype)

    def values() -> dict[str, jax.Array]:
        return {path: cast(v.get_value()) for path, v in nn.variables(build()).items() if path in places}

    return jax.jit(values, out_shardings=dict(places))() if places else {}


def _applicable(plan: WeightMapping, stored: Mapping[str, Stored]) -> WeightMapping:
    """Drops one-way conversions whose tensors are absent, and pieces that the other conversions replace."""
    conversions = [c for c in plan.conversions if c.entry.save is not None or all(t in stored for t in c.hf_names)]
    replaced = {c.place for c in conversions if c.entry.save is None}
    return WeightMapping([p for p in plan.pieces if p.place not in replaced], conversions, plan.absent)


def _check(
    abstract: Any, plan: WeightMapping, stored: Mapping[str, Stored], table: Table, directory: str | Path
) -> None:
    tensors, leaves = plan.tensors, {path: v.get_value() for path, v in nn.variables(abstract).items()}

    def floating(name: str) -> set[bool]:
        return {is_float(leaves[piece.place.path].dtype) for piece in tensors[name].pieces}

    needed = {*tensors, *(name for c in plan.conversions for name in c.hf_names)}
    present = [name for name in tensors if name in stored]
    shapes = [name for name in present if stored[name].shape != tensors[name].shape]
    kinds = [name for name in present if floating(name) != {is_float(stored[name].dtype)}]
    extra = [name for name in stored if name not in needed and not _accounted(name, stored, table)]
    complete = [c for c in plan.conversions if stored.keys() >= {*c.hf_names}]
    unfit = {f"{', '.join(c.hf_names)} for {c.place}": problem for c in complete if (problem := _unfit(c, stored))}
    problems = [
        _listed("missing", sorted(needed - stored.keys()), lambda name: f"for {_users(plan, name)}"),
        _listed(
            "of another shape",
            shapes,
            lambda name: f"is {stored[name].shape}, but {_users(plan, name)} needs {tensors[name].shape}",
        ),
        _listed("of another kind", kinds, lambda name: f"is {stored[name].dtype}, which {_users(plan, name)} is not"),
        _listed("that cannot be converted", sorted(unfit), lambda name: unfit[name]),
        _listed("left over, without a parameter in the model", sorted(extra), lambda name: ""),
        _listed(
            "weights of the model that its table does not fill exactly", uncovered(abstract, plan), lambda name: ""
        ),
    ]
    if any(problems):
        raise ValueError(
            f"the tensors in {directory} are not those of the model that its config.json describes.\n{''.join(problems)}"
            "Check that the config belongs to the weights and that the download is complete."
        )


def _listed(what: str, names: Sequence[str], note: Callable[[str], str]) -> str:
    if not names:
        return ""
    lines = [f"  {name} {note(name)}".rstrip() for name in names[:_SHOWN]]
    more = [f"  ... and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return "\n".join([f"{what} ({len(names)}):", *lines, *more, ""])


def _users(plan: WeightMapping, name: str) -> str:
    pieces = [p.place for p in plan.pieces if p.hf_name == name]
    return ", ".join(map(str, pieces + [c.place for c in plan.conversions if name in c.hf_names]))


def _unfit(conversion: Conversion, stored: Mapping[str, Stored]) -> str:
    """Explains why the tensors cannot become the leaf; empty if they can.

    Tests the conversion with a first axis of length 0, so that nothing is read.
    """
    entry, place = conversion.entry, conversion.place
    sources = [stored[name] for name in conversion.hf_names]
    if not entry.batch:
        return ""
    if any(t.shape[: entry.batch] != place.shape[: entry.batch] for t in sources):
        return f"are {', '.join(str(t.shape) for t in sources)}, but must begin with {place.shape[: entry.batch]}"
    try:
        shape = entry.load(*[np.empty((0, *t.shape[1:]), t.dtype) for t in sources]).shape
    except ValueError as error:
        return f"(with a first axis of 0): {error}"
    return "" if shape[1:] == place.shape[1:] else f"gives {(place.shape[0], *shape[1:])}, but must give {place.shape}"


def _accounted(name: str, stored: Mapping[str, Stored], table: Table) -> bool:
    """Returns True if an unused tensor is allowed. Raises ValueError for a declared copy that differs."""
    for entry in table:
        if isinstance(entry, Ignore) and entry.matches(name):
            return True
        if isinstance(entry, Copy) and entry.hf_name == name and entry.of in stored:
            if not _same(stored[name], stored[entry.of]):
                raise ValueError(f"{name} differs from {entry.of}, but the config ties them: one of the two is wrong.")
            return True
    return False


def _same(a: Stored, b: Stored) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    parts = zip(*[np.array_split(x.view().reshape(-1).view(np.uint8), 64) for x in (a, b)], strict=True)
    return all(np.array_equal(x, y) for x, y in parts)  # in parts, because the comparison needs memory


def uncovered(abstract: Any, plan: WeightMapping) -> list[str]:
    """Lists leaves that the plan does not fill exactly, with the filled number of values."""
    wrong = []
    for path, variable in nn.variables(abstract).items():
        uses, size = plan.filling.get(path, []), variable.get_value().size
        parts = {(use.place, tuple(use.counted.items()) if isinstance(use, Piece) else ()) for use in uses}
        filled = sum(use.size for use in uses)
        if path not in plan.absent and (filled != size or len(parts) < len(uses)):
            wrong.append(f"{path} ({filled} of {size} values)")
    return wrong


class _Leaf:
    """One leaf of the model and the tensors that fill it."""

    def __init__(
        self, path: str, shape: jax.ShapeDtypeStruct, plan: WeightMapping, stored: Mapping[str, Stored], dtype: Any
    ):
        self.path, self.shape, self._stored = path, shape.shape, stored
        self._pieces = [(p, plan.tensors[p.hf_name]) for p in plan.filling.get(path, ()) if isinstance(p, Piece)]
        self._conversions = [c for c in plan.filling.get(path, ()) if isinstance(c, Conversion)]
        self.dtype = self._dtype(shape.dtype, dtype)

    def _dtype(self, of_leaf: Any, wanted: Any) -> np.dtype:
        if not is_float(of_leaf):
            return np.dtype(of_leaf)
        if wanted is not None:
            return np.dtype(wanted)
        sources = [self._stored[p.hf_name].dtype for p, _ in self._pieces]
        sources += [c.entry.dtype or self._stored[c.hf_names[0]].dtype for c in self._conversions]
        return np.dtype(jnp.result_type(*sources))

    def on(self, place: jax.sharding.Sharding | None) -> jax.Array:
        """Reads the leaf to its devices; a part that several devices hold is read once."""
        if place is None:
            return jax.block_until_ready(jax.device_put(self.read(tuple(slice(None) for _ in self.shape))))
        parts: dict[tuple, tuple[Cut, list[Any]]] = {}
        for device, cut in place.addressable_devices_indices_map(self.shape).items():
            cut = cut or ()
            key = tuple(s.indices(n) for s, n in zip(cut, self.shape, strict=True))
            parts.setdefault(key, (cut, []))[1].append(device)
        arrays = []
        for cut, devices in parts.values():
            part = self.read(cut)
            # Waiting limits host memory to one part.
            at = [jax.sharding.SingleDeviceSharding(device, memory_kind=place.memory_kind) for device in devices]
            arrays += jax.block_until_ready([jax.device_put(part, sharding) for sharding in at])
        return jax.make_array_from_single_device_arrays(self.shape, place, arrays)

    def read(self, cut: Cut) -> np.ndarray:
        """Reads the part `cut` of this leaf; every byte is read from its file into one buffer."""
        cut = tuple(slice(*s.indices(n)) for s, n in zip(cut, self.shape, strict=True))
        out = _aligned([s.stop - s.start for s in cut], self.dtype)
        for piece, tensor in self._pieces:
            if (target := _repeat(out, cut, piece.place.index)) is not None:
                self._fill(*target, piece, tensor)
        for conversion in self._conversions:
            if (target := _repeat(out, cut, conversion.place.index)) is not None:
                for part in _rows(*target) if conversion.entry.batch else [target]:
                    self._convert(*part, conversion)
        return out

    def _fill(self, out: np.ndarray, cut: Cut, piece: Piece, tensor: Tensor) -> None:
        if (within := piece.within(cut)) is None:
            return
        stored, target = self._stored[piece.hf_name], out[within]
        take = functools.partial(piece.in_leaf_order, lengths=tensor.lengths, cut=cut)
        if not stored.as_stored:
            assign(out, within, stored.part(take), piece.hf_name)
            return
        view = stored.view()
        value = take(view)
        if value.dtype == target.dtype and value.flags.c_contiguous and target.flags.c_contiguous:
            stored.read_into(target, value.ctypes.data - view.ctypes.data)
        else:
            assign(out, within, value, piece.hf_name)

    def _convert(self, out: np.ndarray, cut: Cut, conversion: Conversion) -> None:
        entry = conversion.entry
        value = entry.load(
            *[self._stored[name].part(lambda values: values[cut[: entry.batch]]) for name in conversion.hf_names]
        )
        wanted = tuple(s.stop - s.start for s in cut[: entry.batch]) + conversion.place.shape[entry.batch :]
        if value.shape != wanted:
            names = ", ".join(conversion.hf_names)
            raise ValueError(f"{names}: the conversion gave shape {value.shape}, but {conversion.place} needs {wanted}")
        rest = tuple(slice(None) for _ in cut[: entry.batch]) + cut[entry.batch :]
        assign(out, ..., value[rest], str(conversion.place))


def _aligned(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def _repeat(out: np.ndarray, cut: Cut, index: int | None) -> tuple[np.ndarray, Cut] | None:
    """Drops the repeat axis of `out` and `cut`, at `index` of it; None if that repeat is not in `cut`."""
    if index is None:
        return out, cut
    return (out[index - cut[0].start, ...], cut[1:]) if cut[0].start <= index < cut[0].stop else None


def _rows(out: np.ndarray, cut: Cut) -> Iterator[tuple[np.ndarray, Cut]]:
    """Yields `out` and `cut` for each index of the first axis, because a converted part needs memory in addition to
    `out`.
    """
    for n, index in enumerate(range(cut[0].start, cut[0].stop)):
        yield out[n : n + 1], (slice(index, index + 1), *cut[1:])


def assign(out: np.ndarray, where: Any, value: np.ndarray, name: str) -> None:
    """Copies with a cast. Raises ValueError if values overflow float16."""
    with np.errstate(over="ignore"):
        out[where] = value
    if out.dtype == np.float16 and value.dtype != np.float16 and not np.isfinite(out[where]).all():
        raise ValueError(f"{name} has values that overflow float16; use float32 or bfloat16.")
