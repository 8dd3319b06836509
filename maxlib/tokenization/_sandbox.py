"""Jinja's immutable sandbox with limits on time and size, because chat templates are untrusted."""

import functools
import time
from collections.abc import Callable
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

LARGEST = 1 << 24  # maximum characters of a text, items of a list, and characters of the output
HIGHEST = 1 << 20  # maximum number as an argument of a filter or method, such as a width


class LimitError(ValueError):
    """Error for a template that exceeds a limit of time or memory."""


class Sandbox(ImmutableSandboxedEnvironment):
    """Environment whose templates cannot loop forever or create values larger than `LARGEST`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, *, seconds: float, extensions: list[type[Extension]]):
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        self._seconds, self._end = seconds, 0.0
        self.globals |= {"_tick": self._tick, "_concat": _concat}
        del self.globals["lipsum"]  # creates texts of any length in one call, which the time limit cannot interrupt
        self.filters = {name: _careful(filter) for name, filter in self.filters.items()}

    def write(self, template: Template, names: dict[str, Any]) -> str:
        """Renders a template.

        Raises:
            LimitError: It takes longer than `seconds`, or makes more than `LARGEST` characters.
            SecurityError: It reaches for Python's own names.
            ValueError: It fails in another way.
        """
        self._end, size, parts = time.monotonic() + self._seconds, 0, []
        try:
            for part in template.generate(**names):
                size += len(part)
                _check_size(size)
                parts.append(part)
        except (ValueError, SecurityError):
            raise
        except (RecursionError, OverflowError, MemoryError) as error:
            raise LimitError(f"the chat template calls itself or counts without end ({error})") from None
        except Exception as error:  # a template may raise anything for unexpected values
            raise ValueError(f"the chat template cannot render this ({type(error).__name__}: {error})") from error
        return "".join(parts)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        try:
            return _Limits().visit(super()._parse(source, name, filename))
        except RecursionError:
            raise LimitError("the chat template is nested too deeply") from None

    def _tick(self) -> str:
        if time.monotonic() > self._end:
            raise LimitError(
                f"the chat template took longer than {self._seconds:g} s: raise seconds=, or mend its loops"
            )
        return ""

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes an operation, after checking the size of its result."""
        if operator == "*":
            sizes = [len(x) if isinstance(x, str | list | tuple) else x for x in (left, right)]
            if any(not isinstance(x, int | float) for x in (left, right)):
                _check_size(sizes[0] * sizes[1])
        elif operator == "**":
            _check_numbers(left, right)
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        elif isinstance(left, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls a function or a method with arguments that are not too large."""
        _check_call(getattr(obj, "__self__", None), *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)


class _Limits(NodeTransformer):
    """Inserts a time check into every loop and macro, and a size check before texts are joined by `~`."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._with_tick(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._with_tick(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._with_tick(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name("_concat", "load"), node.nodes, [], None, None).set_lineno(node.lineno)

    def _with_tick(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        call = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return node


def _concat(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _careful(filter: Callable) -> Callable:
    @functools.wraps(filter)
    def careful(*args: Any, **kwargs: Any) -> Any:
        _check_call(*args, *kwargs.values())
        return filter(*args, **kwargs)

    return careful


def _check_call(*args: Any) -> None:
    """Limits the result of a call: for functions of several texts, such as `replace`, by the product of their sizes."""
    _check_numbers(*args)
    texts = [arg for arg in args if isinstance(arg, str)]
    if len(texts) > 2:  # what is replaced counts as one place for each character
        _check_size((len(texts[0]) + 1) // max(1, len(texts[1])) * len(texts[2]))
    elif len(texts) == 2:
        _check_size(min(map(len, texts)) * 2 + sum(map(len, texts)))
    if texts and "{" in texts[0]:
        _check_format(texts[0])


def _check_numbers(*args: Any) -> None:
    if any(isinstance(arg, int | float) and abs(arg) > HIGHEST for arg in args):
        raise LimitError(f"the chat template calls something with a number above {HIGHEST:,}")


def _check_format(text: str) -> None:
    """Raises an error for widths of more than six digits in a format."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits > 6:
            raise LimitError("the chat template formats with a width of more than six digits")


def _check_size(size: float) -> None:
    if size > LARGEST:
        raise LimitError(f"the chat template makes more than {LARGEST:,} characters or items")
