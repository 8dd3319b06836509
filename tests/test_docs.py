"""The Python blocks of README.md and of the documentation run, page by page, from top to bottom."""

import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import maxlib
from tests import page_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "guides").glob("*.md"))]
FENCE = r"^```(?:python|\{code-cell\}[^\n]*)\n(?P<options>(?::[^\n]*\n)*)(?P<code>.*?)^```$"
BLOCK = re.compile(rf"(?P<not_run><!-- not run: [^\n]+ -->\n+)?{FENCE}", re.DOTALL | re.MULTILINE)
# Pages whose programs compile quickly run by default; `test_names_of_maxlib_exist` reads all of them.
QUICK = {"README", "add-a-model", "index"}


def blocks(page: Path) -> list[tuple[str, bool]]:
    """Each block, moved down to its own line of the page so that a traceback points there, and whether it has to
    fail.
    """
    text = page.read_text()
    matches = [match for match in BLOCK.finditer(text) if not match["not_run"]]
    lines = ["\n" * text[: match.start("code")].count("\n") for match in matches]
    return [(n + m["code"], "raises-exception" in m["options"]) for n, m in zip(lines, matches, strict=True)]


def marked(page: Path):
    return pytest.param(page, marks=[pytest.mark.full] * (page.stem not in QUICK), id=page.stem)


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if blocks(page)])
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block, fails in blocks(page):
        with pytest.raises(Exception) if fails else contextlib.nullcontext():
            exec(compile(block, str(page), "exec"), names)


def test_every_page_is_in_a_table_of_contents():
    entries = {ROOT / "README.md", ROOT / "docs" / "index.md"}
    for page in PAGES:
        for contents in re.findall(r"```\{toctree\}\n(.*?)```", page.read_text(), re.DOTALL):
            lines = [line for line in contents.splitlines() if line and not line.startswith(":")]
            paths = [line.rpartition("<")[2].removesuffix(">") for line in lines]  # `Title <path>` or a path
            entries |= {(page.parent / f"{path}.md").resolve() for path in paths}
    assert [page.name for page in PAGES if page not in entries] == []


def test_names_of_maxlib_exist():
    wrong = {page.stem: page_names.wrong_names([block for block, _ in blocks(page)]) for page in PAGES}
    assert {name: lines for name, lines in wrong.items() if lines} == {}


def test_names_in_tables_of_other_libraries_exist():
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs" / "coming-from.md").read_text(), re.MULTILINE)
    ours = [re.split(r"(?<!\\)\|", row)[-2].replace("\\|", "|") for row in rows]
    spans = [span for cell in ours for span in re.findall("`([^`]+)`", cell)]
    calls = [span.removeprefix("with ").rstrip(":") for span in spans if re.search(r"\w\.\w|\w\(", span)]
    code = [call for call in calls if not re.search(r"^(python|maxlib) |\.\.\.|\w/\w", call)]
    assert len(code) > 100
    packages = sorted({name for call in code for name in re.findall(r"\b[a-z_]+(?=\.\w)", call)} & set(dir(maxlib)))
    imports = f"import maxlib\nfrom maxlib import {', '.join(packages)}"
    assert page_names.wrong_names([imports, *code]) == []


def test_names_that_do_not_exist_are_found():
    page = [
        "import functools\nfrom maxlib import nn, ops as o, nothing\nfrom maxlib.models import lama\n",
        "nn.Atention(4)\no.Rope(4, bass=1)\nfunctools.partial(nn.Attention, dims=3)\n",
        "nn = x.anything\nnn.Anything(1)\n",
    ]
    assert sorted(line.partition(": ")[2] for line in page_names.wrong_names(page)) == [
        "functools.partial takes no dims",
        "maxlib has no nothing",
        "maxlib.models has no lama",
        "maxlib.nn has no Atention",
        "o.Rope takes no bass",
    ]


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
    files = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for name in {name for name, _ in files}:
        (tmp_path / name).unlink(missing_ok=True)  # maxlib's own Granite
    for name, code in files:
        with open(tmp_path / name, "a") as file:
            file.write(code)
    [row] = re.findall(
        r"<!-- file: tests/models/families.json -->\n```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE
    )
    table = tmp_path / "tests/models/families.json"
    table.write_text(json.dumps(json.loads(table.read_text()) | json.loads(row)))
    run = functools.partial(subprocess.run, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
    run([sys.executable, "-m", "tests.models.parity", "granite"])
    run([sys.executable, "-m", "pytest", "-q", "-x", "tests/models/test_families.py", "-k", "Granite"])
