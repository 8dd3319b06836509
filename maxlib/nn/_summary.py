"""Summary of a model as a table."""

from typing import Any

from rich import box
from rich.table import Table

from maxlib._utils.text import to_text
from maxlib.nn.tree import axes, own_axes, pattern_paths, variables
from maxlib.sharding.layers import num_layer_axes


def summary(model: Any) -> str:
    """Returns a table of every parameter of `model` with shape, axis names, dtype and size, and the total.

    Layers that a stack scans share a row: `26 x` before the shape is their number. Also works on `jax.eval_shape` of a
    model.
    """
    table = Table(box=box.SIMPLE, show_footer=True)
    names, short = axes(model), pattern_paths(model)
    rows = {path: v.get_value() for path, v in variables(model).items()}
    total = sum(a.size for a in rows.values())
    size = sum(a.size * a.dtype.itemsize for a in rows.values())
    table.add_column("parameter", footer="total")
    table.add_column("shape")
    table.add_column("axes")
    table.add_column("dtype", footer=scaled(size, "B"))
    table.add_column("numbers", justify="right", footer=scaled(total))
    for (path, shape, axis_names, dtype), group in _grouped(rows, names, short).items():
        # Arrays of scanned layers have a leading axis of layers; arrays of layers stored alone do not.
        count = sum(a.shape[0] if a.ndim > len(shape) else 1 for a in group)
        text = " ".join(map(str, shape)) or "scalar"
        text = f"{count} x {text}" if count > 1 else text
        table.add_row(
            path, text, " ".join(name or "-" for name in axis_names), dtype, scaled(sum(a.size for a in group))
        )
    return f"{type(model).__name__}\n{to_text(table)}"


def _grouped(rows: dict[str, Any], names: dict[str, tuple], short: dict[str, str]) -> dict[tuple, list[Any]]:
    """Groups arrays by the path, shape and axes of a single layer."""
    groups: dict[tuple, list[Any]] = {}
    for path, array in rows.items():
        shape = array.shape[num_layer_axes(names[path]) :]
        groups.setdefault((short[path], shape, own_axes(names[path]), str(array.dtype)), []).append(array)
    return groups


def scaled(number: float, unit: str = "") -> str:
    """Formats a number with a suffix: 1234567 becomes "1.235 M"."""
    suffixes = ["", "k", "M", "G", "T"]
    while number >= 1000 and len(suffixes) > 1:
        number, suffixes = number / 1000, suffixes[1:]
    return f"{number:.4g} {suffixes[0]}{unit}".rstrip()
