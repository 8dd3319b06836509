"""`python -m maxlib.models [--markdown] [FAMILY ...]`: lists every family and preset, and their features.

The features are read from abstract models (`jax.eval_shape`), without building any, in about fifteen seconds.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator

import jax
from flax import nnx
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from maxlib import nn, weights

COLUMNS = ("family", "presets and their parameters", "attention", "features", "caches", "images")


@dataclasses.dataclass(frozen=True)
class Row:
    """A preset."""

    family: str
    preset: str
    total: int
    active: int
    kind: tuple[str, ...]  # what it has in common with others, as in COLUMNS

    @property
    def size(self) -> str:
        active = f", {short(self.active)} active" if self.active < self.total else ""
        return f"{self.preset}: {short(self.total)}{active}"


def row(family: weights.Family, preset: str) -> Row:
    with nn.stack.skip_layer_check():
        model = jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))
    kind = (
        nn.describe.attention_kind(model),
        ", ".join(nn.describe.features(model)),
        " and ".join(nn.describe.cache_kinds(model)),
        "yes" if nn.describe.takes_images(model) else "",
    )
    return Row(family.name, preset, nn.num_parameters(model), nn.describe.num_active_parameters(model), kind)


def short(number: int) -> str:
    return f"{number / 1e9:.2f}B" if number >= 995e6 else f"{number / 1e6:.0f}M" if number >= 1e6 else f"{number:,}"


def grouped(rows: list[Row]) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
    """Groups neighbouring presets that only differ in size: family, sizes and kind."""
    for (family, kind), group in itertools.groupby(rows, key=lambda r: (r.family, r.kind)):
        yield family, [r.size for r in group], kind


def markdown(rows: list[Row]) -> str:
    lines = [(family, "<br>".join(sizes), *kind) for family, sizes, kind in grouped(rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, ("---",) * len(COLUMNS), *lines])


def table(rows: list[Row]) -> Table:
    found = Table(*COLUMNS, box=box.SIMPLE, show_lines=True)
    for family, sizes, kind in grouped(rows):
        found.add_row(family, "\n".join(sizes), *kind)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m maxlib.models", description="Lists what is supported.")
    parser.add_argument("family", nargs="*", help="of these only")
    parser.add_argument("--markdown", action="store_true", help="as the documentation has it")
    args = parser.parse_args()
    known = {family.name: family for family in weights.families()}
    if unknown := [name for name in args.family if name not in known]:
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    todo = [(known[name], preset) for name in args.family or known for preset in known[name].presets]
    progress = Console(stderr=True)
    rows = [row(*one) for one in track(todo, "reading models", console=progress, transient=True)]
    print(markdown(rows)) if args.markdown else Console().print(table(rows))


if __name__ == "__main__":
    main()
