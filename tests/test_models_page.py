"""The output of `maxlib models`, and that docs/models.md agrees with it."""

import json
import re

import pytest
from rich.console import Console

from maxlib import weights
from maxlib._command import models
from tests.models import page

STALE = "docs/models.md is stale: run python -m tests.models.page"
FAMILIES = {family.name: family for family in weights.families() if family.presets}


def cells(markdown: str) -> list[list[str]]:
    """Line by line, without the heading."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in markdown.splitlines()[2:]]


def section(name: str) -> list[list[str]]:
    return cells(page.sections(page.PAGE.read_text())[name])


def test_every_family_and_preset_is_listed():
    listed = [(family, presets.split(", ")) for family, presets, *_ in section("capabilities")]
    assert listed == [(name, list(family.presets)) for name, family in FAMILIES.items()], STALE


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name not in ("gpt2", "falcon_h1"))) for name in FAMILIES]
)
def test_what_a_family_is_made_of(name):
    rows = [models.row(FAMILIES[name], preset) for preset in FAMILIES[name].presets]
    assert cells(models.markdown(rows))[0] in section("capabilities"), STALE


def test_the_worst_of_each_family_is_that_of_its_cases():
    rows = json.loads(page.CASES.read_text())
    assert list(rows) == [f"{family}/{name}" for family, name in page.cases()], STALE
    assert section("worst") == cells(page.worst(rows)), STALE


def test_every_family_has_a_note():
    assert set(re.findall(r"^### (\w+)$", page.PAGE.read_text(), re.MULTILINE)) == set(FAMILIES)


ROWS = [
    models.Row("a", "a-1", 52_464, 52_464, ("MHA", "RoPE", "full", "", "")),
    models.Row("a", "a-2", 999_885_952, 999_885_952, ("MHA", "RoPE", "full", "", "")),
    models.Row("a", "a-3", 124_439_808, 24_439_808, ("GQA", "RoPE, 1 of 8 experts", "full and ring", "", "")),
    models.Row("b", "b-1", 671_026_419_200, 37_552_000_000, ("MLA", "", "latent", "yes", "")),
]


def test_the_page_has_a_row_for_each_family_and_the_terminal_one_for_each_preset():
    assert cells(models.markdown(ROWS)) == [
        ["a", "a-1, a-2, a-3", "MHA, GQA", "RoPE, experts", ""],
        ["b", "b-1", "MLA", "", "images"],
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(models.table(ROWS))
    lines = [line.split() for line in capture.get().splitlines()]
    assert all(any(line[:2] == [row.preset, models.short(row.total)] for line in lines) for row in ROWS)
    assert ["a-2", "1.00B", "a:", "MHA;", "RoPE;", "full", "caches"] in lines
