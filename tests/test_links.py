"""Links between the Markdown files of the repository lead to a file, and to a heading that it has."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TREES = (
    "docs/*.md",
    "docs/api/*.md",
    "docs/coming-from/*.md",
    "docs/decisions/*.md",
    "docs/families/*.md",
    "docs/guides/*.md",
    "docs/kernels/*.md",
)
PAGES = sorted([*ROOT.glob("*.md"), *(page for tree in TREES for page in ROOT.glob(tree))])
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<to>[^()\s]+(?:\([^()\s]*\))?)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
LABEL = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The places of a page that a link may name: its headings as GitHub and MyST write them, and labels."""
    titles = HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain} | set(LABEL.findall(text))


def dead(page: Path, text: str) -> list[str]:
    found = []
    for to in (match["to"] for match in LINK.finditer(CODE.sub("", text))):
        path, _, place = to.partition("#")
        if re.match(r"[a-z]+:", to):
            continue
        target = page.parent / path if path else page
        is_there = target.exists()  # in a clone, not only on the built site
        has_place = (
            not place
            or target.suffix != ".md"
            or not is_there
            or place in anchors(target.read_text() if path else text)
        )
        if not (is_there and has_place):
            found.append(to)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert dead(page, page.read_text()) == []


def test_dead_links_are_found():
    text = "## A `b`, c\n[a](#a-b-c) [b](#b) [c](start.md#install) [d](start.md#nothing) [e](x.md) `[f](y.md)` [g](https://a.b)"
    text += " [h](notebooks/plan_70b.ipynb) [i](../examples/notebooks/plan_70b.ipynb)"
    expected = ["#b", "start.md#nothing", "x.md", "notebooks/plan_70b.ipynb"]
    assert dead(ROOT / "docs" / "index.md", text) == expected


def test_dead_links_of_built_pages_are_found(tmp_path):
    path = ROOT / "docs" / "_extension" / "anchors.py"
    source = path.read_text().replace("from sphinx.util import logging", "import logging")  # the docs extra has sphinx
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("anchors", None))
    exec(compile(source, str(path), "exec"), vars(module))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.html").write_text('<h1 id="here">B</h1><a href="../a.html">a</a><a href="#gone">g</a>')
    (tmp_path / "a.html").write_text(
        '<a class="x" href="sub/b.html#here">b</a><a href="sub/b.html#nowhere">b</a><img src="no.png"/>'
        '<a href="https://example.org/none">e</a><a href="sub/c.html">c</a>'
    )
    expected = {
        ("a.html", "sub/b.html#nowhere"),
        ("a.html", "no.png"),
        ("a.html", "sub/c.html"),
        ("sub/b.html", "#gone"),
    }
    assert set(module.dead_links(tmp_path)) == expected
