"""Model families, one file each: `maxlib.models.llama` and so on, imported when they are named.

`families()` and `presets()` list what is supported, also what other packages register; `maxlib models` prints
it.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING

from maxlib._names import no_attribute

if TYPE_CHECKING:
    from maxlib.weights import families as families
    from maxlib.weights import presets as presets

_LISTS = ("families", "presets")
_FAMILIES = tuple(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def __getattr__(name: str):
    if name in _LISTS:
        return getattr(importlib.import_module("maxlib.weights"), name)
    if name in _FAMILIES:
        return importlib.import_module(f"{__name__}.{name}")
    raise no_attribute(__name__, name, _LISTS + _FAMILIES)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LISTS, *_FAMILIES])
