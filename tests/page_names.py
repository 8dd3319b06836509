"""Finds names on documentation pages that do not exist in maxlib, without running the code.

Pages whose blocks take long to compile run in `tests_full` only; this notices what usually breaks them.
"""

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

UNKNOWN = object()


def wrong_names(blocks: list[str]) -> list[str]:
    """Imports, attributes and arguments in `blocks`, in their order, that do not exist; names that nothing defines."""
    found, bound = [], {}
    defined = {*dir(builtins), "__name__"}
    for block in blocks:
        tree = ast.parse(block)
        defined |= set(_defined(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                found += _bind(node, bound)
        own = set(_defined(tree, imports=False))  # a local that hides a module
        modules = {name: value for name, value in bound.items() if name not in own}
        for node in ast.walk(tree):
            found += _check(node, modules)
            if isinstance(node, ast.Name) and node.id not in defined:
                found.append(f"line {node.lineno}: nothing defines {node.id}")
    return found


def _defined(tree: ast.AST, imports: bool = True) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and imports:
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def _bind(node: ast.Import | ast.ImportFrom, bound: dict[str, Any]) -> Iterator[str]:
    """Records the names that an import of maxlib binds."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            if alias.name.partition(".")[0] == "maxlib":
                module = importlib.import_module(alias.name)
                bound[alias.asname or "maxlib"] = module if alias.asname else importlib.import_module("maxlib")
        elif (node.module or "").partition(".")[0] == "maxlib":
            value = _attribute(importlib.import_module(node.module), alias.name)
            bound[alias.asname or alias.name] = value
            if value is UNKNOWN:
                yield f"line {node.lineno}: {node.module} has no {alias.name}"


def _check(node: ast.AST, bound: dict[str, Any]) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, bound)
        if isinstance(owner, ModuleType) and _attribute(owner, node.attr) is UNKNOWN:
            yield f"line {node.lineno}: {owner.__name__} has no {node.attr}"
    elif isinstance(node, ast.Call):
        function, arguments = node.func, node.args
        if ast.unparse(function) in ("functools.partial", "partial") and arguments:
            function, *arguments = arguments
        called = _value(function, bound)
        if callable(called) and not any(isinstance(one, ast.Starred) for one in arguments):
            yield from _wrong_arguments(node, called, len(arguments))


def _wrong_arguments(node: ast.Call, called: Any, positional: int) -> Iterator[str]:
    try:
        # Metaclasses of layers take anything and pass it on.
        signature = inspect.signature(called.__init__) if isinstance(called, type) else inspect.signature(called)
    except (TypeError, ValueError):
        return
    parameters = list(signature.parameters.values())[isinstance(called, type) :]
    kinds = [one.kind for one in parameters]
    named = {one.name for one in parameters if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for keyword in node.keywords:
            if keyword.arg is not None and keyword.arg not in named:
                yield f"line {node.lineno}: {ast.unparse(node.func)} takes no {keyword.arg}"
    places = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_POSITIONAL not in kinds and positional > len(places):
        yield f"line {node.lineno}: {ast.unparse(node.func)} takes {len(places)} arguments by position"


def _value(node: ast.AST, bound: dict[str, Any]) -> Any:
    """Resolves a dotted name that begins with an import of maxlib."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _value(node.value, bound)
        return _attribute(owner, node.attr) if isinstance(owner, ModuleType) else None
    return None


def _attribute(module: ModuleType, name: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        pass
    try:
        return importlib.import_module(f"{module.__name__}.{name}")
    except ModuleNotFoundError:
        return UNKNOWN
