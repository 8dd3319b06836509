"""Writes the tables of docs/models.md: `python -m tests.models.page [family ...]`.

The first is `maxlib models --markdown`, the second the greatest difference from transformers, by the cases of
`parity.json`, of families where it is above `USUAL`. With families named, only their cases are measured again.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np

import maxlib
from maxlib import weights
from maxlib._command import models
from tests.models import parity

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
CASES = Path(__file__).with_name("parity.json")
USUAL = 1e-5


def sections(page: str) -> dict[str, str]:
    """Returns the contents between each table's markers."""
    return dict(re.findall(r"<!-- begin (\w+) -->\n\n(.*?)\n\n<!-- end \1 -->", page, re.DOTALL))


def cases() -> list[tuple[str, str]]:
    """Every case of every family that has golden arrays."""
    families = sorted(path.stem for path in parity.GOLDEN.glob("*.npz"))
    return [(family, name) for family in families for name in parity.golden(family)]


def distances(family: str, name: str) -> list[float]:
    """The greatest error of a logit in units of their deviation, and of a gradient's norm relative to it."""
    case = parity.golden(family)[name]
    with tempfile.TemporaryDirectory() as scratch:
        model = maxlib.from_pretrained(parity.directory(Path(scratch) / "model", case))
        logits, gradients = parity.ours(model, case["tokens"], Path(scratch) / "gradients", *parity.inputs_of(case))
    norms = {tensor: norm for tensor, (norm, _) in case["gradients"].items()}
    errors = [abs(np.linalg.norm(g) / norms[tensor] - 1) for tensor, g in gradients.items() if norms[tensor] > 1e-6]
    worst = np.abs(logits - case["logits"]).max() / case["logits"].std(), max(errors)
    return [float(f"{error:.0e}") for error in worst]


def measured(chosen: list[str]) -> dict[str, list[float]]:
    """The distances of every case: those of the file, and new ones of the chosen families."""
    known = json.loads(CASES.read_text())
    rows = {}
    for family, name in cases():
        key = f"{family}/{name}"
        rows[key] = distances(family, name) if family in chosen or key not in known else known[key]
    return rows


def worst(rows: dict[str, list[float]]) -> str:
    """The greatest differences of families with one above `USUAL`."""
    lines = ["| family | worst logits | worst norms of gradients |", "| --- | ---: | ---: |"]
    for family in dict.fromkeys(key.partition("/")[0] for key in rows):
        errors = [row for key, row in rows.items() if key.partition("/")[0] == family]
        logits, norms = map(max, zip(*errors, strict=True))
        if max(logits, norms) > USUAL:
            lines.append(f"| {family} | {logits:.0e} | {norms:.0e} |")
    return "\n".join(lines)


def main(chosen: list[str]) -> None:
    rows = measured(chosen or [family for family, _ in cases()])
    CASES.write_text("{\n" + ",\n".join(f"  {json.dumps(key)}: {row}" for key, row in rows.items()) + "\n}\n")
    presets = [models.row(family, preset) for family in weights.families() for preset in family.presets]
    tables = {"capabilities": models.markdown(presets), "worst": worst(rows)}
    page = PAGE.read_text()
    for name, old in sections(page).items():
        page = page.replace(f"begin {name} -->\n\n{old}\n", f"begin {name} -->\n\n{tables[name]}\n")
    PAGE.write_text(page)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main(sys.argv[1:])
