"""Sample text that comes with Python, for experiments without a corpus or a network."""

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grain

from maxlib.data._sources import Document, in_memory

_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def python_text() -> grain.MapDataset[Document]:
    """Reads about 2.2 million characters of English: Python's help topics and the docstrings of its standard library.

    One document per topic and one per module, always in the same order. The text differs between Python versions.
    """
    return in_memory(_documents())


@cache
def _documents() -> tuple[str, ...]:
    from pydoc_data.topics import topics

    root = Path(sysconfig.get_path("stdlib"))
    modules = (path for path in root.rglob("*.py") if _LEFT_OUT.isdisjoint(path.relative_to(root).parts))
    texts = ["\n\n".join(_docstrings(ast.parse(path.read_bytes()))) for path in sorted(modules)]
    return tuple(text for text in [*(topics[name] for name in sorted(topics)), *texts] if text.strip())


def _docstrings(node: ast.AST) -> Iterator[str]:
    """Docstrings in the order of the source."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    if isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
        for child in ast.iter_child_nodes(node):
            yield from _docstrings(child)
