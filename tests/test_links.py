"""Links between the Markdown files of the repository lead to a file, and to a heading that it has; files of Python that
they name exist.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = (ROOT, ROOT / "docs", ROOT / "docs" / "guides", ROOT / "docs" / "api", ROOT / "examples")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\((?P<to>[^()\s]+(?:\([^()\s]*\))?)\)")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
LABEL = re.compile(r"^\(([\w-]+)\)=$", re.MULTILINE)
FILE = re.compile(r"`([\w/]+/\w+\.py)`")


def anchors(text: str) -> set[str]:
    """The places of a page that a link may name: its headings as GitHub and MyST write them, and labels."""
    titles = HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain} | set(LABEL.findall(text))


def dead(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere; those to other sites are not followed."""
    links = []
    for to in (match["to"] for match in LINK.finditer(CODE.sub("", text))):
        path, _, place = to.partition("#")
        target = page.parent / path if path else page
        if re.match(r"[a-z]+:", to):
            continue
        is_page = place and target.suffix == ".md" and target.exists()
        if not target.exists() or (is_page and place not in anchors(target.read_text() if path else text)):
            links.append(to)
    return links


PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]


def test_links_lead_somewhere():
    links = {str(page.relative_to(ROOT)): dead(page, page.read_text()) for page in PAGES}
    assert {page: to for page, to in links.items() if to} == {}


def test_files_that_pages_name_exist():
    names = {(page.name, name) for page in PAGES for name in FILE.findall(page.read_text())}
    assert len(names) > 30
    assert [
        name for name in sorted(names) if not any((root / name[1]).exists() for root in (ROOT, ROOT / "maxlib"))
    ] == []


def test_dead_links_are_found():
    text = "## A `b`, c\n[a](#a-b-c) [b](#b) [c](start.md#install) [d](start.md#nothing) [e](x.md) `[f](y.md)` [g](https://a.b)"
    assert dead(ROOT / "docs" / "index.md", text) == ["#b", "start.md#nothing", "x.md"]
