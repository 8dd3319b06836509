"""Copies the notebooks of examples/notebooks next to the pages, with the outputs that they are stored with."""

import shutil
from pathlib import Path

HERE = Path(__file__).parents[1]


def copy() -> None:
    for notebook in (HERE.parent / "examples" / "notebooks").glob("*.ipynb"):
        target = HERE / "notebooks" / notebook.name
        target.parent.mkdir(exist_ok=True)
        if not target.exists() or target.read_bytes() != notebook.read_bytes():
            shutil.copy(notebook, target)
