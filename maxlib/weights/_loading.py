"""Loads weights from a directory into a model: one leaf at a time, by slices, directly to its devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import nn, sharding
from maxlib._utils.arguments import check_dtype
from maxlib.weights._kept import keep
from maxlib.weights._leaves import Leaf
from maxlib.weights._packed import quantization_of, unpacked
from maxlib.weights._table import Constant, Copy, Ignore, Renamed, Table
from maxlib.weights.files import Stored, find_tensors, is_float
from maxlib.weights.mapping import Conversion, Cut, Piece, WeightMapping, resolve

Model = TypeVar("Model")
_SHOWN = 20


def load(
    build: Callable[[], Model],
    table: Table,
    directory: str | Path | Mapping[str, Stored],
    *,
    layout: sharding.Layout | None = None,
    dtype: Any = None,
    keep_quantized: bool = False,
) -> Model:
    """Loads the weights of `directory` into the model that `build()` describes.

    Args:
        build: Returns a model; it is only traced, and run only for leaves that `table` declares absent.
        table: The model's weight table.
        directory: Has the safetensors, one file or several with an index; or the tensors by name.
        layout: Placement over a mesh, so that every device only reads its own part; None reads onto one device.
        dtype: The dtype of the floating weights; None keeps the stored dtype. Expert biases are float32 or wider.
        keep_quantized: True stores weights that the files have in few bits as `nn.quantized.QuantizedWeight`, where its
            layout can hold them.

    Returns:
        The model.

    Raises:
        ValueError: Before any tensor is read, if tensors are missing, left over or of another shape; names all of them.
    """
    sharding.check_layout(layout)
    check_dtype(dtype)
    abstract = jax.eval_shape(build)
    if isinstance(directory, Mapping):
        tensors, directory = directory, "the file"
    else:
        tensors = unpacked(find_tensors(directory), quantization_of(directory))
    stored, plan = _renamed(tensors, table), resolve(abstract, table)
    plan = _applicable(plan, stored)
    _check(abstract, plan, stored, table, directory)
    kept: dict[str, Any] = {}
    if keep_quantized:
        abstract, kept = keep(abstract, plan, stored, dtype)
    leaves = nn.variables(abstract)
    at = {path: None if layout is None else layout.sharding(path, v) for path, v in leaves.items()}
    arrays = _initial(build, {path: at[path] for path in plan.absent}, dtype)
    for path, variable in leaves.items():
        shape = variable.get_value()
        if path in kept:
            arrays[path] = put(kept[path], shape.shape, at[path])
        elif path not in plan.absent:
            wanted = dtype
            if isinstance(variable, nn.router.ExpertBias):
                wanted = jnp.promote_types(dtype or jnp.float32, jnp.float32)
            arrays[path] = put(Leaf(path, shape, plan, stored, wanted).read, shape.shape, at[path])
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
    """Returns True if an unused tensor is allowed. Raises ValueError for a declared copy or constant that differs."""
    for entry in table:
        if isinstance(entry, Ignore) and entry.matches(name):
            return True
        if isinstance(entry, Constant) and entry.hf_name == name:
            if not np.array_equal(stored[name].view(), entry.value):
                raise ValueError(f"{name} is not what the config says: one of the two is wrong.")
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


def put(read: Callable[[Cut], np.ndarray], shape: tuple[int, ...], place: jax.sharding.Sharding | None) -> jax.Array:
    """Reads a leaf to its devices; a part that several devices hold is read once."""
    if place is None:
        return jax.block_until_ready(jax.device_put(read(tuple(slice(None) for _ in shape))))
    parts: dict[tuple, tuple[Cut, list[Any]]] = {}
    for device, cut in place.addressable_devices_indices_map(shape).items():
        cut = cut or ()
        key = tuple(s.indices(n) for s, n in zip(cut, shape, strict=True))
        parts.setdefault(key, (cut, []))[1].append(device)
    arrays = []
    for cut, devices in parts.values():
        part = read(cut)
        # Waiting limits host memory to one part.
        at = [jax.sharding.SingleDeviceSharding(device, memory_kind=place.memory_kind) for device in devices]
        arrays += jax.block_until_ready([jax.device_put(part, sharding) for sharding in at])
    return jax.make_array_from_single_device_arrays(shape, place, arrays)
