"""Lists maxlib's public API: every public name, its parameters and their defaults.

`python -m tests.public_api --write` writes `tests/public_api.txt` anew, after a change on purpose.
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
    """Returns the modules that users import from: subpackages, and their modules without an underscore."""
    modules = [m.name for m in pkgutil.walk_packages(maxlib.__path__, "maxlib.") if "._" not in m.name]
    return ["maxlib", *(name for name in modules if not name.startswith(("maxlib.models.", "maxlib.kernels")))]


def shown(value: Any) -> str:
    """Returns a default as text that is the same in every process."""
    if callable(value) and hasattr(value, "__name__"):  # a function, a class, or what jax.jit returns
        return value.__name__
    text = repr(value)
    return type(value).__name__ if " at 0x" in text else text


def signature(thing: Any) -> str:
    """Returns the parameters of a function or a constructor, without types."""
    if isinstance(thing, type) and not getattr(thing.__init__, "__module__", "").startswith("maxlib"):
        return ""  # inherited from another library
    # Modules of Flax have a metaclass, whose signature says nothing.
    parameters = list(inspect.signature(thing.__init__ if isinstance(thing, type) else thing).parameters.values())
    words, star = [], False
    for p in parameters[isinstance(thing, type) :]:  # without self
        if p.kind is p.KEYWORD_ONLY and not star:
            words.append("*")
        star = star or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        stars = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(f"{stars}{p.name}" + ("" if p.default is p.empty else f"={shown(p.default)}"))
    return f"({', '.join(words)})"


def lines() -> Iterator[str]:
    """Yields a line for each public function or class, under its shortest public name."""
    described = {}
    for room in sorted(rooms(), key=lambda name: name.count(".")):
        module = import_module(room)
        for public in sorted(set(getattr(module, "__all__", None) or dir(module))):
            thing = getattr(module, public, None)
            if public.startswith("_") or not callable(thing):
                continue
            if (getattr(thing, "__module__", "") or "").startswith("maxlib"):
                described.setdefault(thing, f"{room}.{public}{signature(thing)}")
    yield from sorted(described.values())


if __name__ == "__main__":
    if "--write" in sys.argv:
        FILE.write_text("\n".join(lines()) + "\n")
    else:
        print(*lines(), sep="\n")
