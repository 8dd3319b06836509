"""Checks that a tag, the version and the changelog agree, and prints the changelog's section for the release.

`python tests/release.py v0.1.0`; .github/workflows/release.yml runs it, without maxlib installed.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, source: str, changelog: str, citation: str) -> str:
    """Returns the section of a version.

    Args:
      tag: such as v0.1.0.
      source: text of maxlib/__init__.py.
      changelog: text of CHANGELOG.md.
      citation: text of CITATION.cff.

    Raises:
      ValueError: when the three do not name the same version, or the section is empty.
    """
    version = re.search(r'^__version__ = "(.+)"$', source, re.MULTILINE)[1]
    cited = re.search(r"^version: (.+)$", citation, re.MULTILINE)[1]
    if not tag == f"v{version}" == f"v{cited}":
        raise ValueError(f"the tag is {tag}, maxlib.__version__ {version}, the version in CITATION.cff {cited}")
    section = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.DOTALL | re.MULTILINE)
    if not section or not section[1].strip():
        raise ValueError(f"CHANGELOG.md has no section ## [{version}], or an empty one")
    return section[1].strip() + "\n"


if __name__ == "__main__":
    texts = ((ROOT / name).read_text() for name in ("maxlib/__init__.py", "CHANGELOG.md", "CITATION.cff"))
    print(notes(sys.argv[1], *texts), end="")
