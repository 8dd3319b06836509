"""Copies the notebooks of examples/notebooks next to the pages, with the outputs that they are stored with; says where
the outputs of the pages themselves are kept, and lets these pages be executed sooner.
"""

import base64
import hashlib
import json
import os
import re
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
HANDS = 8


def copy() -> None:
    for notebook in (ROOT / "examples" / "notebooks").glob("*.ipynb"):
        cells = json.loads(notebook.read_text())
        cells["cells"][0]["source"] = with_links(cells["cells"][0]["source"], notebook.name, repository())
        text, target = json.dumps(cells), HERE / "notebooks" / notebook.name
        target.parent.mkdir(exist_ok=True)
        if not target.exists() or target.read_text() != text:  # else Sphinx would read it again
            target.write_text(text)
            target.with_suffix(".png").write_bytes(largest_figure(cells))


def largest_figure(notebook: dict[str, Any]) -> bytes:
    """Returns the figure with the most to see that a notebook is stored with, for docs/gallery.md."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    figures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    return base64.b64decode(max(figures, key=len))


def repository() -> str | None:
    """Returns the address of the repository from pyproject.toml; None while it names none."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository")


def with_links(source: list[str] | str, name: str, repository: str | None) -> str:
    """Returns a notebook's first cell with links below its title: to the file, and to Colab if it is on GitHub."""
    title, _, rest = "".join(source).partition("\n")
    links = f"{{download}}`Download this notebook <../../examples/notebooks/{name}>`"
    if found := re.fullmatch(r"https://github\.com/([^/]+/[^/]+?)(?:\.git)?/?", repository or ""):
        colab = f"https://colab.research.google.com/github/{found[1]}/blob/main/examples/notebooks/{name}"
        links += f" · [Open in Colab]({colab})"
    return f"{title}\n\n{links}\n{rest}"


def cache_folder() -> Path:
    """Returns the folder for outputs: another one for each state of maxlib's code, since pages show what it prints."""
    code = hashlib.sha256()
    for path in sorted((ROOT / "maxlib").rglob("*.py")):
        code.update(path.read_bytes())
    return HERE / "_build" / "outputs" / code.hexdigest()[:16]


def keep_compiled() -> None:
    """Lets the pages share what jax compiles, also with a later build in which maxlib's code has changed."""
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(HERE / "_build" / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def spread(app, env, docnames: list[str]) -> None:
    """Deals the pages out like cards: each of Sphinx's processes takes neighbours, and most guides are executed."""
    docnames[:] = [name for start in range(HANDS) for name in docnames[start::HANDS]]


def setup(app) -> dict[str, Any]:
    app.connect("env-before-read-docs", spread)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
