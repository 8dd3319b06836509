"""Writes the tables of docs/models.md: `python -m tests.models.page [family ...]`.

The first is `python -m maxlib.models --markdown`, the last how far each case of tests/models is from transformers, and
the one before it the worst of each family. With families named, only their rows of the last are made anew.
"""

import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import maxlib
from maxlib import weights
from maxlib.models import __main__ as models
from tests.models import parity

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
COLUMNS = ("family", "case", "logits", "norms of gradients")
HEAD = "\n".join(f"| {' | '.join(cells)} |" for cells in [COLUMNS, ("---", "---", "---:", "---:")])


def sections(page: str) -> dict[str, str]:
    """Returns the contents between each table's markers."""
    return dict(re.findall(r"<!-- begin (\w+) -->\n\n(.*?)\n\n<!-- end \1 -->", page, re.DOTALL))


def replaced(page: str, tables: dict[str, str]) -> str:
    for name, old in sections(page).items():
        page = page.replace(f"begin {name} -->\n\n{old}\n", f"begin {name} -->\n\n{tables[name]}\n")
    return page


def cases() -> list[tuple[str, str]]:
    """Every case of every family that has golden arrays."""
    families = sorted(path.stem for path in parity.GOLDEN.glob("*.npz"))
    return [(family, name) for family in families for name in parity.golden(family)]


def distances(family: str, name: str) -> tuple[float, float]:
    """The greatest error of a logit in units of their deviation, and of a gradient's norm relative to it."""
    case = parity.golden(family)[name]
    with tempfile.TemporaryDirectory() as scratch:
        model = maxlib.from_pretrained(parity.directory(Path(scratch) / "model", case))
        logits, gradients = parity.ours(model, case["tokens"], Path(scratch) / "gradients", *parity.given(case))
    norms = {tensor: norm for tensor, (norm, _) in case["gradients"].items()}
    off = [abs(np.linalg.norm(g) / norms[tensor] - 1) for tensor, g in gradients.items() if norms[tensor] > 0]
    return float(np.abs(logits - case["logits"]).max() / case["logits"].std()), float(max(off))


def parity_rows(old: dict[str, str], chosen: list[str]) -> list[str]:
    rows = []
    for family, name in cases():
        start = f"| {family} | {name} |"
        if family in chosen or start not in old:
            logits, gradients = distances(family, name)
            old[start] = f"{start} {logits:.0e} | {gradients:.0e} |"
            print(old[start], flush=True)
        rows.append(old[start])
    return rows


def worst(rows: list[str]) -> str:
    """The greatest differences of each family, from the rows of its cases."""
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    of = {family: [row for row in cells if row[0] == family] for family, *_ in cells}
    most = lambda found, column: max((row[column] for row in found), key=float)
    lines = [f"| {name} | {len(found)} | {most(found, 2)} | {most(found, 3)} |" for name, found in of.items()]
    return "\n".join(
        ["| family | cases | worst logits | worst norms of gradients |", "| --- | ---: | ---: | ---: |", *lines]
    )


def main(chosen: list[str]) -> None:
    page = PAGE.read_text()
    lines = sections(page)["parity"].splitlines()[2:]
    old = {"|".join(line.split("|")[:3]) + "|": line for line in lines}
    rows = [models.row(family, preset) for family in weights.families() for preset in family.presets]
    found = parity_rows(old, chosen or [family for family, _ in cases()])
    tables = {"capabilities": models.markdown(rows), "worst": worst(found), "parity": "\n".join([HEAD, *found])}
    PAGE.write_text(replaced(page, tables))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
