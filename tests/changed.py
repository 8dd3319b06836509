"""Chooses full tests for a commit: those that its changes affect, then others up to a number.

`python -m tests.changed [BASE] [--tests 300] [--to FILE]` writes arguments for pytest, a line each, and says on stderr
what it leaves out; BASE is where the commit left origin/main, or the one before. `nox -s tests_changed` runs them. A
test is touched by the files that it uses, directly or through others; a facade passes on what is named of it only.
"""

import argparse
import ast
import functools
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FULL = "full or slow"


@functools.cache
def modules() -> dict[str, Path]:
    """Every module by its dotted name, packages under the name of their folder."""
    files = [path for room in ("maxlib", "tests") for path in (ROOT / room).rglob("*.py")]
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


@functools.cache
def bindings(path: Path) -> dict[str, str]:
    """Maps each name that a file imports to the dotted name of a module or of its member."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
    return {name: target for name, target in bound.items() if target.partition(".")[0] in ("maxlib", "tests")}


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(Path(str(path).partition("::")[0]).read_text())


@functools.cache
def rows() -> dict[str, dict[str, Any]]:
    """The table of families by the names of their classes of tests, which `test_families.py` makes."""
    return json.loads((ROOT / "tests" / "models" / "families.json").read_text())


def parts(test: Path) -> list[Path]:
    """A file of tests; of that of many families, its classes, as `test_families.py::TestArcee`."""
    return [test.with_name(f"{test.name}::{name}") for name in rows()] if test.name == "test_families.py" else [test]


def subject(test: Path) -> str:
    """What a test is named for."""
    _, _, row = test.name.partition("::")
    return rows()[row]["family"] if row else test.stem.removeprefix("test_").removesuffix("_images")


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
    is_package, module = name.endswith("."), name.rstrip(".")
    while module not in modules():
        module, _, _ = module.rpartition(".")
        if not module:
            return
    path = modules()[module]
    yield path
    if path.name != "__init__.py":
        return
    rest = name.rstrip(".").removeprefix(module).lstrip(".")
    word, _, inner = rest.partition(".")
    target = bindings(path).get(word)
    if target and target != f"{module}.{word}":
        yield from defining(f"{target}.{inner}".rstrip("."))
    elif is_package and not rest and path.parent != ROOT / "maxlib":
        yield from path.parent.rglob("*.py")


@functools.cache
def uses(path: Path) -> frozenset[Path]:
    return frozenset(file for name in named(path) for file in defining(name)) - {path}


def closure(path: Path) -> set[Path]:
    """Returns a file and its dependencies, direct and indirect."""
    seen, left = set(), [path, *uses(path), *by_name(path)]
    while left:
        file = left.pop()
        if file not in seen:
            seen.add(file)
            # What a facade imports matters where it is named.
            left += [] if file.name == "__init__.py" or file.suffix != ".py" else uses(file)
    return seen


def by_name(test: Path) -> list[Path]:
    """Returns the files that a test uses by name: a family and its golden arrays, pages or examples."""
    if test.name == "test_docs.py":
        return [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "guides").rglob("*.md")]
    if test.name == "test_interop.py":
        return sorted((ROOT / "examples" / "interop").glob("*.*"))
    if test.name == "test_examples.py":
        return sorted((ROOT / "examples").glob("*.*"))
    files = [ROOT / f"maxlib/models/{subject(test)}.py", ROOT / f"tests/models/golden/{subject(test)}.npz"]
    if "::" in test.name:
        files += [ROOT / "tests/models/families.json", ROOT / "tests/models/test_families.py"]
    return [path for path in files if test.parent.name == "models" and path.exists()]


def with_full_tests() -> list[Path]:
    marked = re.compile(r"mark\.(full|slow)|Conformance\b")
    files = sorted(path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text()))
    return [part for path in files for part in parts(path)]


def touched(tests: Iterable[Path], changed: set[Path]) -> list[Path]:
    return [test for test in tests if closure(test) & changed]


def directly(tests: Iterable[Path], changed: set[Path]) -> list[Path]:
    """Returns the tests that changed, or that use a changed file by name."""
    return [test for test in tests if {test, *by_name(test), *uses(test)} & changed]


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


def collected() -> dict[str, int]:
    """Functions that have full tests, such as `tests/data/test_loader.py::test_x`, and how many each has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", FULL, *map(str, with_full_tests())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the tests cannot be collected:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return Counter(line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line)


def in_turn(functions: Iterable[str], groups: Iterable[Iterable[Path]], commit: int) -> list[str]:
    """Functions of the first group of files, of the second, ...; in each the one that a commit begins with differs."""
    order: dict[str, None] = {}
    for group in groups:
        names = {str(path.relative_to(ROOT)) for path in group}
        members = [name for name in functions if {name.partition("::")[0], name.rpartition("::")[0]} & names]
        start = commit % max(1, len(members))
        order |= dict.fromkeys(members[start:] + members[:start])
    return list(order)


def fitting(functions: Iterable[str], cases: Mapping[str, int], limit: int) -> list[str]:
    """The functions with `limit` tests in all, in order; one with too many is passed over."""
    taken = []
    for function in functions:
        if cases[function] <= limit:
            limit -= cases[function]
            taken.append(function)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE")
    parser.add_argument("--tests", type=int, default=300, help="the most tests that are chosen (%(default)s)")
    parser.add_argument("--to", type=Path, metavar="FILE", help="where the arguments go (stdout)")
    args = parser.parse_args()
    tests, cases, changed = with_full_tests(), collected(), differing(args.base)
    groups = directly(tests, changed), touched(tests, changed), tests
    chosen = fitting(in_turn(cases, groups, int(git("rev-parse", "HEAD")[:8], 16)), cases, args.tests)
    affected = in_turn(cases, groups[:2], 0)
    left = sorted({function for function in affected if function not in set(chosen)})
    print(f"{len(affected)} of {len(cases)} full tests are touched; left out:", *left, sep="\n  ", file=sys.stderr)
    (args.to.write_text if args.to else print)("\n".join(chosen))


if __name__ == "__main__":
    main()
