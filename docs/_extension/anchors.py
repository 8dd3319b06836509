"""Checks the finished pages: every link within the site leads to a file, and to a place that is in it."""

import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from sphinx.util import logging

LOG = logging.getLogger(__name__)
LINK = re.compile(r"""<(?:a|img|link|script|source|iframe)\b[^>]*?\s(?:href|src)=(["'])(?P<to>.*?)\1""", re.DOTALL)
PLACE = re.compile(r"""\s(?:id|name)=(["'])(?P<place>.*?)\1""")


def dead_links(root: Path) -> list[tuple[str, str]]:
    """Finds links of the pages under a folder that lead nowhere.

    Returns:
      Pairs of the page and what it links to; links to other sites are not followed.
    """
    pages = [page for page in root.rglob("*.html") if "_static" not in page.parts]  # the theme's own
    texts = {page.resolve(): page.read_text() for page in pages}
    places = {page: {unquote(match["place"]) for match in PLACE.finditer(text)} for page, text in texts.items()}
    found = []
    for page, text in texts.items():
        for to in sorted({match["to"].replace("&amp;", "&") for match in LINK.finditer(text)}):
            if not _leads_somewhere(page, to, places):
                found.append((str(page.relative_to(root.resolve())), to))
    return found


def _leads_somewhere(page: Path, to: str, places: dict[Path, set[str]]) -> bool:
    parts = urlsplit(to)
    if parts.scheme or parts.netloc or to in ("", "#"):
        return True
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not parts.fragment or target not in places:
        return target.is_file()
    return unquote(parts.fragment) in places[target]


def check(app, error) -> None:
    """Warns of each dead link, once the pages are there; a build with `-W` then fails."""
    if error is None and app.builder.format == "html":
        for page, to in dead_links(Path(app.outdir)):
            LOG.warning("%s links to %s, which is not there", page, to)


def setup(app) -> dict[str, Any]:
    app.connect("build-finished", check, priority=900)  # after the files that other extensions write
    return {"parallel_read_safe": True, "parallel_write_safe": True}
