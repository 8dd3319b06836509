"""The package as a whole: what `import maxlib` costs, and what it offers."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import maxlib

ROOMS = (
    "checkpoint",
    "data",
    "distributed",
    "inference",
    "models",
    "nn",
    "observability",
    "ops",
    "sharding",
    "tokenization",
    "training",
    "weights",
)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_brings_nothing_heavy():
    heavy = ("jax", "flax", "numpy", "optax", "orbax", "grain", "transformers", "torch", "tokenizers", "rich")
    loaded = run(f"import sys, maxlib, maxlib.models; print([name for name in {heavy} if name in sys.modules])")
    assert loaded.strip() == "[]"


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_reached_by_name(room):
    assert getattr(maxlib, room) is importlib.import_module(f"maxlib.{room}")
    assert room in dir(maxlib)


def test_weights_functions_are_at_the_top():
    from maxlib import weights

    assert maxlib.from_pretrained is weights.from_pretrained
    assert maxlib.save_pretrained is weights.save_pretrained


def test_unknown_name_says_what_there_is():
    with pytest.raises(AttributeError, match=r"'nonsense'; it has .*from_pretrained"):
        maxlib.nonsense


def test_families_are_reached_by_name():
    assert maxlib.models.llama is importlib.import_module("maxlib.models.llama")
    assert "llama3-8b" in maxlib.models.presets()
    assert {"families", "gpt2", "llama", "presets"} <= set(dir(maxlib.models))
    with pytest.raises(AttributeError, match=r"'gpt5'; it has families, presets, deepseek, "):
        maxlib.models.gpt5


def test_typed_marker_is_packaged():
    assert (Path(maxlib.__file__).parent / "py.typed").is_file()


def test_version_is_in_the_changelog():
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog if "dev" in maxlib.__version__ else f"## [{maxlib.__version__}]" in changelog
