"""Shows every entry of a subject on the subject's API page too, below its tables: copies of the entries on the objects'
pages, once these are written.
"""

import re
from pathlib import Path
from typing import Any

MARKED = re.compile(r"(<!-- entries: (?P<names>[^\n]*) -->).*?(<!-- end of entries -->)", re.DOTALL)
SECTION = re.compile(r'<section [^>]*id="(?P<id>[^"]+)">.*?</h1>(?P<body>.*)</section>', re.DOTALL)
BESIDE = re.compile(r'<div class="api-guides docutils container">.*?</div>', re.DOTALL)  # "See also": it is beside
LINK = re.compile(r'(?<= href=")(?P<to>[^"#]+)(?P<place>#[^"]*)?(?=")')
TITLE = "All entries"
PLACE = "all-entries"
CONTENTS = re.compile(rf'(<a class="[^"]*nav-link" href="#{PLACE}">[^<]*</a>)(<ul.*?</ul>)?', re.DOTALL)


def section(pages: list[str]) -> str:
    """Returns Markdown for the place of the entries on objects' pages, whose names are given."""
    marked = f"<!-- entries: {' '.join(pages)} -->\n<!-- end of entries -->"
    return f"\n## {TITLE}\n\nEach has a page of its own, too.\n\n```{{raw}} html\n{marked}\n```\n"


def fill(page: Path) -> None:
    """Copies entries into the page of a subject."""
    text = page.read_text()
    if not (found := MARKED.search(text)):
        return
    names = found["names"].split()
    text = MARKED.sub(
        lambda match: "\n".join([match[1], *(entry(page, name, names) for name in names), match[3]]), text
    )
    rows = "\n".join(f'<li class="toc-h3 nav-item toc-entry">{_link(name)}</li>' for name in names)
    nested = f'<ul class="nav section-nav flex-column">\n{rows}\n</ul>'
    page.write_text(CONTENTS.sub(lambda match: match[1] + nested, text))


def _link(name: str) -> str:
    return f'<a class="reference internal nav-link" href="#{_place(name)}">{name}</a>'


def _place(name: str) -> str:
    return f"entry-{name}"


def entry(page: Path, name: str, here: list[str]) -> str:
    """Returns an object's entry as HTML for the page of its subject.

    Args:
      page: the subject's page.
      name: of the object's page.
      here: objects whose entries are on this page; links to them stay on it.
    """
    text = (page.parent / "objects" / f"{name}.html").read_text()
    body = BESIDE.sub("", SECTION.search(text.partition("<article")[2].partition("</article>")[0])["body"])
    title = f'<a href="objects/{name}.html">{name}</a>'
    return (
        f'<section id="{_place(name)}">\n<h3>{title}</h3>{LINK.sub(lambda match: moved(match, here), body)}</section>'
    )


def moved(match: re.Match[str], here: list[str]) -> str:
    """Returns where a link of a page in `objects` leads from the folder above."""
    to, place = match["to"], match["place"] or ""
    if ":" in to:  # another site
        return match[0]
    if to.startswith("../"):
        return to.removeprefix("../") + place
    return place if place and to.removesuffix(".html") in here else f"objects/{to}{place}"


def fill_all(app, error) -> None:
    if error is None and app.builder.format == "html":
        for page in sorted(Path(app.outdir, "api").glob("*.html")):
            fill(page)


def setup(app) -> dict[str, Any]:
    app.connect("build-finished", fill_all)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
