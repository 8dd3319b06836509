"""Puts the notebooks of examples/notebooks, with their stored outputs, beside the pages, and the outputs of the pages
themselves into a cache.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
ROOT = HERE.parent
HANDS = 8


def copy() -> None:
    (HERE / "notebooks").mkdir(exist_ok=True)
    for notebook in (ROOT / "examples" / "notebooks").glob("*.ipynb"):
        shutil.copy2(notebook, HERE / "notebooks")


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


def pages_for_the_site(app, docname: str, source: list[str]) -> None:
    """Lets links to notebooks lead to their copies, and leaves out comments for the formatter."""
    source[0] = source[0].replace("../examples/notebooks/", "notebooks/").replace("  # fmt: skip", "")


def setup(app) -> dict[str, Any]:
    app.connect("env-before-read-docs", spread)
    app.connect("source-read", pages_for_the_site)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
