"""`maxlib models [--markdown] [FAMILY ...]`: lists every family and preset, and their features.

The features are read from abstract models (`jax.eval_shape`), without building any, in about fifteen seconds.
"""

import dataclasses
import itertools
import re
from typing import Any

import jax
from flax import nnx
from rich import box
from rich.console import Console
from rich.table import Table

from maxlib import nn, weights

WIDEST = 1000  # letters of a line to a pipe: more than any has
# Columns on a terminal; the last one takes what the others leave.
SHOWN: dict[str, dict[str, Any]] = {
    "preset": {"no_wrap": True},
    "parameters": {"no_wrap": True, "justify": "right"},
    "active": {"no_wrap": True, "justify": "right"},
    "family, and what it is made of": {"overflow": "fold"},
}
COLUMNS = ("family", "presets", "attention", "features", "caches", "reads")


@dataclasses.dataclass(frozen=True)
class Row:
    """A preset."""

    family: str
    preset: str
    total: int
    active: int
    kind: tuple[tuple[str, ...], ...]  # attention, features, caches, and what it reads besides tokens


def row(family: weights.Family, preset: str) -> Row:
    model = jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))
    kind = (
        tuple(nn.describe.attention_kind(model).split(", ")),
        nn.describe.features(model),
        nn.describe.cache_kinds(model),
        tuple(name for name in nn.describe.input_names(model) if name in ("images", "audio")),
    )
    return Row(family.name, preset, nn.num_parameters(model), nn.describe.num_active_parameters(model), kind)


def short(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 995e6 else f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number:,}"


def grouped(rows: list[Row]) -> list[list[Row]]:
    """Groups neighbouring presets that only differ in size."""
    return [list(group) for _, group in itertools.groupby(rows, key=lambda r: (r.family, r.kind))]


def markdown(rows: list[Row]) -> str:
    """Returns a table with a line for each family, which has what any of its presets has, without numbers."""
    families = [list(group) for _, group in itertools.groupby(rows, key=lambda row: row.family)]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *map(_family_cells, families)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _family_cells(rows: list[Row]) -> tuple[str, ...]:
    columns = zip(*(row.kind for row in rows), strict=True)
    # "8 of 256 experts" becomes "experts". dict.fromkeys keeps the first of equal labels, in order.
    plain = [[re.sub(r"^\d+ (of \d+ )?", "", label) for kind in column for label in kind] for column in columns]
    labels = [", ".join(dict.fromkeys(column)) for column in plain]
    return rows[0].family, ", ".join(row.preset for row in rows), *labels


def show(rows: list[Row]) -> None:
    """Prints rows: to a terminal wrapped, neighbours of one kind together; to a pipe one whole line for each preset."""
    console = Console()
    if console.is_terminal:
        console.print(table(grouped(rows)))
    else:
        Console(width=WIDEST).print(table([[row] for row in rows]))


def table(groups: list[list[Row]]) -> Table:
    shown = Table(box=box.SIMPLE, padding=(0, 1), show_lines=any(len(group) > 1 for group in groups))
    for title, options in SHOWN.items():
        shown.add_column(title, **options)
    for group in groups:
        sizes = [(r.preset, short(r.total), short(r.active) if r.active < r.total else "") for r in group]
        shown.add_row(*map("\n".join, zip(*sizes, strict=True)), described(group[0]))
    return shown


def described(preset: Row) -> str:
    """Returns what a preset is made of, as one line."""
    attention, features, caches, inputs = preset.kind
    held = f"{' and '.join(caches)} caches" if caches else ""
    cells = (", ".join(attention), ", ".join(features), held, *inputs)
    return f"{preset.family}: {'; '.join(cell for cell in cells if cell)}"
