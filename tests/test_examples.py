"""The examples run as written, at a size that tests can pay for."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--steps", "6", "--batch", "4", "--length", "32", "--vocab", "300", "--layers", "2", "--dim", "64"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"{i}.txt").write_text(
            f"Once there were {i} bricks. To build a house one lays brick {i + 1} on brick {i}."
        )
    return folder


def pretrain(corpus: Path, out: Path, *options: str) -> str:
    return example("pretrain.py", corpus, "--out", out, *SMALL, *options)


def example(name: str, *arguments) -> str:
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=one_device())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def one_device() -> dict[str, str]:
    """The environment of a user, without the eight devices of tests/conftest.py."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def final_loss(text: str) -> str:
    return re.search(r"validation loss (\S+) nats", text)[1]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("pretrain") / "run"
    return out, pretrain(corpus, out)


def test_pretrain_goes_from_text_to_an_export_and_resumes(corpus, run):
    out, first = run
    assert "unigram entropy" in first and "A sample: " in first
    for made in ("loss.png", "report.html", "metrics.jsonl", "model/config.json", "model/tokenizer.json"):
        assert (out / made).stat().st_size > 0
    again = pretrain(corpus, out)
    assert final_loss(again) == final_loss(first) and "step 6" in again


def test_export_opens_in_transformers(run):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    import jax.numpy as jnp
    import numpy as np

    import maxlib

    out, _ = run
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("one brick", return_tensors="np")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id
    want = theirs(torch.tensor(ids)).logits.detach().numpy()
    ours = maxlib.from_pretrained(out / "model")
    got = ours.logits(ours(jnp.asarray(ids, jnp.int32), dtype=jnp.float32).hidden)
    np.testing.assert_allclose(got, want, atol=1e-4 * want.std())


@pytest.fixture(scope="module")
def finetuned(corpus, run, tmp_path_factory) -> tuple[Path, str]:
    lines = [json.dumps({"body": path.read_text()}) for path in sorted(corpus.iterdir())]
    (jsonl := tmp_path_factory.mktemp("finetune") / "corpus.jsonl").write_text("\n".join(lines))
    out = jsonl.parent / "run"
    options = ["--field", "body", "--out", out, "--steps", 6, "--batch", 4, "--accumulate", 2, "--length", 32]
    return out, example("finetune.py", run[0] / "model", jsonl, *options, "--learning-rate", 1e-2)


def test_finetune_lowers_the_loss_and_exports(run, finetuned):
    out, text = finetuned
    before, after = (float(re.search(rf"{word}: (\S+) nats", text)[1]) for word in ("before", "after"))
    assert after < before - 0.1 and "A sample: " in text
    for name in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"):
        assert (out / "model" / name).stat().st_size > 0
    old, new = (json.loads((path / "model" / "config.json").read_text()) for path in (run[0], out))
    assert new == old


def test_generate_writes_from_a_directory(finetuned):
    text = example("generate.py", "Once there", "--model", finetuned[0] / "model", "--tokens", 8, "--raw")
    assert "tokens/s" in text and len(text.partition("\n\n[")[0]) > 4


def test_pretrain_help_explains_every_flag():
    done = subprocess.run([sys.executable, str(EXAMPLES / "pretrain.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for flag in (
        "--mesh",
        "--strategy",
        "--out",
        "--steps",
        "--batch",
        "--length",
        "--vocab",
        "--layers",
        "--dim",
        "--learning-rate",
    ):
        assert flag in done.stdout


def test_pretrain_names_a_misspelt_mesh_axis():
    command = [sys.executable, str(EXAMPLES / "pretrain.py"), "--mesh", "fdsp=8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "no mesh axis is named 'fdsp' (is 'fsdp' meant?)" in done.stderr


def test_quickstart_notebook_runs():
    """Cell by cell in one namespace, as Jupyter would."""
    import matplotlib.pyplot as plt

    cells = json.loads((EXAMPLES / "quickstart.ipynb").read_text())["cells"]
    code = [
        "".join(cell["source"]).replace("STEPS = 150", "STEPS = 8") for cell in cells if cell["cell_type"] == "code"
    ]
    namespace: dict = {"__name__": "__main__"}
    for source in code:
        exec(compile(source, "quickstart.ipynb", "exec"), namespace)
    assert bool(namespace["same"].all())
    plt.close("all")


def test_mixture_changes_its_shares(tmp_path):
    shown = example("mixture.py", "--out", tmp_path, "--steps", "12")
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert read[0].get("data/tokens/long", 0) == 0 < read[-1]["data/tokens/long"]
    assert "step   11" in shown
