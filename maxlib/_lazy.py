"""Packages whose names are imported on first use."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from maxlib._names import no_attribute
from maxlib._utils.garbage import collection_paused


def lazy(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and `__dir__` of a package that imports its names when they are first used.

    The names are those that the package imports under `if TYPE_CHECKING:`, where editors and type checkers read them.

        __getattr__, __dir__ = lazy(__name__, __file__)

    Args:
        package: The package's `__name__`.
        file: Its `__file__`.
    """
    blocks = [node for node in ast.parse(Path(file).read_text(encoding="utf-8")).body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: str(node.module) for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise no_attribute(package, name, listed())
        with collection_paused():
            if homes[name] == package:
                return importlib.import_module(f"{package}.{name}")
            value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)  # the next use does not come here
        return value

    def listed() -> list[str]:
        return sorted(homes)

    return get, listed
