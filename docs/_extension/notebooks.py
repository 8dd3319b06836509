"""Copies the notebooks of examples/notebooks next to the pages, with the outputs that they are stored with, and says
where the outputs of the pages themselves are kept.
"""

import hashlib
import shutil
from pathlib import Path

HERE = Path(__file__).parents[1]


def copy() -> None:
    for notebook in (HERE.parent / "examples" / "notebooks").glob("*.ipynb"):
        target = HERE / "notebooks" / notebook.name
        target.parent.mkdir(exist_ok=True)
        if not target.exists() or target.read_bytes() != notebook.read_bytes():
            shutil.copy(notebook, target)


def cache_folder() -> Path:
    """Returns the folder for outputs: another one for each state of maxlib's code, since pages show what it prints."""
    code = hashlib.sha256()
    for path in sorted((HERE.parent / "maxlib").rglob("*.py")):
        code.update(path.read_bytes())
    return HERE / "_build" / "outputs" / code.hexdigest()[:16]
