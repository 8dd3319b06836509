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


def test_every_name_has_one_page(api, listed):
    assert [one for one, times in Counter(listed).items() if times > 1] == []
    pages = Counter(api.page_of(*one).lower() for one in listed)
    assert len(listed) > 700 and [page for page, times in pages.items() if times > 1] == []


def test_no_public_name_is_left_out(listed):
    names = {name for module, name in listed if module == "maxlib.nn"}
    homes = {name: getattr(getattr(nn, name), "__module__", "") for name in dir(nn)}
    assert {name for name, home in homes.items() if home.startswith("maxlib.nn.") and "._" in home} <= names


def test_a_page_has_its_entry_and_its_neighbours(api):
    page = api.page("maxlib.nn", "Attention", ["Attention", "MLA"])
    assert page.startswith("# nn.Attention\n") and ".. autoclass:: maxlib.nn.Attention\n" in page
    assert "See also: :py:obj:`MLA <maxlib.nn.MLA>`\n" in page


def test_a_value_says_what_the_string_below_it_says(api):
    assert api.summary("maxlib.post_training", "grpo") == "GRPO (arXiv:2402.03300)."
    assert ".. code-block:: python" in api.page("maxlib.post_training", "grpo", ["grpo"])


def test_a_choice_lists_its_values(api):
    assert api.summary("maxlib.ops", "ExpertWeightOrder") == "One of ``'EOI'``, ``'EIO'``."


@pytest.fixture
def entries(api):
    return importlib.import_module("entries")


def test_a_subjects_page_has_the_entries_of_its_objects(entries, tmp_path):
    (tmp_path / "objects").mkdir()
    entry = (
        '<article class="bd-article"><section class="a" id="nn-{0}"><h1>nn.{0}</h1><dl id="maxlib.nn.{0}"><a href="nn.B.html#maxlib.nn.B">B</a>'
        '<a href="ops.C.html#maxlib.ops.C">C</a><a href="../../guides/x.html">x</a><a href="https://a.b/c.html">d</a></dl>'
        '<div class="api-guides docutils container">See also</div></section></article>'
    )
    for name in "AB":
        (tmp_path / "objects" / f"nn.{name}.html").write_text(entry.format(name))
    page = tmp_path / "nn.html"
    menu = '<a class="reference internal nav-link" href="#all-entries">All entries</a>'
    page.write_text(f"<article>{entries.section(['nn.A', 'nn.B'])}</article>{menu}")
    for _ in range(2):  # a build without changes fills it again
        entries.fill(page)
        text = page.read_text()
        assert text.count('<dl id="maxlib.nn.A">') == text.count('<dl id="maxlib.nn.B">') == 1
        assert text.count('href="#entry-nn.A"') == 1 and 'id="entry-nn.A"' in text
    links = re.findall(r'href="([^"]*)"', text.partition('<dl id="maxlib.nn.A">')[2].partition("</dl>")[0])
    assert links == ["#maxlib.nn.B", "objects/ops.C.html#maxlib.ops.C", "../guides/x.html", "https://a.b/c.html"]
    assert "See also" not in text


def test_a_text_for_programs_has_signatures_and_what_they_say(api):
    pages = [page.read_text() for page in GROUPS if "{api}" in page.read_text()]
    assert all(len(api.as_text(page)) > len(page) for page in pages)
    text = api.as_text("## A\n\n```{api} maxlib.ops\nRope Causal\n```\n\n## More\n\n")
    assert "### maxlib.ops.Rope(dim: int, theta: float = 10000.0" in text and "Causal mask" in text
    assert "{api}" not in text and "More" not in text
