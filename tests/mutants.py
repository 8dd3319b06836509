"""Mutants: small changes to lines of maxlib that the tests of the file should detect.

`python -m tests.mutants` draws some, runs the default tests that run each one's line, and lists those that survive;
`--show` only lists what it draws, `--only maxlib/ops/_rope.py` draws from some files. `nox -s coverage` says which test
runs which line; without its file, and for lines that only imports run, the tests that mirror the file are taken. A
survivor is a missing test, or a change that changes nothing, which is to be said where the result is written down.
"""

import argparse
import ast
import copy
import functools
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests import changed

ROOT = changed.ROOT
ROOMS = ("ops", "nn", "weights", "data", "training")
SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult,
}  # fmt: skip
TIMEOUT = 600  # seconds; a mutant that hangs is noticed
MOST_TESTS, MOST_FAMILIES = 40, 4  # functions, and files of families, that a mutant meets
CONFORMANCE = "tests/models/conformance.py"
EVERYTHING = ("tests/test_public_api.py", "tests/test_first_calls.py")  # all rooms, seen from outside or in a process
Contexts = Mapping[tuple[Path, int], Sequence[str]]  # test functions by file and line


@dataclass(frozen=True)
class Mutant:
    path: Path
    line: int
    begin: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        flat = lambda text: " ".join(text.split())[:90]
        return f"{self.path.relative_to(ROOT)}:{self.line}: {flat(self.old)}  ->  {flat(self.new)}"

    def applied(self) -> str:
        source = self.path.read_bytes()
        return (source[: self.begin] + self.new.encode() + source[self.end :]).decode()


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """The mutants of one expression, each with one thing other than it was."""
    if isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            if type(op) in SWAPS:
                (other := copy.deepcopy(node)).ops[i] = SWAPS[type(op)]()
                yield other
    if isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in SWAPS:
        (other := copy.deepcopy(node)).op = SWAPS[type(node.op)]()
        yield other
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield node.operand
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield ast.Constant(node.value + 1)
    if isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)


def computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the descendants of a node that compute: no annotations, messages, decorator arguments or text."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "exc", "msg") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from computing(child)


def mutants(path: Path) -> Iterator[Mutant]:
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in computing(ast.parse(source)):
        for other in changes(node):
            begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            new = ast.unparse(ast.fix_missing_locations(other))
            yield Mutant(path, node.lineno, begin, end, source[begin:end].decode(), f"({new})")


def mirror(path: Path) -> list[Path]:
    """The tests of a file, in its room: those of its name first, then those that use it; all if there are none."""
    room = ROOT / "tests" / path.relative_to(ROOT / "maxlib").parts[0]
    tests = [part for test in sorted(room.rglob("test_*.py")) for part in changed.parts(test)]
    words = {path.stem.strip("_"), path.parent.name.strip("_")}
    singular = {word.removesuffix("s") for word in words}
    named_alike = [test for test in tests if changed.subject(test).removesuffix("s") in singular]
    using = [test for test in tests if test not in named_alike and path in changed.uses(test)]
    return [*named_alike, *using] or tests


def ran_by(mutant: Mutant, contexts: Contexts) -> list[str]:
    """The tests that run a mutant's line, those of its file first, then the others of its room."""
    mirrored = [str(test.relative_to(ROOT)) for test in mirror(mutant.path)]
    room = f"tests/{mutant.path.relative_to(ROOT / 'maxlib').parts[0]}/"
    rank = lambda test: (not test.startswith(tuple(mirrored)), not test.startswith(room), test)
    lines = statement(mutant.path, mutant.line)
    tests = {test for line in lines for test in contexts.get((mutant.path, line), ())}
    more = families_of(mutant.path) if CONFORMANCE in tests else []
    return [*(sorted(tests - {CONFORMANCE}, key=rank)[:MOST_TESTS] or mirrored), *more, *EVERYTHING]


def families_of(path: Path) -> list[str]:
    """The tests of some families that use a file: coverage knows inherited tests by their class's file only."""
    models = [model for model in sorted((ROOT / "maxlib/models").glob("*.py")) if path in changed.uses(model)]
    tests = [test for file in sorted((ROOT / "tests/models").glob("test_*.py")) for test in changed.parts(file)]
    using = [test for model in models for test in tests if changed.subject(test) == model.stem]
    return [str(test.relative_to(ROOT)) for test in using][:MOST_FAMILIES]


@functools.cache
def spans(path: Path) -> list[range]:
    """The lines of each statement of a file; of one with a body, those of its head."""
    places = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            places.append(range(node.lineno, max(body[0].lineno if body else node.end_lineno + 1, node.lineno + 1)))
    return places


def statement(path: Path, line: int) -> range:
    """The lines of the statement that a line is part of: Python reports some of them only."""
    return min((span for span in spans(path) if line in span), key=len)


def contexts_of(file: Path) -> Contexts:
    """Reads from a coverage file which test functions ran which line of maxlib."""
    if not file.exists():
        return {}
    import coverage  # of the session's environment

    data, by_line = coverage.CoverageData(str(file)), {}
    data.read()
    for name in data.measured_files():
        for line, tests in data.contexts_by_lineno(name).items():
            by_line[ROOT / name, line] = [test for context in tests if (test := test_named(context))]
    return by_line


def test_named(context: str) -> str:
    """`tests.ops.test_rope.TestX.test_y` as pytest writes it; nothing for what is no test."""
    if context.startswith("tests.models.conformance."):
        return CONFORMANCE
    words = context.split(".")
    size = next((i for i, word in enumerate(words, start=1) if word.startswith("test_")), 0)
    if not size or size == len(words):
        return ""
    return "::".join(["/".join(words[:size]) + ".py", *words[size:]])


def survives(mutant: Mutant, copied: Path, contexts: Contexts) -> bool:
    """Returns True if the tests pass in a copy of the repository that contains the mutant."""
    place = copied / mutant.path.relative_to(ROOT)
    place.write_text(mutant.applied())
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *ran_by(mutant, contexts)]
    try:
        done = subprocess.run(command, cwd=copied, env=environment(copied), capture_output=True, timeout=TIMEOUT)
        return done.returncode in (0, 5)  # 5: no test was collected
    except subprocess.TimeoutExpired:
        return False
    finally:
        shutil.copy(mutant.path, place)


def environment(copied: Path) -> dict[str, str]:
    """Mutants share compiled programs: most of them change few."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(copied.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return os.environ | cache | {"PYTHONPATH": str(copied), "PYTHONDONTWRITEBYTECODE": "1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only", nargs="*", type=Path, help="files; all of ops, nn, weights, data and training if none"
    )
    parser.add_argument("--coverage", type=Path, default=ROOT / ".coverage", help="what `nox -s coverage` wrote")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--lines", nargs="*", help="of those drawn, only the ones whose line begins with one of these")
    parser.add_argument("--show", action="store_true", help="list the mutants and run nothing")
    args = parser.parse_args()
    rooms = [path for room in ROOMS for path in sorted((ROOT / "maxlib" / room).rglob("*.py"))]
    everything = [m for path in (map(Path.absolute, args.only) if args.only else rooms) for m in mutants(path)]
    drawn = random.Random(args.seed).sample(everything, min(args.number, len(everything)))
    drawn = [m for m in drawn if args.lines is None or str(m).startswith(tuple(args.lines))]
    if args.show:
        print(*drawn, f"{len(drawn)} of {len(everything)}", sep="\n")
        return
    contexts, alive = contexts_of(args.coverage), []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.processes) as pool:
        copies = queue.SimpleQueue()
        for i in range(args.processes):
            copies.put(copy_of_repository(Path(scratch) / str(i)))

        def tried(mutant: Mutant) -> tuple[Mutant, bool]:
            place = copies.get()
            try:
                return mutant, survives(mutant, place, contexts)
            finally:
                copies.put(place)

        for mutant, alone in pool.map(tried, drawn):
            alive += [mutant] if alone else []
            print("survived" if alone else "killed  ", mutant, flush=True)
    print(f"{len(drawn) - len(alive)} of {len(drawn)} killed; survivors:", *alive, sep="\n")


def copy_of_repository(place: Path) -> Path:
    """Copies what the tests need, and returns the copy."""
    for folder in ("maxlib", "tests", "docs", "examples"):
        shutil.copytree(ROOT / folder, place / folder, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md", "noxfile.py"):
        shutil.copy(ROOT / name, place)
    return place


if __name__ == "__main__":
    main()
