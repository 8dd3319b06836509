"""Chooses test files with `full` tests: those that a change touches, and another fifth of the rest for each commit.

`python -m tests.changed [BASE]` prints them; BASE is where the commit left origin/main, or the one before. `nox -s
tests_changed` runs their full tests. A test is touched by the files that it uses, directly or through others; a facade
passes on what is named of it only.
"""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PARTS = 5


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name, packages under the name of their folder."""
    files = [path for room in ("maxlib", "tests") for path in (ROOT / room).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@functools.cache
def bindings(path: Path) -> dict[str, str]:
    """What the imports of a file bind, by name: dotted names of modules or of what they define."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
    return {name: target for name, target in bound.items() if target.partition(".")[0] in ("maxlib", "tests")}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def named(path: Path) -> Iterator[str]:
    """Dotted names that a file uses: `nn.tree.axes` of `from maxlib import nn`. A package that is not followed by a
    name (it is handed on, say) ends with a dot."""
    bound, inner = bindings(path), set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            words, base = [], node
            while isinstance(base, ast.Attribute):
                words.append(base.attr)
                base = base.value
                inner.add(id(base))
            if isinstance(base, ast.Name) and base.id in bound:
                yield ".".join([bound[base.id], *reversed(words)]) + ("" if words else ".")
    yield from bound.values()


def defining(name: str) -> Iterator[Path]:
    """The files behind a dotted name; of a package as a whole, all of its files."""
    whole, found = name.endswith("."), name.rstrip(".")
    while found not in modules():
        found, _, _ = found.rpartition(".")
        if not found:
            return
    path = modules()[found]
    yield path
    if path.name != "__init__.py":
        return
    rest = name.rstrip(".").removeprefix(found).lstrip(".")
    word, _, more = rest.partition(".")
    target = bindings(path).get(word)
    if target and target != f"{found}.{word}":
        yield from defining(f"{target}.{more}".rstrip("."))
    elif whole and not rest and path.parent != ROOT / "maxlib":
        yield from path.parent.rglob("*.py")


@functools.cache
def uses(path: Path) -> frozenset[Path]:
    return frozenset(file for name in named(path) for file in defining(name)) - {path}


def closure(path: Path) -> set[Path]:
    """A file, what it uses, and what that uses."""
    seen, left = set(), [path, *by_name(path)]
    while left:
        one = left.pop()
        if one not in seen:
            seen.add(one)
            # What a facade imports matters where it is named.
            left += [] if one.name == "__init__.py" or one.suffix != ".py" else uses(one)
    return seen


def by_name(test: Path) -> list[Path]:
    """What a test finds by name: of a family's test, the family and its golden arrays; pages; examples."""
    if test.name == "test_docs.py":
        return [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").rglob("*.md")]
    if test.name == "test_examples.py":
        return sorted((ROOT / "examples").glob("*.*"))
    family = test.stem.removeprefix("test_").removesuffix("_images")
    found = [ROOT / "maxlib" / "models" / f"{family}.py", ROOT / "tests" / "models" / "golden" / f"{family}.npz"]
    return [path for path in found if test.parent.name == "models" and path.exists()]


def with_full_tests() -> list[Path]:
    marked = re.compile(r"mark\.(full|slow)|\bConformance\b")
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))


def touched(tests: Iterable[Path], changed: set[Path]) -> list[Path]:
    return [test for test in tests if closure(test) & changed]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def differing(base: str | None) -> set[Path]:
    """Files that differ from `base`, in commits and outside of them."""
    here = git("rev-parse", "HEAD")
    for candidate in [base] if base else ["origin/main", "HEAD~1"]:
        try:
            start = git("merge-base", candidate, "HEAD").strip()
        except subprocess.CalledProcessError:  # a clone without history, or without a remote
            continue
        if base or start != here.strip():
            return {ROOT / line for line in git("diff", "--name-only", start).splitlines()}
    return set()


def main(base: str | None = None) -> None:
    tests, commit = with_full_tests(), int(git("rev-parse", "HEAD")[:8], 16)
    chosen = {*touched(tests, differing(base)), *tests[commit % PARTS :: PARTS]}
    print(*(test.relative_to(ROOT) for test in tests if test in chosen), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
