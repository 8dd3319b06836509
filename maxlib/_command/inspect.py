"""`maxlib inspect PATH [OTHER]`: lists the contents of a directory or checkpoint, or the differences between two."""

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Array:
    """An array in a file.

    Attributes:
        shape: Its shape.
        dtype: Name of its dtype.
        bytes: Its size.
        content: For comparisons: a checksum, or a function that reads the values.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    content: Any


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", help="a Hugging Face directory, a PEFT adapter, a hub name, or a step of a checkpointer"
    )
    parser.add_argument("other", metavar="OTHER", nargs="?", help="compare with this; exit with 1 if they differ")
    parser.add_argument("--all", action="store_true", help="one line for each layer instead of one for all")
    parser.add_argument("--json", action="store_true", help="print one object")


def run(args: argparse.Namespace) -> int:
    arrays = read(args.path)
    if args.other is None:
        rows = listed(arrays, every_layer=args.all)
        total = {"arrays": len(arrays), "numbers": _numbers(arrays), "bytes": sum(a.bytes for a in arrays.values())}
        _print(
            args, {"total": total, "arrays": rows}, rows, f"{total['numbers']:,} numbers, {total['bytes'] / 1e9:.3f} GB"
        )
        return 0
    rows = differences(arrays, read(args.other))
    _print(
        args, {"differences": rows}, rows, f"{len(rows)} of {len(arrays)} arrays differ" if rows else "no difference"
    )
    return 1 if rows else 0


def read(path: str) -> dict[str, Array]:
    """Finds the arrays of a checkpoint's step, a model directory or a PEFT adapter without reading values."""
    from maxlib import weights
    from maxlib.weights.files import find_tensors, read_header

    if _is_checkpoint(Path(path)):
        from maxlib import checkpoint

        items = checkpoint.read_records(path).items
        return {f"{item}/{name}".rstrip("/"): _entry(e) for item, leaves in items.items() for name, e in leaves.items()}
    directory = Path(weights.model_directory(path))
    adapter = directory / "adapter_model.safetensors"
    tensors = read_header(adapter) if adapter.exists() else find_tensors(directory)

    def size(t):
        return math.prod(t.shape) * t.dtype.itemsize

    return {name: Array(t.shape, str(t.dtype), size(t), t.view) for name, t in tensors.items()}


def _is_checkpoint(path: Path) -> bool:
    """Returns True for a step's directory, and for a run's."""
    return any((folder / "manifest" / "manifest.json").exists() for folder in (path, *path.glob("[0-9]*")))


def _entry(entry: dict[str, Any]) -> Array:
    import jax.numpy as jnp

    dtype = jnp.dtype("uint32" if "key" in entry else entry["dtype"])
    shape = tuple(entry["shape"])
    return Array(shape, str(entry["dtype"]), math.prod(shape) * dtype.itemsize, entry["checksum"])


def listed(arrays: Mapping[str, Array], *, every_layer: bool) -> list[dict[str, Any]]:
    """Groups arrays that only differ in their layer index."""
    groups: dict[tuple, list[Array]] = {}
    for name, array in arrays.items():
        short = name if every_layer else re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        groups.setdefault((short, array.shape, array.dtype), []).append(array)
    return [
        {
            "name": name,
            "count": len(members),
            "shape": list(shape),
            "dtype": dtype,
            "bytes": sum(a.bytes for a in members),
        }
        for (name, shape, dtype), members in groups.items()
    ]


def differences(ours: Mapping[str, Array], theirs: Mapping[str, Array]) -> list[dict[str, Any]]:
    """Lists arrays that are only in one of two, or differ in shape, dtype or values."""
    rows = []
    for name in sorted({*ours, *theirs}):
        a, b = ours.get(name), theirs.get(name)
        if a is None or b is None:
            rows.append({"name": name, "difference": "only in the second" if a is None else "only in the first"})
        elif text := _difference(a, b):
            rows.append({"name": name, "difference": text})
    return rows


def _difference(a: Array, b: Array) -> str:
    import numpy as np

    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    if not (callable(a.content) and callable(b.content)):
        return "" if a.content == b.content else "values (checksums differ)"
    first, second = (np.atleast_1d(array.content()) for array in (a, b))
    if np.array_equal(first.view(np.uint8), second.view(np.uint8)):
        return ""
    distance = np.abs(first.astype(np.float64) - second.astype(np.float64))
    return f"values, by up to {distance.max():.3g}, {np.count_nonzero(distance) / distance.size:.1%} of them"


def _numbers(arrays: Mapping[str, Array]) -> int:
    return sum(math.prod(array.shape) for array in arrays.values())


def _print(args: argparse.Namespace, result: dict[str, Any], rows: list[dict[str, Any]], last: str) -> None:
    if args.json:
        print(json.dumps(result, indent=1))
        return
    widths = {key: max(len(str(row[key])) for row in rows) for key in (rows[0] if rows else {})}
    for row in rows:
        print("  ".join(f"{row[key]!s:<{widths[key]}}" for key in row).rstrip())
    print(last)
