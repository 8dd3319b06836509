"""`maxlib models [FAMILY ...]`: lists every family and preset, and their features.

The features are read from abstract models (`jax.eval_shape`), without building any, in about fifteen seconds.
"""

import argparse
import dataclasses
import itertools
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `--help` imports none of these
    from rich.table import Table

    from maxlib import weights

WIDEST = 1000  # letters of a line to a pipe: more than any has
# Columns on a terminal; the last one takes what the others leave.
SHOWN: dict[str, dict[str, Any]] = {
    "preset": {"no_wrap": True},
    "parameters": {"no_wrap": True, "justify": "right"},
    "active": {"no_wrap": True, "justify": "right"},
    "family, and what it is made of": {"overflow": "fold"},
}
COLUMNS = ("family", "presets", "attention", "features", "reads")
INPUTS = ("images", "audio")


@dataclasses.dataclass(frozen=True)
class Row:
    """A preset."""

    family: str
    preset: str
    total: int
    active: int
    kind: tuple[str, ...]  # attention, features, caches, and "yes" for each of INPUTS that it reads

    @property
    def described(self) -> str:
        """What the preset is made of, as one line."""
        attention, features, caches, *inputs = self.kind
        media = [name for name, there in zip(INPUTS, inputs, strict=True) if there]
        parts = (attention, features, f"{caches} caches" if caches else "", *media)
        return f"{self.family}: {'; '.join(filter(None, parts))}"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("family", metavar="FAMILY", nargs="*", help="list these only")
    parser.add_argument("--json", action="store_true", help="print one object for each preset")
    parser.add_argument("--markdown", action="store_true", help="print tables as the documentation has them")
    parser.add_argument("--names", action="store_true", help="print names only, which is quick")


def run(args: argparse.Namespace) -> int:
    from maxlib import weights

    known = {family.name: family for family in weights.families()}
    if unknown := [name for name in args.family if name not in known]:
        raise ValueError(f"there is no family {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in args.family or known]
    if args.names:
        print("\n".join(preset for family in chosen for preset in family.presets))
        return 0
    from rich.console import Console
    from rich.progress import track

    presets = [(family, preset) for family in chosen for preset in family.presets]
    progress = Console(stderr=True)
    rows = [row(*preset) for preset in track(presets, "reading models", console=progress, transient=True)]
    if args.json:
        print(json.dumps([_object(row) for row in rows], indent=1))
    elif args.markdown:
        print(markdown(rows))
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=WIDEST)
        console.print(table(rows))
    return 0


def row(family: "weights.Family", preset: str) -> Row:
    import jax
    from flax import nnx

    from maxlib import nn

    model = jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))
    kind = (
        nn.describe.attention_kind(model),
        ", ".join(nn.describe.features(model)),
        " and ".join(nn.describe.cache_kinds(model)),
        *("yes" if name in nn.describe.input_names(model) else "" for name in INPUTS),
    )
    return Row(family.name, preset, nn.num_parameters(model), nn.describe.num_active_parameters(model), kind)


def short(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 995e6 else f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number:,}"


def markdown(rows: list[Row]) -> str:
    """Returns a table with a line for each family, which has what any of its presets has."""
    families = itertools.groupby(rows, key=lambda row: row.family)
    lines = [_family_cells(name, list(presets)) for name, presets in families]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, ("---",) * len(COLUMNS), *lines])


def _family_cells(name: str, presets: list[Row]) -> tuple[str, ...]:
    attention, features, _, *inputs = zip(*(row.kind for row in presets), strict=True)
    media = [medium for medium, there in zip(INPUTS, inputs, strict=True) if any(there)]
    names = ", ".join(row.preset for row in presets)
    return name, names, _labels(attention), _labels(features), ", ".join(media)


def _labels(cells: Iterable[str]) -> str:
    """Joins the labels of several presets, each once and without its numbers: "experts" for "8 of 256 experts"."""
    labels = [re.sub(r"^\d+ (of \d+ )?", "", label) for cell in cells for label in re.split(", | and ", cell)]
    return ", ".join(dict.fromkeys(filter(None, labels)))


def table(rows: list[Row]) -> "Table":
    from rich import box
    from rich.table import Table

    shown = Table(box=box.SIMPLE, padding=(0, 1))
    for title, options in SHOWN.items():
        shown.add_column(title, **options)
    for row in rows:
        active = short(row.active) if row.active < row.total else ""
        shown.add_row(row.preset, short(row.total), active, row.described)
    return shown


def _object(row: Row) -> dict[str, Any]:
    """Returns a preset as a JSON object."""
    fields = {name: value for name, value in dataclasses.asdict(row).items() if name != "kind"}
    attention, features, caches, images, audio = row.kind
    return fields | {
        "attention": attention,
        "features": features,
        "caches": caches,
        "images": bool(images),
        "audio": bool(audio),
    }
