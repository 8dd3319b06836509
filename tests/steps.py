"""Counts the pages to open from the first page of the built documentation: `python -m tests.steps docs/_build/html`.

Every page has to be within three, and the rows of docs/comparison.md have to say what is counted. Links are those of a
page's text, of the bar above and of the menu beside it.
"""

import re
import sys
from collections import deque
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST = 3
# Rows of docs/comparison.md and the pages that answer them; the nearest one counts.
ANSWERS = {
    "how to install": ("index",),  # its first lines are the command
    "a first program with its output": ("start", "guides/tour"),
    "a finished notebook, with figures": ("notebooks/",),
    "the entry of a function or class": ("api/nn", "api/ops", "api/training"),
    "pretrained weights": ("guides/weights",),
    "how to change a layer": ("guides/change-a-model",),
    "fine-tuning on chats": ("guides/finetune",),
    "many devices": ("guides/parallelism",),
    "whether a model fits, before a run": ("guides/plan",),
    "save and resume": ("guides/checkpoints",),
    "log to Weights & Biases": ("guides/observability",),
    "a NaN, a spike, a hang": ("guides/debug",),
    "names translated from another library": ("coming-from/",),
    "a glossary": ("glossary",),
    "the supported models": ("index",),  # names every family
    "equality with another implementation": ("models",),
}
LINK = re.compile(r'<a\b[^>]*\shref="(?P<to>[^"#:]+)\.html(?:#[^"]*)?"')
THEIRS = ("_modules/", "_static/", "genindex", "search", "py-modindex")  # pages of the theme, and source


def steps(site: Path) -> dict[str, int]:
    """Returns how many pages to open from the first one until each page is open."""
    found, waiting = {"index": 0}, deque(["index"])
    while waiting:
        page = waiting.popleft()
        for name in links(site, page):
            if name not in found and (site / f"{name}.html").exists():
                found[name] = found[page] + 1
                waiting.append(name)
    return found


def links(site: Path, page: str) -> list[str]:
    """Returns the pages that a page links to."""
    path = (site / f"{page}.html").resolve()
    found = [(path.parent / match["to"]).resolve() for match in LINK.finditer(path.read_text())]
    return [str(to.relative_to(site.resolve())) for to in found if to.is_relative_to(site.resolve())]


def wrong(found: dict[str, int], pages: list[str], comparison: str) -> list[str]:
    """Returns the pages that are too far away, and the rows that say something else."""
    far = [f"{page}: {found.get(page, 'cannot be reached')}" for page in pages if found.get(page, MOST + 1) > MOST]
    said = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|", comparison, re.MULTILINE))
    counted = {row: min(n for page, n in found.items() if page.startswith(starts)) for row, starts in ANSWERS.items()}
    return far + [
        f"docs/comparison.md, {row!r}: {said.get(row)} instead of {number}"
        for row, number in counted.items()
        if said.get(row, "").strip("*") != str(number)
    ]


def main() -> int:
    site = Path(sys.argv[1])
    built = [str(path.relative_to(site))[: -len(".html")] for path in sorted(site.rglob("*.html"))]
    pages = [page for page in built if not page.startswith(THEIRS)]
    found = wrong(steps(site), pages, (ROOT / "docs" / "comparison.md").read_text())
    print("\n".join(found) or f"{len(pages)} pages: each is within {MOST}, and the table says so")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
