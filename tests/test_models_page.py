"""The output of `maxlib models`, and that docs/models.md agrees with it."""

import json
import re

import jax
import pytest
from flax import nnx
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


def assert_listed(row: models.Row) -> None:
    found = [(family, *kind) for family, sizes, *kind in section("capabilities") if row.size in sizes.split("<br>")]
    assert found == [(row.family, *row.kind)], STALE


def test_every_family_and_preset_is_listed():
    sizes = [(family, size) for family, listed, *_ in section("capabilities") for size in listed.split("<br>")]
    listed = [(family, size.partition(":")[0]) for family, size in sizes]
    assert listed == [(name, preset) for name, family in FAMILIES.items() for preset in family.presets], STALE


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.full] * (name not in ("gpt2", "llama", "qwen3_5"))) for name in FAMILIES],
)
def test_what_a_family_is_made_of(name):
    """Of the preset with the fewest layers, which is the quickest to look at."""
    presets = FAMILIES[name].presets
    assert_listed(models.row(FAMILIES[name], min(presets, key=lambda preset: presets[preset].num_layers)))


@pytest.mark.full
@pytest.mark.parametrize("preset", weights.presets())
def test_what_a_preset_is_made_of(preset):
    family = next(f for f in FAMILIES.values() if preset in f.presets)
    assert_listed(models.row(family, preset))
    # Its layers are compared with each other here, which the list takes on trust.
    jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))


def test_the_worst_of_each_family_is_that_of_its_cases():
    rows = json.loads(page.CASES.read_text())
    assert list(rows) == [f"{family}/{name}" for family, name in page.cases()], STALE
    assert section("worst") == cells(page.worst(rows)), STALE


def test_every_family_has_a_note():
    assert set(re.findall(r"^### (\w+)$", page.PAGE.read_text(), re.MULTILINE)) == set(FAMILIES)


ROWS = [
    models.Row("a", "a-1", 52_464, 52_464, ("MHA", "RoPE", "full", "", "")),
    models.Row("a", "a-2", 999_885_952, 999_885_952, ("MHA", "RoPE", "full", "", "")),
    models.Row("a", "a-3", 124_439_808, 24_439_808, ("MHA", "1 of 8 experts", "full", "", "")),
    models.Row("b", "b-1", 671_026_419_200, 37_552_000_000, ("MHA", "1 of 8 experts", "full", "yes", "")),
]


def test_presets_that_differ_in_size_share_a_row():
    assert cells(models.markdown(ROWS)) == [
        ["a", "a-1: 52,464<br>a-2: 1.00B", "MHA", "RoPE", "full", "", ""],
        ["a", "a-3: 124M, 24M active", "MHA", "1 of 8 experts", "full", "", ""],
        ["b", "b-1: 671.03B, 37.55B active", "MHA", "1 of 8 experts", "full", "yes", ""],
    ]
    console = Console(width=120)
    with console.capture() as capture:
        console.print(models.table(ROWS))
    lines = [line.split() for line in capture.get().splitlines()]
    assert all(any(line[:2] == [row.preset, models.short(row.total)] for line in lines) for row in ROWS)
    assert ["a-2", "1.00B", "a:", "MHA;", "RoPE;", "full", "caches"] in lines
