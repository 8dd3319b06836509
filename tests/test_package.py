"""The package as a whole: the cost of `import maxlib`, and its public names."""

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import maxlib

SERVER = {"_openai.py", "_openai_fields.py"}  # modules of an extra, which `serve` imports
ROOT = Path(__file__).parents[1]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_brings_nothing_heavy():
    heavy = ("jax", "flax", "numpy", "optax", "orbax", "grain", "transformers", "torch", "tokenizers", "rich")
    loaded = run(f"import sys, maxlib, maxlib.models; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


def test_training_without_checkpoints_imports_no_orbax():
    assert run("import sys; from maxlib import training; print(training.Trainer, 'orbax' in sys.modules)").endswith(
        "False\n"
    )


def test_rooms_are_reached_by_name():
    rooms = {path.parent.name for path in (ROOT / "maxlib").glob("[a-z]*/__init__.py")} - {"kernels"}
    for room in rooms:
        assert getattr(maxlib, room) is importlib.import_module(f"maxlib.{room}") and room in dir(maxlib)
    assert maxlib.from_pretrained is maxlib.weights.from_pretrained


def test_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"'nonsense'; it has .*from_pretrained"):
        maxlib.nonsense


def test_families_are_reached_by_name():
    assert maxlib.models.llama is importlib.import_module("maxlib.models.llama")
    assert "llama3-8b" in maxlib.models.presets()
    assert {"families", "gpt2", "llama", "presets"} <= set(dir(maxlib.models))
    with pytest.raises(AttributeError, match=r"'llamma'; did you mean 'llama'\?"):
        maxlib.models.llamma
    with pytest.raises(AttributeError, match=r"'nonsense'; it has families, presets, afmoe, apertus, "):
        maxlib.models.nonsense


def test_typed_marker_is_packaged():
    assert (Path(maxlib.__file__).parent / "py.typed").is_file()


def test_version_is_in_the_changelog():
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog if "dev" in maxlib.__version__ else f"## [{maxlib.__version__}]" in changelog


def test_what_is_imported_is_declared_and_nothing_else():
    """Direct imports of maxlib against pyproject.toml; those of an extra stand inside functions, or in `SERVER`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name = lambda requirement: re.split(r"[\[<>=~! ]", requirement)[0].lower().replace("_", "-")
    declared = {name(requirement) for requirement in project["dependencies"]}
    extras = {name(r) for requirements in project["optional-dependencies"].values() for r in requirements}
    at_once, used = imported()
    assert at_once <= declared <= used <= declared | extras


def imported() -> tuple[set[str], set[str]]:
    """The distributions that modules of maxlib import on their own import, and all that they ever import."""
    names = {"orbax": "orbax-checkpoint", "absl": "absl-py", "pil": "pillow", "jla": "jax-linear-attention"}
    at_once, used = set(), set()
    for path in (ROOT / "maxlib").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            for module in {module.partition(".")[0] for module in modules} - {"maxlib"} - sys.stdlib_module_names:
                used.add(name := names.get(module.lower(), module.lower().replace("_", "-")))
                at_once |= set() if node.col_offset or path.name in SERVER else {name}
    return at_once, used


def test_the_smoke_session_names_tests_that_exist():
    tree = ast.parse((ROOT / "noxfile.py").read_text())
    assigned = next(n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == "SMOKE")
    shared = (ROOT / "tests" / "models" / "conformance.py").read_text()
    for name in ast.literal_eval(assigned.value):
        file, *within = name.split("::")
        source = (ROOT / file).read_text() + shared
        for word in within:
            assert re.search(rf"(def|class) {word.partition('[')[0]}\(", source), name
