"""An import hook that checks every annotation of maxlib during tests; `tests/conftest.py` installs it.

jaxtyping has a hook of its own, which writes the checks of every function at import (10 s in each process of a run);
this one writes those of a function at its first call. beartype alone checks the functions that name no shapes.
"""

import ast
import contextlib
import dataclasses
import functools
import sys
import typing
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

import beartype
import jaxtyping

# An int is welcome where a float is annotated, as pyright has it. jaxtyping's errors are TypeErrors too.
_types = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True, violation_type=TypeError))


def _shapes(function: Callable) -> Callable:
    """Checks once, with one size for each name of an axis; as a type checker of jaxtyping's, it would check arguments
    twice.
    """
    return jaxtyping.jaxtyped(_types(function), typechecker=None)


def install(package: str) -> None:
    """Checks the modules of `package` that are imported from now on."""
    sys.meta_path.insert(0, _Finder(package))


_is_on = True


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """Calls nothing but the functions themselves, as users do."""
    global _is_on
    _is_on = False
    yield
    _is_on = True


def check(thing):
    """Checks the calls of a function, or how a dataclass is made."""
    if not isinstance(thing, type):
        return _checked_later(thing) if thing.__annotations__ else thing
    if dataclasses.is_dataclass(thing) and "__init__" in vars(thing) and not hasattr(thing.__init__, "__wrapped__"):
        thing.__init__ = _checked_later(thing.__init__)
    return thing


def _checked_later(function: Callable) -> Callable:
    checked = None

    @functools.wraps(function)
    def first_checks_are_written(*args, **kwargs):
        nonlocal checked
        __tracebackhide__ = True
        if not _is_on:
            return function(*args, **kwargs)
        if checked is None:
            checked = _checking(function)(function)
        return checked(*args, **kwargs)

    return first_checks_are_written


def _checking(function: Callable) -> Callable:
    """Returns what adds checks to `function`."""
    try:
        hints = list(typing.get_type_hints(function).values())
    except Exception:  # names that are imported for the type checker only, which jaxtyping leaves out
        return jaxtyping.jaxtyped(typechecker=_types)
    return _shapes if any(_has_shape(hint) for hint in hints) else _types


def _has_shape(hint: object) -> bool:
    if isinstance(hint, type) and hint.__module__.startswith("jaxtyping"):
        return True
    inner = typing.get_args(hint)
    return any(_has_shape(item) for part in inner for item in (part if isinstance(part, list) else [part]))


class _Finder(PathFinder):
    def __init__(self, package: str):
        self.package = package

    def find_spec(self, name: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def source_to_code(self, data, path, *, _optimize: int = -1):  # pyright: ignore[reportIncompatibleMethodOverride]
        tree = ast.parse(data, path)
        _decorate(tree.body)
        return super().source_to_code(tree, path, _optimize=_optimize)

    def get_code(self, fullname: str):
        """Compiles the source: bytecode on disk is that of the module without checks."""
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)

    def exec_module(self, module: ModuleType) -> None:
        vars(module)[_CHECK] = check
        super().exec_module(module)


_CHECK = "__check_annotations__"


def _decorate(body: list[ast.stmt]) -> None:
    """Checks the functions innermost, where their annotations still are, and classes when they are dataclasses."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list.append(_decorator(node))
        elif isinstance(node, ast.ClassDef):
            node.decorator_list.insert(0, _decorator(node))
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            _decorate(getattr(node, field, []))


def _decorator(node: ast.stmt) -> ast.Name:
    return ast.copy_location(ast.Name(_CHECK, ast.Load()), node)
