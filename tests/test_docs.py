"""The Python blocks of README.md and of the documentation run, page by page, from top to bottom."""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from flax import nnx

import maxlib
from maxlib import nn
from maxlib.models import llama
from tests import browser, page_names

ROOT = Path(__file__).parents[1]
# Decisions show signatures, not programs.
FOLDERS = ("docs", "docs/guides", "docs/coming-from", "docs/families", "docs/kernels")
FOUND = [ROOT / "README.md", *(page for folder in FOLDERS for page in (ROOT / folder).glob("*.md"))]
PAGES = sorted(path.relative_to(ROOT) for path in FOUND if path.name != "cli.md")  # which the build makes
BUILT = ("cards/", "api/objects/")  # pages that the build writes
FENCE = r"^```(?:python|\{code-cell\}[^\n]*)\n(?P<options>(?::[^\n]*\n)*)(?P<code>.*?)^```$"
BLOCK = re.compile(rf"(?P<not_run><!-- not run: [^\n]+ -->\n+)?{FENCE}", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, bool]]:
    """Each block, moved down to its own line of the page so that a traceback points there, and whether it has to
    fail.
    """
    found = [match for match in BLOCK.finditer(page) if not match["not_run"]]
    down = ["\n" * page[: match.start("code")].count("\n") for match in found]
    return [(n + match["code"], "raises-exception" in match["options"]) for n, match in zip(down, found, strict=True)]


# Pages whose programs take longest to compile; `test_names_of_maxlib_exist` reads them by default.
LONG = {
    *(
        "adapters",
        "add-a-layer",
        "add-a-strategy",
        "attention",
        "change-a-model",
        "checkpoints",
        "distillation",
        "dpo",
        "generation",
        "grpo",
        "images",
        "linear-attention",
        "long-sequences",
        "look-inside",
        "loss",
        "moe",
        "mtp",
        "pipelines",
        "weights",
    ),
    *("debug", "observability", "quantization", "sharding", "tour", "training"),
}


def marked(page: Path):
    is_long = page.parent.name == "guides" and page.stem in LONG
    return pytest.param(page, marks=[pytest.mark.full] * is_long, id=str(page))


@pytest.mark.parametrize("page", [marked(page) for page in PAGES if blocks((ROOT / page).read_text())])
def test_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__main__"}
    for block, fails in blocks((ROOT / page).read_text()):
        with pytest.raises(Exception) if fails else contextlib.nullcontext():
            exec(compile(block, str(ROOT / page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_names_of_maxlib_exist(page: Path):
    text = (ROOT / page).read_text()
    assert page_names.wrong_names([block for block, _ in blocks(text)]) == []


def test_names_in_tables_of_other_libraries_exist():
    pages = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "coming-from").glob("*.md")))
    rows = re.findall(r"^\|.*\|$", pages, re.MULTILINE)
    ours = [re.split(r"(?<!\\)\|", row)[-2].replace("\\|", "|") for row in rows]
    spans = [span for cell in ours for span in re.findall("`([^`]+)`", cell)]
    calls = [span.removeprefix("with ").rstrip(":") for span in spans if re.search(r"\w\.\w|\w\(", span)]
    code = [call for call in calls if not re.search(r"^(python|maxlib) |\.\.\.|\w/\w", call)]
    assert len(code) > 100
    packages = sorted({name for call in code for name in re.findall(r"\b[a-z_]+(?=\.\w)", call)} & set(dir(maxlib)))
    imports = f"import maxlib\nfrom maxlib import {', '.join(packages)}"
    wrong = page_names.wrong_names([imports, *code])
    assert [one for one in wrong if "nothing defines" not in one] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_import_public_names(page: Path):
    code = "\n".join(block for block, _ in blocks((ROOT / page).read_text()))
    assert re.findall(r"^\s*(?:from|import) maxlib[\w.]*\._\w+.*$", code, re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_code_fits_a_screen(page: Path):
    """At 1440 pixels a page shows 100 columns; a comment for the formatter is not shown."""
    code = re.findall(
        r"^```(?:python|bash|\{code-cell\}[^\n]*)\n(.*?)^```$", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE
    )
    lines = (line.removesuffix("  # fmt: skip") for block in code for line in block.splitlines())
    assert [line for line in lines if len(line) > 100] == []


def test_readme_is_one_screen_and_leads_everybody_on():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 60 and all(len(line) < 220 for line in text.splitlines())
    for command in ('pip install -e ".[examples]" && python examples/pretrain.py', "pip install nox && nox -s tests"):
        assert f"```bash\n{command}\n```" in text
    rows = re.findall(r"^\| (?!To \.\.\. )(?P<who>[^|]+) \|(?P<where>[^|]+)\|$", text, re.MULTILINE)
    assert len(rows) >= 8 and all("](" in where for _, where in rows)


def test_readmes_picture_is_the_model():
    """`python docs/figures.py` draws it anew."""
    model = jax.eval_shape(lambda: llama.Llama(llama.PRESETS["llama3.1-8b"], rngs=nnx.Rngs(0)))
    picture = re.sub(r"<style>svg.*?</style>", "", (ROOT / "docs" / "llama.svg").read_text())
    assert picture == nn.draw(model).svg + "\n"


def test_long_pages_exist():
    assert {page.stem for page in PAGES if page.parent.name == "guides"} >= LONG


def test_names_that_do_not_exist_are_found():
    page = [
        "import functools\nfrom maxlib import nn, ops as o, nothing\nfrom maxlib.models import lama\n",
        "nn.Atention(4)\no.Rope(4, bass=1)\nfunctools.partial(nn.Attention, dims=3)\nx = nn.cast(y)\n",
        "nn = x.anything\nnn.Anything(1)\n",
        "nn.context(1, 2, 3, 4)\n",
    ]
    assert sorted(line.partition(": ")[2] for line in page_names.wrong_names(page)) == [
        "functools.partial takes no dims",
        "maxlib has no nothing",
        "maxlib.models has no lama",
        "maxlib.nn has no Atention",
        "nn.context takes 2 arguments by position",
        "nothing defines y",
        "o.Rope takes no bass",
    ]


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
    files = re.findall(r"<!-- file: (\S+) -->\n```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    for name in {name for name, _ in files}:
        (tmp_path / name).unlink(missing_ok=True)  # maxlib's own Granite
    for name, code in files:
        with open(tmp_path / name, "a") as file:
            file.write(code)
    run = functools.partial(subprocess.run, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)}, check=True)
    run([sys.executable, "-m", "tests.models.parity", "granite"])
    run([sys.executable, "-m", "pytest", "-q", "-x", "tests/models/test_granite.py"])


@pytest.mark.parametrize("words", [w for w, page in browser.SEARCHES.items() if not page.startswith(BUILT)])
def test_searches_find_their_words(words):
    """The site's search lists pages that have every word, or one that begins with it; `tests/browser.py` looks at the
    order.
    """
    page = browser.SEARCHES[words]
    path = ROOT / "examples" / f"{page}.ipynb" if page.startswith("notebooks/") else ROOT / "docs" / f"{page}.md"
    found = set(re.findall(r"\w+", path.read_text().lower()))
    missing = [word for word in re.findall(r"\w+", words) if not any(one.startswith(word) for one in found)]
    assert missing == []
