"""The Python blocks of README.md and of the documentation run, page by page, from top to bottom."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Decisions show signatures, not programs.
FOUND = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").rglob("*.md")]
PAGES = sorted(path.relative_to(ROOT) for path in FOUND)
BLOCK = re.compile(r"(?P<not_run><!-- not run: [^\n]+ -->\n+)?^```python\n(?P<code>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[str]:
    """Each block, moved down to its own line of the page, so that a traceback points at the page."""
    return ["\n" * page[: m.start("code")].count("\n") + m["code"] for m in BLOCK.finditer(page) if not m["not_run"]]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks((ROOT / page).read_text())], ids=str)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block in blocks((ROOT / page).read_text()):
        exec(compile(block, str(ROOT / page), "exec"), names)


def test_blocks_are_found_where_they_stand():
    page = "a\n```python\nx = 1\n```\n\n<!-- not run: needs a TPU -->\n```python\ny\n```\n\n```python\nz = x\n```\n"
    assert [(code.count("\n"), code.strip()) for code in blocks(page)] == [(3, "x = 1"), (12, "z = x")]
