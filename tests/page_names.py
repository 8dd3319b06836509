"""Finds names on documentation pages that do not exist in maxlib, without running the code."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

UNKNOWN = object()


def wrong_names(blocks: list[str]) -> list[str]:
    """Returns the imports, attributes and keyword arguments in `blocks` that do not exist."""
    wrong, bound = [], {}
    for block in blocks:
        tree = ast.parse(block)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                wrong += _bind(node, bound)
        hidden = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        modules = {name: value for name, value in bound.items() if name not in hidden}
        for node in ast.walk(tree):
            wrong += _check(node, modules)
    return wrong


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
        function = node.func
        if ast.unparse(function) in ("functools.partial", "partial") and node.args:
            function = node.args[0]
        called = _value(function, bound)
        if callable(called):
            yield from _wrong_keywords(node, called)


def _wrong_keywords(node: ast.Call, called: Any) -> Iterator[str]:
    try:
        # Metaclasses of layers take anything and pass it on.
        signature = inspect.signature(called.__init__ if isinstance(called, type) else called)
    except (TypeError, ValueError):
        return
    parameters = signature.parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    for keyword in node.keywords:
        if keyword.arg is not None and keyword.arg not in known:
            yield f"line {node.lineno}: {ast.unparse(node.func)} takes no {keyword.arg}"


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
