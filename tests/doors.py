"""Checks that rooms talk through doors: no module imports a private module or name of another room.

`python -m tests.doors`, which `nox -s lint` runs.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "maxlib"


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields the line and the dotted name of everything that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)


def trespasses(source: str, room: str) -> list[str]:
    """Returns the private names of other rooms that a module of `room` imports; what maxlib itself keeps is shared."""
    private = []
    for line, name in imported(ast.parse(source)):
        package, _, path = name.partition(".")
        other, *parts = path.split(".")
        if package == "maxlib" and other != room and not other.startswith("_"):
            private += [f"line {line}: {name}"] * any(part.startswith("_") for part in parts)
    return private


def main() -> str:
    """Returns what is wrong, a line each; nothing if all is right."""
    wrong = []
    for path in sorted(ROOT.rglob("*.py")):
        place = path.relative_to(ROOT)
        wrong += [
            f"maxlib/{place}, {name} is private to another room"
            for name in trespasses(path.read_text(), place.parts[0])
        ]
    return "\n".join(wrong)


if __name__ == "__main__":
    sys.exit(main() or 0)
