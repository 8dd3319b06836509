"""Puts a built site beside those of other versions: `python docs/versions.py docs/_build/html PUBLISHED 0.1.0`.

PUBLISHED then has a folder for each version, `switcher.json` for the menu of versions, and a first page that leads to
the newest release. `--base /maxlib/` is the path at which the host shows it. Build the site with the environment
variable DOCS_VERSION set to the version. This needs nothing but Python.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

DEVELOPMENT = "dev"  # the state of the main branch
TO_ANOTHER_PAGE = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/"><a href="{0}/">maxlib</a>\n'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("published", type=Path)
    parser.add_argument("version", help=f"such as 0.1.0, or {DEVELOPMENT}")
    parser.add_argument("--base", default="/", help="path at which the host shows PUBLISHED")
    args = parser.parse_args()
    add(args.site, args.published, args.version, args.base)


def add(site: Path, published: Path, version: str, base: str) -> None:
    """Copies a site, and writes the list of versions and the first page anew."""
    if version != DEVELOPMENT and not re.fullmatch(r"\d+(\.\d+)+((a|b|rc)\d+)?", version):
        raise ValueError(f"{version} is neither a version such as 0.1.0 nor {DEVELOPMENT}")
    shutil.rmtree(published / version, ignore_errors=True)
    shutil.copytree(site, published / version, ignore=shutil.ignore_patterns(".doctrees", ".buildinfo"))
    found = versions([path.parent.name for path in published.glob("*/index.html")])
    (published / "switcher.json").write_text(json.dumps(menu(found, base), indent=2) + "\n")
    (published / "index.html").write_text(TO_ANOTHER_PAGE.format(newest(found)))
    (published / ".nojekyll").touch()  # GitHub Pages would leave out _static


def versions(names: list[str]) -> list[str]:
    """Sorts versions: development first, then the newest release."""
    return sorted(names, key=_rank, reverse=True)


def _rank(name: str) -> tuple:
    if name == DEVELOPMENT:
        return (1,)
    numbers, before, number = re.fullmatch(r"([\d.]+)(?:(a|b|rc)(\d+))?", name).groups()
    return 0, [int(part) for part in numbers.split(".")], before or "release", int(number or 0)


def newest(found: list[str]) -> str:
    """Returns the newest release; a release candidate or the development state only where there is none."""
    releases = [name for name in found if re.fullmatch(r"[\d.]+", name)]
    return (releases or found)[0]


def menu(found: list[str], base: str) -> list[dict[str, object]]:
    """Returns the entries of the theme's menu of versions."""
    top = newest(found)
    entry = lambda name: {
        "name": f"{name} (stable)" if name == top and name != DEVELOPMENT else name,
        "version": name,
        "url": f"{base.rstrip('/')}/{name}/",
        "preferred": name == top,
    }
    return [entry(name) for name in found]


if __name__ == "__main__":
    main()
