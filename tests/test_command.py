"""The command `maxlib`, in this process: what it prints, and its exit status."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

import maxlib
from maxlib import adapters, checkpoint, inference, nn, ops, quantization, sharding, tokenization
from maxlib._command import COMMANDS, main
from maxlib._command import models as listing
from maxlib._command.doctor import EXTRAS, kernels, slow_code
from maxlib._command.plan import QUANTIZATIONS, REMATS, STRATEGIES
from maxlib.ops._attention import table
from maxlib.ops._grouped_matmul import tokamax_triton
from tests.nn.tiny import filled_llama


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2, rope=ops.Rope(12, max_length=64))


@pytest.fixture(scope="module")
def directory(model, tmp_path_factory):
    """A model with a tokenizer of one word per id, and a template."""
    path = tmp_path_factory.mktemp("model") / "tiny"
    maxlib.save_pretrained(model, path)
    words = {f"w{i}": i for i in range(model.cfg.vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "chat_template.jinja").write_text("{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}")
    return path


def printed(capsys, *words) -> tuple[int, str]:
    status = main([str(word) for word in words])
    return status, capsys.readouterr().out


def test_inspect_counts_every_number(capsys, model, directory):
    status, text = printed(capsys, "inspect", directory, "--json")
    report = json.loads(text)
    assert status == 0 and report["total"]["numbers"] == nn.num_parameters(model)
    queries = next(row for row in report["arrays"] if "q_proj" in row["name"])
    assert (queries["count"], queries["name"]) == (2, "model.layers.*.self_attn.q_proj.weight")
    assert "numbers, 0.000 GB" in printed(capsys, "inspect", directory, "--all")[1]


def test_inspect_lists_an_adapter(capsys, model, tmp_path):
    adapters.save(adapters.add(model, adapters.LoRA(2, 4), rngs=nnx.Rngs(0)), tmp_path / "adapter", base="my/base")
    report = json.loads(printed(capsys, "inspect", tmp_path / "adapter", "--json")[1])
    rows = {row["name"]: row for row in report["arrays"]}
    assert rows["base_model.model.model.layers.*.self_attn.q_proj.lora_A.weight"]["shape"] == [2, model.cfg.dim]


@pytest.mark.full
def test_a_reader_that_stops_early_is_no_error(directory):
    """As in `maxlib inspect DIR | head -1`."""
    words = [sys.executable, "-m", "maxlib", "inspect", str(directory), "--all"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


def test_inspect_finds_what_differs(capsys, model, directory, tmp_path):
    params, rest = nn.partition(model)
    params["norm.scale"] = params["norm.scale"].at[0].add(0.5)
    maxlib.save_pretrained(nn.combine(params, rest), tmp_path / "other")
    assert printed(capsys, "inspect", directory, directory) == (0, "no difference\n")
    status, text = printed(capsys, "inspect", directory, tmp_path / "other", "--json")
    assert status == 1
    (row,) = json.loads(text)["differences"]
    assert row["name"] == "model.norm.weight" and row["difference"].startswith("values, by up to 0.5")
    for name, scale in (("one", 1.0), ("two", 2.0)):  # such as the scale of a matrix in FP8
        (tmp_path / name).mkdir()
        save_file({"scale": np.array(scale, np.float32)}, tmp_path / name / "model.safetensors")
    status, text = printed(capsys, "inspect", tmp_path / "one", tmp_path / "two")
    assert status == 1 and "values, by up to 1" in text


def test_inspect_reads_the_newest_step_of_a_checkpointer(capsys, tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        with checkpoint.Checkpointer(tmp_path / name) as checkpointer:
            checkpointer.save(3, {"w": jnp.full((2, 3), value), "n": jnp.arange(4)})
    status, text = printed(capsys, "inspect", tmp_path / "a", "--json")
    rows = {row["name"]: row for row in json.loads(text)["arrays"]}
    assert status == 0 and rows["w"]["shape"] == [2, 3] and rows["n"]["dtype"] == "int32"
    status, text = printed(capsys, "inspect", tmp_path / "a", tmp_path / "b" / "3", "--json")
    (row,) = json.loads(text)["differences"]
    assert status == 1 and row["name"] == "w" and "checksums" in row["difference"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("convert", "x", "y", "--quantize", "int8", "--shard", "1GB"), "--shard would have no effect"),
        (("convert", "x", "y.gguf", "--dtype", "float16", "--quantize", "q8_0"), "--dtype would have no effect"),
        (("convert", "x", "y.gguf", "--compressed-tensors", "--shard", "1GB"), "--shard, --compressed-tensors would"),
        (("generate", "x", "Once", "--top-p", "0.9"), "--top-p needs a --temperature above 0"),
    ],
    ids=lambda x: x[0] if isinstance(x, tuple) else None,
)
def test_options_that_would_have_no_effect_are_refused(words, message, capsys):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err


def test_convert_changes_the_dtype(capsys, directory, tmp_path):
    target = tmp_path / "half"
    assert main(["convert", str(directory), str(target), "--dtype", "bfloat16"]) == 0
    capsys.readouterr()
    rows = json.loads(printed(capsys, "inspect", target, "--json")[1])["arrays"]
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (target / name).read_text() == (directory / name).read_text()
    assert main(["convert", str(directory), str(tmp_path / "x"), "--shard", "much"]) == 2
    assert "such as 500MB; got 'much'" in capsys.readouterr().err


def test_a_converted_model_ends_where_it_did(capsys, directory, tmp_path):
    """Of a directory that says so in config.json only, also within a model that sees; its processor comes along."""
    source = shutil.copytree(directory, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "preprocessor_config.json").write_text('{"patch_size": 4}')
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": [7, 9], "bos_token_id": 3}))
    assert main(["convert", str(source), str(tmp_path / "target")]) == 0
    assert inference.stop_tokens(tmp_path / "target") == inference.stop_tokens(source) == [7, 9]
    assert json.loads((tmp_path / "target" / "generation_config.json").read_text())["bos_token_id"] == 3
    assert (tmp_path / "target" / "preprocessor_config.json").read_text() == '{"patch_size": 4}'
    (source / "config.json").write_text(json.dumps({"eos_token_id": None, "text_config": {"eos_token_id": 5}}))
    assert inference.stop_tokens(source) == [5]


def test_quantized_directories_are_read(capsys, directory, tmp_path):
    """Texts are those of the rounded model, and end where the directory's do."""
    source = shutil.copytree(directory, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"eos_token_id": 7, "bos_token_id": 3}))
    low = jax.jit(lambda model: quantization.for_inference(model, "int8"))(maxlib.from_pretrained(source))
    quantization.save(low, tmp_path / "low", like=source)
    assert json.loads((tmp_path / "low" / "config.json").read_text())["eos_token_id"] == 7
    assert inference.stop_tokens(tmp_path / "low") == [7]
    chat = inference.Chat.from_pretrained(source)
    prompt = chat.tokenizer.encode("w5 w6").ids
    (tokens,) = inference.Generator(low).generate([prompt], max_new_tokens=6, stop_token_ids=[7])
    words = [f"w{token}" for token in tokens if token != 7]
    assert main(["convert", str(source), str(tmp_path / "converted"), "--quantize", "int8"]) == 0
    capsys.readouterr()
    for name in ("low", "converted"):
        status, text = printed(capsys, "generate", tmp_path / name, "w5 w6", "--raw", "--tokens", "6", "--json")
        assert status == 0 and json.loads(text)["text"].split() == words
        assert (tmp_path / name / "chat_template.jinja").exists()
    assert main(["convert", str(tmp_path / "low"), str(tmp_path / "again")]) == 2
    message = capsys.readouterr().err.strip()
    assert "read it with maxlib.quantization.load" in message and len(message.splitlines()) == 1


def test_answers_end_where_the_directory_says(capsys, directory):
    free = printed(capsys, "generate", directory, "w5 w6", "--tokens", "6", "--json")
    words = json.loads(free[1])["text"].split()
    assert free[0] == 0 and len(words) == 6
    last = next(i for i in range(1, 6) if words[i] not in words[:i])  # so that nothing before it stops
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [47, int(words[last][1:])]}))
    ended = json.loads(printed(capsys, "generate", directory, "w5 w6", "--tokens", "6", "--json")[1])
    assert ended["text"].split() == words[:last]


def test_a_chat_remembers(directory):
    chat = inference.Chat.from_pretrained(directory)
    chat.stop_token_ids = []
    first = chat.send("w5", max_new_tokens=3)
    assert [m["content"] for m in chat.messages] == ["w5", first]
    second = chat.send("w7", max_new_tokens=3)
    prompt = tokenization.ChatTemplate.from_directory(directory)([*chat.messages[:2], {"content": "w7"}])
    ids = chat.tokenizer.encode(prompt, add_special_tokens=False).ids
    want = chat.generator.generate([ids], max_new_tokens=3)[0]
    assert chat.tokenizer.encode(second).ids == want
    chat.template = None
    with pytest.raises(ValueError, match="no chat template"):
        chat.send("w5")


def test_an_answer_ends_at_the_last_position_of_the_model(directory):
    chat = inference.Chat.from_pretrained(directory)
    chat.stop_token_ids = []  # 64 positions, of which the prompts take 3 and 2
    assert len(chat.send("w5", max_new_tokens=512).split()) == 61
    assert len("".join(chat.complete("w5 w6", max_new_tokens=512)).split()) == 62
    with pytest.raises(ValueError, match="must fit the 64 positions of the model"):
        chat.send("w5", max_new_tokens=512)


def test_a_conversation_in_the_terminal(capsys, monkeypatch, directory):
    (directory / "generation_config.json").write_text('{"eos_token_id": []}')
    monkeypatch.setattr("sys.stdin", io.StringIO("w5\n\nw7\n/new\nw5\n/exit\nw9\n"))
    words = ["chat", directory, "--system", "w3", "--tokens", "3", "--temperature", "0"]
    status, text = printed(capsys, *words)
    chat = inference.Chat.from_pretrained(directory)
    begin = [{"role": "system", "content": "w3"}]
    chat.messages = list(begin)
    want = [chat.send("w5", max_new_tokens=3), chat.send("w7", max_new_tokens=3)]
    assert status == 0 and text.splitlines() == [*want, want[0]] and want[0] != want[1]


def test_models_by_name(capsys):
    status, text = printed(capsys, "models", "llama", "--names")
    assert status == 0 and "llama3.1-8b" in text.splitlines() and "gpt2" not in text
    assert main(["models", "gpt5"]) == 2
    assert "there is no family gpt5; there are " in capsys.readouterr().err


def test_models_fit_a_narrow_terminal_and_are_whole_in_a_pipe(capsys, monkeypatch):
    kind = ("GQA without positions", "6 of 64 experts, shared expert, tied head", "full and state", "yes", "")
    monkeypatch.setattr(listing, "row", lambda family, preset: listing.Row(family.name, preset, 10**9, 10**8, kind))
    names = ("llama", "granite4")
    lines = printed(capsys, "models", *names)[1].splitlines()
    rows = {line.split()[0]: line.split() for line in lines[2:] if line.strip(" ─")}
    assert [*rows] == printed(capsys, "models", *names, "--names")[1].split()
    assert " ".join(rows["granite-4.0-h-tiny"]) == (
        "granite-4.0-h-tiny 1.00B 100M granite4: GQA without positions; 6 of 64 experts, shared expert, tied head; full "
        "and state caches; images"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    text = re.sub(r"\x1b\[[\d;]*m", "", printed(capsys, "models", *names)[1])
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert all(re.search(rf"^ *{re.escape(name)} +{row[1]} ", text, re.MULTILINE) for name, row in rows.items())


def test_new_trainer_is_a_copy_and_never_overwrites(capsys, tmp_path):
    target = tmp_path / "mine.py"
    assert main(["new-trainer", str(tmp_path / "mine"), "--from", "finetune"]) == 0
    compile(target.read_text(), str(target), "exec")
    assert "Finetune a Hugging Face model" in target.read_text()
    assert main(["new-trainer", str(tmp_path / "run-0.1")]) == 0 and (tmp_path / "run-0.1.py").exists()
    assert main(["new-trainer", str(target)]) == 2
    assert "mine.py exists already and is kept: give another name" in capsys.readouterr().err


def test_doctor_looks_for_every_extra_that_is_for_users():
    """And for a package that the extra installs."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    wanted = {name: packages for name, packages in project["optional-dependencies"].items() if name != "docs"}
    assert EXTRAS.keys() == wanted.keys()
    jax_installs = {"cuda": "jax-cuda13-plugin", "tpu": "libtpu"}
    for extra, package in EXTRAS.items():
        assert jax_installs.get(extra) == package or any(
            re.match(rf"{package}\b", requirement) for requirement in wanted[extra]
        )


def test_doctor(capsys):
    status, text = printed(capsys, "doctor", "--json")
    report = json.loads(text)
    assert status == 0 and report["devices"]["platform"] == "cpu" and report["versions"]["numpy"] == np.__version__
    usual = ("causal", "packed rows", "soft-cap", "decoding")
    usual += ("gated delta rule", "Kimi delta", "Mamba-2")
    assert report["kernels"] == dict.fromkeys(usual, "chunked") | {"grouped matmul": "tiled"}
    assert report["devices"]["number"] == "8 in 1 process" and "none for CPUs" in report["devices"]["data sheet"]
    maxlib.show_versions()
    assert f"maxlib            {maxlib.__version__}" in capsys.readouterr().out


def test_doctor_says_which_jax_makes_slow_kernels():
    assert slow_code("NVIDIA H100 80GB HBM3", "0.12.0.1") == (
        "jax 0.12.0.1 makes slow code of those for Hopper: pip install 'jax[cuda13]<0.12'"
    )
    assert slow_code("NVIDIA H100 80GB HBM3", "0.11.2") is slow_code("NVIDIA A100-SXM4-80GB", "0.12.0.1") is None


def test_doctor_says_what_to_install_where_plain_xla_runs(monkeypatch):
    monkeypatch.setattr(table, "has_triton_attention", lambda: False)
    monkeypatch.setattr(tokamax_triton, "has_triton", lambda: False)
    choices = kernels(("gpu", "A100"))
    needed = "pip install 'maxlib[cuda]' on Python 3.12 or later"
    assert choices["causal"] == "cudnn"
    assert choices["packed rows"] == f"chunked; tokamax_triton needs tokamax 0.0.17: {needed}"
    assert choices["grouped matmul"].startswith("tiled; tokamax needs") and choices["grouped matmul"].endswith(needed)


def test_without_a_command_all_are_listed(capsys):
    assert main([]) == 2
    shown = capsys.readouterr().err
    assert all(name in shown for name in COMMANDS)


HELP = """
import sys
from maxlib._command import COMMANDS, main
for words in ([], *([name] for name in COMMANDS)):
    try:
        main([*words, "--help"])
    except SystemExit as end:
        assert end.code == 0
print(*sorted({"flax", "jax", "numpy"} & {*sys.modules}))
"""


def test_help_of_every_command_imports_no_jax():
    """So that it is there at once: jax alone takes more than a second."""
    shown = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True).stdout
    assert shown.count("usage: maxlib") == 1 + len(COMMANDS) and shown.splitlines()[-1] == ""
    assert shown.count("Does a training step fit on hardware") == 1


def test_help_of_plans_names_what_there_is():
    assert {*STRATEGIES.split(", ")} == {*sharding.PRESETS} and [*QUANTIZATIONS] == sorted(quantization.TRAINING)
    assert REMATS.split(", ") == [*nn.remat.POLICIES]


@pytest.mark.parametrize("text", ["[", "[]", '{"eos_token_id": "</s>"}', '{"text_config": 3}'])
def test_a_damaged_config_is_named(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        inference.stop_tokens(tmp_path)
