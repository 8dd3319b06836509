"""Records the default arguments of maxlib's public API, because changing one changes users' results.

`python -m tests.defaults --write` writes `tests/defaults.txt` anew, after a default was changed on purpose.
"""

import inspect
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import maxlib

FILE = Path(__file__).with_suffix(".txt")


def rooms() -> list[str]:
    """The modules that users import from: subpackages, and their modules without an underscore."""
    found = [m.name for m in pkgutil.walk_packages(maxlib.__path__, "maxlib.") if "._" not in m.name]
    return ["maxlib", *(name for name in found if not name.startswith(("maxlib.models.", "maxlib.kernels")))]


def shown(value: Any) -> str:
    """A default as text that is the same in every process."""
    if callable(value) and hasattr(value, "__name__"):  # a function, a class, or what jax.jit returns
        return value.__name__
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def defaults_of(thing: Any) -> dict[str, str]:
    """The parameters of a function or a constructor that have defaults."""
    # Modules of Flax have a metaclass, whose signature says nothing.
    parameters = inspect.signature(thing.__init__ if isinstance(thing, type) else thing).parameters.values()
    return {p.name: shown(p.default) for p in parameters if p.default is not inspect.Parameter.empty}


def lines() -> Iterator[str]:
    """A line for each public function or class that has defaults, under its shortest public name."""
    described = {}
    for room in sorted(rooms(), key=lambda name: name.count(".")):
        module = import_module(room)
        for public in sorted(set(getattr(module, "__all__", None) or dir(module))):
            thing = getattr(module, public, None)
            if public.startswith("_") or not callable(thing):
                continue
            if not (getattr(thing, "__module__", "") or "").startswith("maxlib"):
                continue
            if isinstance(thing, type) and not getattr(thing.__init__, "__module__", "").startswith("maxlib"):
                continue  # inherited from another library
            if defaults := defaults_of(thing):
                text = ", ".join(f"{k}={v}" for k, v in defaults.items())
                described.setdefault(thing, f"{room}.{thing.__qualname__}: {text}")
    yield from sorted(described.values())


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text("\n".join(lines()) + "\n")
    else:
        print(*lines(), sep="\n")
