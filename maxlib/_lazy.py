"""Facades whose names are imported on first use."""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from maxlib._names import no_attribute


def lazy(package: str, modules: Mapping[str, tuple[str, ...]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns the `__getattr__` and `__dir__` of a package that imports its names when they are first used.

    Args:
        package: The package's `__name__`.
        modules: The names that each module below `package` defines. The empty name stands for submodules themselves.
    """
    home = {name: f"{package}.{module}" for module, names in modules.items() if module for name in names}
    submodules = modules.get("", ())

    def get(name: str) -> Any:
        if name in submodules:
            return importlib.import_module(f"{package}.{name}")
        if name not in home:
            raise no_attribute(package, name, listed())
        return getattr(importlib.import_module(home[name]), name)

    def listed() -> list[str]:
        return sorted([*home, *submodules])

    return get, listed
