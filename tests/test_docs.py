"""The Python blocks of README.md and of the documentation run, page by page, from top to bottom."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Decisions show signatures, not programs.
FOUND = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").rglob("*.md")]
PAGES = sorted(path.relative_to(ROOT) for path in FOUND)
FENCE = r"^```(?:python|\{code-cell\}[^\n]*)\n(?P<options>(?::[^\n]*\n)*)(?P<code>.*?)^```$"
BLOCK = re.compile(rf"(?P<not_run><!-- not run: [^\n]+ -->\n+)?{FENCE}", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, bool]]:
    """Each block, moved down to its own line of the page so that a traceback points there, and whether it has to
    fail.
    """
    found = [match for match in BLOCK.finditer(page) if not match["not_run"]]
    down = ["\n" * page[: match.start("code")].count("\n") for match in found]
    return [(n + match["code"], "raises-exception" in match["options"]) for n, match in zip(down, found, strict=True)]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks((ROOT / page).read_text())], ids=str)
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block, fails in blocks((ROOT / page).read_text()):
        with pytest.raises(Exception) if fails else contextlib.nullcontext():
            exec(compile(block, str(ROOT / page), "exec"), names)


def test_blocks_are_found_where_they_stand():
    page = (
        "a\n```python\nx = 1\n```\n\n<!-- not run: needs a TPU -->\n```python\ny\n```\n\n"
        "```{code-cell} ipython3\n:tags: [raises-exception]\nz = x\n```\n"
    )
    found = [(code.count("\n"), code.strip(), fails) for code, fails in blocks(page)]
    assert found == [(3, "x = 1", False), (13, "z = x", True)]


@pytest.mark.full
@pytest.mark.timeout(900)  # it is a test run of its own
def test_the_guide_to_adding_a_model_adds_one(tmp_path: Path):
    """Its files, laid into a copy of the repository, pass the tests that it describes."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    for folder in ("maxlib", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    page = (ROOT / "docs" / "guides" / "add-a-model.md").read_text()
    for name, code in re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE):
        with open(tmp_path / name, "a") as file:
            file.write(code)
    run = functools.partial(subprocess.run, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
    run([sys.executable, "-m", "tests.models.parity", "granite"])
    run([sys.executable, "-m", "pytest", "-q", "-x", "tests/models/test_granite.py"])
