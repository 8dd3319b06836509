"""The interop examples run and print the expected results."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "interop"
full = pytest.mark.full


@pytest.fixture
def recipe(monkeypatch):
    """Returns `main` of a recipe, as if its folder were the program's."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield lambda name: runpy.run_path(str(FOLDER / f"{name}.py"))["main"]
    sys.modules.pop("open_in_transformers", None)


@full
def test_a_layer_learns_in_flax(recipe):
    first, last = recipe("layer_in_flax")()
    assert last < 0.05 < 3 < first


@full
def test_attention_with_plain_dictionaries_is_the_textbooks(recipe):
    assert recipe("attention_anywhere")() < 2e-6


@full
def test_a_torch_loader_resumes(recipe):
    pytest.importorskip("torch")
    assert recipe("torch_dataloader")()


@full
def test_a_stream_trains_and_resumes(recipe):
    pytest.importorskip("datasets")
    losses, same = recipe("hf_stream")()
    assert same and losses[-1] < losses[0] / 2


@full
def test_transformers_opens_the_export(recipe):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    worst, same = recipe("open_in_transformers")()
    assert worst < 1e-5 and same


@full
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("float16", 5e-3)])
def test_a_gguf_file_is_the_model(recipe, tmp_path, dtype, bound):
    for package in ("torch", "gguf", "accelerate"):
        pytest.importorskip(package)
    worst, same = recipe("export_gguf")(target=tmp_path / "model.gguf", dtype=dtype)
    assert worst < bound and same
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"


def test_every_recipe_is_listed():
    text = (FOLDER / "README.md").read_text()
    assert all(f"`{path.name}`" in text for path in FOLDER.glob("*.py"))
