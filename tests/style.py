"""Measure the library's style: `python -m tests.style` prints the counts, `--check` fails if one exceeds its bound.

Docstrings begin with a verb, or name the thing that a class is; comments teach where code is dense; functions stay
short; no public name hides a module; no modules import each other, not even inside functions or for types.
"""

import argparse
import ast
import graphlib
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "maxlib"
# First words of a noun clause, or of an inverted sentence.
CLAUSE = re.compile(
    r"(What|Whether|How|Who|Where|When|Which|Why|Of|The same|That|Those|As|For|In|At|With|But|But for|Without|From|By)\b"
)
COMMENTED = ("nn", "models", "ops", "sharding")
COMMENTS = 0.05, 0.10
LONGEST, MOST_ARGUMENTS, LARGEST_ROOM = 60, 12, 0.16


def files() -> Iterator[Path]:
    return (path for path in sorted(PACKAGE.rglob("*.py")))


def definitions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))


def noun_clauses() -> tuple[list[str], int]:
    """Find docstrings of functions and classes that begin with a noun clause, and count all docstrings."""
    found, total = [], 0
    for path in files():
        for node in definitions(path):
            if text := ast.get_docstring(node):
                total += 1
                if CLAUSE.match(text):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {text.splitlines()[0][:80]}")
    return found, total


def comment_share(room: str) -> float:
    """Return the share of comments among non-blank lines."""
    comments = lines = 0
    for path in (PACKAGE / room).rglob("*.py"):
        text = path.read_text()
        lines += sum(bool(line.strip()) for line in text.splitlines())
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(token.type == tokenize.COMMENT for token in tokens)
    return comments / lines


def long_functions() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({length} lines)"
        for path in files()
        for node in definitions(path)
        if not isinstance(node, ast.ClassDef) and (length := (node.end_lineno or 0) - node.lineno + 1) > LONGEST
    ]


def many_arguments() -> list[str]:
    """Find functions with too many arguments; constructors of layers may have more."""
    found = []
    for path in files():
        for node in definitions(path):
            if isinstance(node, ast.ClassDef) or (node.name == "__init__" and path.parent.name in ("nn", "models")):
                continue
            count = len([a for a in node.args.args if a.arg not in ("self", "cls")]) + len(node.args.kwonlyargs)
            if count > MOST_ARGUMENTS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} ({count} arguments)")
    return found


def shadowed_modules() -> list[str]:
    """Find names in a package's facade that are also the name of one of its modules."""
    found = []
    for init in PACKAGE.rglob("__init__.py"):
        modules = {path.stem for path in init.parent.iterdir() if not path.stem.startswith("__")}
        for node in ast.walk(ast.parse(init.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and not node.module.endswith(init.parent.name):
                found += [f"{init.parent.relative_to(ROOT)}: {a.asname or a.name}" for a in node.names
                          if (a.asname or a.name) in modules]  # fmt: skip
    return found


def facade(room: str) -> list[str]:
    """Return the public names of a subpackage, without its submodules."""
    tree = ast.parse((PACKAGE / room / "__init__.py").read_text())
    package = f"maxlib.{room}"
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names = [a.asname or a.name for node in imports if node.module not in (package, "maxlib._lazy", "typing")
             for a in node.names]  # fmt: skip
    return sorted({name for name in names if not name.startswith("_")})


def import_cycle() -> list[str]:
    """Find modules that import each other, also inside functions and for types.

    The package's own facade is left out: it imports every subpackage when that is first named.
    """
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in files()}
    modules = set(names.values()) - {PACKAGE.name}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, module in names.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if module in modules and isinstance(node, ast.ImportFrom) and node.module:
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                graph[module] |= {name if name in modules else node.module for name in full} & modules - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1][:-1]
    return []


def largest_room() -> tuple[str, float]:
    sizes: dict[str, int] = {}
    for path in files():
        room = path.relative_to(PACKAGE).parts[0]
        sizes[room] = sizes.get(room, 0) + len(path.read_text().splitlines())
    name = max(sizes, key=sizes.__getitem__)
    return name, sizes[name] / sum(sizes.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is exceeded")
    parser.add_argument("--list", action="store_true", help="list every place")
    args = parser.parse_args()
    clauses, total = noun_clauses()
    shares = {room: comment_share(room) for room in COMMENTED}
    room, share = largest_room()
    lists = {
        f"docstrings that begin with a noun clause ({len(clauses) / total:.1%} of {total}, under 2%)": clauses,
        f"functions over {LONGEST} lines": long_functions(),
        f"functions with over {MOST_ARGUMENTS} arguments": many_arguments(),
        "public names that equal a module's": shadowed_modules(),
        "modules in an import cycle": import_cycle(),
    }
    for title, places in lists.items():
        print(f"{title}: {len(places)}")
        if args.list:
            print("\n".join(f"  {place}" for place in places))
    print("comment lines:", ", ".join(f"{name} {part:.1%}" for name, part in shares.items()), "(5% to 10%)")
    print(f"facades: nn {len(facade('nn'))} (about 45), sharding {len(facade('sharding'))} (about 30)")
    print(f"largest subpackage: {room}, {share:.1%} of the lines (under {LARGEST_ROOM:.0%})")
    good = (
        len(clauses) < 0.02 * total
        and not any(places for title, places in lists.items() if "noun clause" not in title)
        and all(COMMENTS[0] <= part <= COMMENTS[1] for part in shares.values())
        and share < LARGEST_ROOM
    )
    return 1 if args.check and not good else 0


if __name__ == "__main__":
    sys.exit(main())
