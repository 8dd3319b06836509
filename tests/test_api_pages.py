"""The API pages list every public name once, and each has a page of its own whose file no system confuses."""

import importlib
import re
import sys
from collections import Counter
from pathlib import Path

import pytest

from maxlib import nn

ROOT = Path(__file__).parents[1]
GROUPS = sorted((ROOT / "docs" / "api").glob("*.md"))


@pytest.fixture(scope="module")
def api():
    pytest.importorskip("sphinx")
    sys.path.insert(0, str(ROOT / "docs" / "_extension"))
    yield importlib.import_module("api")
    sys.path.pop(0)


@pytest.fixture(scope="module")
def listed(api) -> list[tuple[str, str]]:
    return [(module, name) for page in GROUPS for module, names in api.listed(page.read_text()) for name in names]


def test_listed_names_exist():
    text = "\n".join(page.read_text() for page in GROUPS)
    blocks = re.findall(r"^```\{api\} (\S+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    names = [(module, name) for module, names in blocks for name in names.split() if name != "*"]
    assert [pair for pair in names if not hasattr(importlib.import_module(pair[0]), pair[1])] == []


def test_every_name_has_one_page(api, listed):
    assert [entry for entry, times in Counter(listed).items() if times > 1] == []
    pages = Counter(api.page_of(*entry).lower() for entry in listed)
    assert len(listed) > 700 and [page for page, times in pages.items() if times > 1] == []


def test_no_public_name_is_left_out(listed):
    families = {f"maxlib.models.{path.stem}" for path in (ROOT / "maxlib" / "models").glob("[!_]*.py")}
    assert families <= {module for module, _ in listed}
    names = {name for module, name in listed if module == "maxlib.nn"}
    homes = {name: getattr(getattr(nn, name), "__module__", "") for name in dir(nn)}
    assert {name for name, home in homes.items() if home.startswith("maxlib.nn.") and "._" in home} <= names


def test_a_page_has_its_entry_and_its_neighbours(api):
    page = api.page("maxlib.nn", "Attention", ["Attention", "MLA"])
    assert page.startswith("# nn.Attention\n") and ".. autoclass:: maxlib.nn.Attention\n" in page
    assert "See also: :py:obj:`MLA <maxlib.nn.MLA>`\n" in page


def test_a_value_says_what_the_string_below_it_says(api):
    said = "What the two projections of experts are called in policies of ``jax.checkpoint``."
    assert api.summary("maxlib.kernels.grouped_matmul.rows", "NAMES") == said


def test_an_example_in_a_docstring_is_code(api):
    lines = api.documentation("maxlib.post_training", "GRPO").split("\n")
    assert ".. code-block:: python" in api.prepared(lines)


def test_a_choice_lists_its_values(api):
    assert api.summary("maxlib.ops", "ExpertWeightOrder") == "One of ``'EOI'``, ``'EIO'``."
