"""The examples run as written, at a size that suits tests."""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import numpy as np
import pytest

import maxlib
from maxlib import adapters, observability, tokenization
from maxlib.data import _sources
from maxlib.weights import _hub
from tests.models import parity

EXAMPLES = Path(__file__).parents[1] / "examples"
SMALL = ["--steps", "6", "--batch-size", "4", "--length", "32", "--vocab", "300", "--layers", "2", "--dim", "64"]
full = pytest.mark.full


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for i in range(60):
        (folder / f"{i}.txt").write_text(
            f"Once there were {i} bricks. To build a house one lays brick {i + 1} on brick {i}."
        )
    return folder


def example(name: str, *arguments) -> str:
    """Runs an example in this process, on one device, and returns what it prints."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(jax, "device_count", lambda backend=None: 1)
        run_here(patch, name, *arguments)
    return said.getvalue()


def by_command(name: str, *arguments) -> str:
    """Runs an example in a process of its own, as a user does."""
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=one_device())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def one_device() -> dict[str, str]:
    """The environment of a user, without the eight devices of tests/conftest.py but with its quick compiler."""
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    return os.environ | {"XLA_FLAGS": " ".join(flags)}


@pytest.fixture
def little_text(monkeypatch):
    """Of the standard library a folder: parsing all of it takes longer than training."""
    stdlib = sysconfig.get_path("stdlib")
    monkeypatch.setattr(_sources.sysconfig, "get_path", lambda name: f"{stdlib}/email")
    _sources._python_docs.cache_clear()
    yield
    _sources._python_docs.cache_clear()


def run_here(monkeypatch, name: str, *arguments) -> None:
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def final_loss(text: str) -> str:
    return re.search(r"validation loss (\S+) nats", text)[1]


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> tuple[Path, str]:
    out = tmp_path_factory.mktemp("pretrain") / "run"
    return out, example("pretrain.py", corpus, "--out", out, *SMALL)


@full  # by default pyright reads it, and tests/test_docs.py trains and writes text as it does
def test_pretrain_goes_from_text_to_an_export(run):
    out, first = run
    assert "unigram entropy" in first and "A sample: " in first
    for made in ("loss.png", "report.html", "metrics.jsonl", "model/config.json", "model/tokenizer.json"):
        assert (out / made).stat().st_size > 0


@full
def test_pretrain_resumes(corpus, tmp_path):
    first, again = (by_command("pretrain.py", corpus, "--out", tmp_path, *SMALL) for _ in range(2))
    assert final_loss(again) == final_loss(first) and "step 6" in again


@full  # by default those of each family in tests/models open
def test_export_opens_in_transformers(run):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    out, _ = run
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("one brick", return_tensors="np")["input_ids"]
    assert ids[0, 0] == tokenizer.bos_token_id
    want = theirs(torch.tensor(ids)).logits.detach().numpy()
    ours = maxlib.from_pretrained(out / "model")
    got = parity.logits(ours, ids.astype(np.int32))
    np.testing.assert_allclose(got, want, atol=1e-4 * want.std())


@pytest.fixture(scope="module", params=[4, pytest.param(0, marks=full)], ids=["adapters", "all weights"])
def finetuned(request, corpus, run, tmp_path_factory) -> tuple[Path, str]:
    lines = [json.dumps({"body": path.read_text()}) for path in sorted(corpus.iterdir())]
    (jsonl := tmp_path_factory.mktemp("finetune") / "corpus.jsonl").write_text("\n".join(lines))
    out = jsonl.parent / "run"
    options = ["--field", "body", "--out", out, "--steps", 6, "--batch-size", 4, "--microbatches", 2, "--length", 32]
    rate = ["--learning-rate", 3e-2 if request.param else 1e-2]
    return out, example("finetune.py", run[0] / "model", jsonl, *options, *rate, "--lora", request.param)


@full  # by default pyright reads it, and tests of adapters and exports what it calls
def test_finetune_lowers_the_loss_and_exports(run, finetuned):
    out, text = finetuned
    before, after = (float(re.search(rf"{word}: (\S+) nats", text)[1]) for word in ("before", "after"))
    adapters = (out / "adapter").exists()  # adapters, in six steps, learn less
    assert after < before - (0.0 if adapters else 0.1) and "A sample: " in text
    if adapters:
        assert "PEFT: all of it" in text and (out / "adapter" / "adapter_model.safetensors").stat().st_size > 0
    for name in ("config.json", "model.safetensors", "generation_config.json", "tokenizer.json"):
        assert (out / "model" / name).stat().st_size > 0
    old, new = (json.loads((path / "model" / "config.json").read_text()) for path in (run[0], out))
    assert new == old


def tuned_on_images(tmp_path, *, pictures: int, dim: int, options: list) -> tuple[str, dict[str, tuple[float, float]]]:
    """Returns finetune.py's output, and the loss and accuracy after training by kind of images."""
    pytest.importorskip("PIL")
    example("shapes.py", tmp_path / "shapes", "--pictures", pictures, "--dim", dim)
    where = [tmp_path / "shapes" / name for name in ("model", "chats.jsonl")]
    text = example("finetune.py", *where, "--chats", "--out", tmp_path / "run", *options)
    rows = re.findall(r"after(.*): (\S+) nats per token of held-out text, (\S+)% of", text)
    return text, {name.lstrip(", "): (float(nll), float(right)) for name, nll, right in rows}


@full  # by default tests/data/test_images.py has the loss and the gradient of chats with images
def test_finetune_on_images(tmp_path):
    options = ["--steps", 2, "--batch-size", 2, "--length", 128, "--patches", 256]
    text, metrics = tuned_on_images(tmp_path, pictures=40, dim=32, options=options)
    assert metrics.keys() == {"", "images of other chats", "grey images"} and "A held-out chat: user" in text
    for name in ("config.json", "preprocessor_config.json", "chat_template.jinja", "generation_config.json"):
        kept = [(tmp_path / part / "model" / name).read_text() for part in ("shapes", "run")]
        assert json.loads(kept[0]) == json.loads(kept[1]) if name.endswith("json") else kept[0] == kept[1]


@full
def test_finetune_learns_to_look(tmp_path):
    """What the images say is learned, not only what answers look like: other images make answers wrong."""
    options = ["--steps", 100, "--batch-size", 4, "--length", 256, "--patches", 640, "--learning-rate", 3e-3]
    _, metrics = tuned_on_images(tmp_path, pictures=2000, dim=64, options=options)
    (nll, right), (other_nll, other_right) = metrics[""], metrics["images of other chats"]
    assert right > other_right + 10 and nll < 0.7 * other_nll
    assert right > metrics["grey images"][1] + 10


def test_chats_get_the_images_of_others():
    """And keep their words: who does not look answers them as well as before."""
    of = runpy.run_path(str(EXAMPLES / "finetune.py"))["with_images_of"]
    image = lambda name: {"type": "image", "image": name}
    say = lambda role, *content: {"role": role, "content": list(content)}
    words, answer = {"type": "text", "text": "What?"}, {"role": "assistant", "content": "That."}
    two = {"messages": [say("user", image("a"), words), answer, say("user", image("b"))]}
    chat = {"messages": [say("user", image("c"), {"type": "text", "text": "Why?"})]}
    assert of(two, chat)["messages"] == [say("user", image("c"), words), answer, say("user", image("c"))]
    assert of(chat, two)["messages"] == [say("user", image("a"), {"type": "text", "text": "Why?"})]
    assert of(chat, {"messages": [answer]}) == chat


@full  # by default that of the command `generate`
def test_generate_writes_from_a_directory(run):
    text = example("generate.py", "Once there", "--model", run[0] / "model", "--tokens", 8, "--raw")
    assert "tokens/s" in text and len(text.partition("\n\n[")[0]) > 4


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub whose snapshots are folders here."""
    monkeypatch.setattr(_hub, "download", lambda name, **options: tmp_path / name)
    return tmp_path


def read_arguments(monkeypatch, name: str, *arguments):
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    return runpy.run_path(str(EXAMPLES / name))["arguments"]()


@pytest.mark.parametrize("name", ["finetune.py", "prefer.py", "distill.py"])
def test_a_model_is_a_directory_or_a_name_on_the_hub(hub, monkeypatch, name):
    more = ["pairs.jsonl"] if name == "prefer.py" else []
    assert read_arguments(monkeypatch, name, "org/name", *more).model == hub / "org/name"
    assert read_arguments(monkeypatch, name, hub, *more).model == hub


def test_generate_takes_a_name_on_the_hub(hub):
    directory = runpy.run_path(str(EXAMPLES / "generate.py"))["hugging_face_directory"]
    assert directory("org/name", hub / "out") == hub / "org/name"
    assert directory(str(hub), hub / "out") == hub
    with pytest.raises(SystemExit, match=r"no file none\.gguf"):
        directory("none.gguf", hub / "out")


def test_pretrain_names_a_misspelt_mesh_axis(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run_here(monkeypatch, "pretrain.py", "--mesh", "fdsp=8")
    assert "no mesh axis is named 'fdsp' (did you mean 'fsdp'?)" in capsys.readouterr().err


@full
@pytest.mark.usefixtures("little_text")
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


@full
@pytest.mark.usefixtures("little_text")
def test_mixture_changes_its_shares(tmp_path, monkeypatch, capsys):
    run_here(monkeypatch, "mixture.py", "--out", tmp_path, "--steps", 24)
    read = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert read[0].get("data/tokens/long", 0) == 0 < read[-1]["data/tokens/long"]
    assert "step   21" in capsys.readouterr().out


@full
def test_reinforce_trains_on_what_it_writes(tmp_path):
    text = example("reinforce.py", "--out", tmp_path, "--steps", 2, "--prompts", 2, "--group", 4, "--tokens", 4)
    before, after = (float(re.search(rf"{word}: reward (\S+)", text)[1]) for word in ("before", "after"))
    assert 0 < before < 1 and 0 < after < 1 and after != before


@full
def test_reinforce_raises_the_reward_and_resumes(tmp_path):
    options = ["--out", tmp_path, "--prompts", 4, "--group", 8, "--tokens", 6, "--learning-rate", 3e-3]
    text = by_command("reinforce.py", "--steps", 30, *options)
    before, after = (float(re.search(rf"{word}: reward (\S+)", text)[1]) for word in ("before", "after"))
    assert after > before + 0.1
    assert "step 30" in by_command("reinforce.py", "--steps", 30, *options)


@full
def test_agent_plays_with_its_tools(tmp_path):
    text = example("agent.py", "--out", tmp_path, "--steps", 2, "--demonstrations", 120, "--tasks", 2, "--group", 4)
    assert re.search(r"before: reward \S+", text) and re.search(r"after: reward \S+", text)
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["turns"] > 1 and last["trajectories"] == 1 and last["end/crash"] == last["end/timeout"] == 0


def preferences(tmp_path):
    """Pairs of answers, and options of a short run on them."""
    turn = lambda role, content: {"role": role, "content": content}
    ask = lambda i: [turn("user", f"What comes after {i} bricks?")]
    lines = [
        {"chosen": [*ask(i), turn("assistant", f"{i + 1} bricks.")], "rejected": [*ask(i), turn("assistant", "No.")]}
        for i in range(20)
    ]
    lines[3]["rejected"] = lines[3]["chosen"]  # counted, and left out
    (path := tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    sizes = ["--steps", 6, "--batch-size", 4, "--microbatches", 2, "--length", 96, "--learning-rate", 1e-3]
    return path, ["--out", tmp_path, *sizes]


@full
def test_prefer_tells_pairs_apart_and_exports(run, tmp_path):
    path, options = preferences(tmp_path)
    text = example("prefer.py", run[0] / "model", path, *options)
    assert float(re.search(r"pairs right (\S+),", text)[1]) > 0.7
    assert (tmp_path / "model" / "model.safetensors").stat().st_size > 0
    # `maxlib chat` needs the template of the pairs, since the base model has none.
    template = tokenization.ChatTemplate.from_directory(tmp_path / "model")
    assert template([{"role": "user", "content": "2?"}]) == "user:\n2?\nassistant:\n"


def test_a_base_model_is_tuned_on_chats_in_a_plain_format(hub, monkeypatch):
    (hub / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    chat = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "3."}]
    for name, file in (("finetune.py", "chats.jsonl"), ("prefer.py", "pairs.jsonl")):
        template = read_arguments(monkeypatch, name, hub, file).template
        assert template(chat, add_generation_prompt=False) == "user:\n2?\nassistant:\n3.</s>\n"


@full
def test_prefer_trains_an_adapter_on_a_frozen_one_and_writes_both_as_one(run, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    path, options = preferences(tmp_path)
    rate = ("--learning-rate", 1e-2)
    text = example("prefer.py", run[0] / "model", path, *options, *rate, "--out", first, "--lora", 4)
    assert float(re.search(r"pairs right (\S+),", text)[1]) > 0.7
    more = ("--lora", 2, "--adapter", first / "adapter")
    example("prefer.py", run[0] / "model", path, *options, *rate, "--out", second, *more)
    rank = lambda out: json.loads((out / "adapter" / "adapter_config.json").read_text())["r"]
    assert (rank(first), rank(second)) == (4, 6)
    losses = [row["loss"] for row in observability.read_jsonl(second / "metrics.jsonl")]
    assert losses[0] == pytest.approx(np.log(2), abs=1e-3)  # the reference is the model with the first adapter
    merged = adapters.merge(adapters.load(maxlib.from_pretrained(run[0] / "model"), second / "adapter"))
    written = maxlib.from_pretrained(second / "model")
    for a, b in zip(jax.tree.leaves(merged), jax.tree.leaves(written), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_prefer_starts_from_an_adapter_only_to_train_another(hub, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        read_arguments(monkeypatch, "prefer.py", hub, "pairs.jsonl", "--adapter", "old")
    assert "--adapter needs --lora RANK" in capsys.readouterr().err


@full
def test_distill_comes_nearer_to_the_teacher(corpus, run, tmp_path):
    sizes = ["--layers", 1, "--steps", 8, "--batch-size", 4, "--length", 32]
    options = ["--out", tmp_path, *sizes, "--learning-rate", 1e-2]
    text = example("distill.py", run[0] / "model", corpus, *options)
    before, after = (float(re.search(rf"{word}: (\S+) nats", text)[1]) for word in ("before", "after"))
    assert after < before - 0.05
    assert json.loads((tmp_path / "model" / "config.json").read_text())["num_hidden_layers"] == 1


def test_adapters_get_a_higher_learning_rate(hub, monkeypatch):
    rate = lambda *options: read_arguments(monkeypatch, "finetune.py", hub, *options).learning_rate
    assert rate("--lora", 8) == pytest.approx(10 * rate())
    assert rate("--lora", 8, "--learning-rate", 1e-3) == rate("--learning-rate", 1e-3) == 1e-3
