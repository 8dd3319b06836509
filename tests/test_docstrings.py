"""The code in docstrings runs: every indented block, with the names of its module imported."""

import ast
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import types
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlib
from maxlib import (
    adapters,
    checkpoint,
    data,
    inference,
    nn,
    ops,
    plan,
    post_training,
    quantization,
    sharding,
    tokenization,
    training,
)
from maxlib.models import llama
from tests import page_names
from tests.data import test_megatron, test_webdataset
from tests.nn.tiny import filled

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"(?:^|\n\n)((?: {4,}\S.*\n?)+)")
# A block of anything else is a figure, such as a timetable.
CODE = re.compile(r"(from|import|def|class|with|for|if|try|@\w+)\b|@|[\w.\[\], *\"']+ ?=(?!=)|[\w.]+\(")
STRING = re.compile(r'"""(.*?)"""', re.DOTALL)
LIST = re.compile(r"(Args|Returns|Raises|Attributes|Yields|Metrics):\n", re.MULTILINE)


@functools.cache
def examples() -> list[tuple[str, str, str]]:
    """Module, name and code of every block."""
    collected = []
    for path in sorted((ROOT / "maxlib").rglob("*.py")):
        text = path.read_text()
        strings = [string for string in STRING.findall(text) if "\n\n" in string]
        if not any(blocks(inspect.cleandoc(string)) or blocks(string.strip()) for string in strings):
            continue  # parsing all files would take a second in each process of a run
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        tree = ast.parse(text)
        nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)]
        documented = [(getattr(node, "name", ""), ast.get_docstring(node) or "") for node in nodes]
        for name, docstring in documented + documented_values(tree):
            collected += [(module, name, block) for block in blocks(docstring)]
    return collected


def documented_values(tree: ast.Module) -> list[tuple[str, str]]:
    """Names of a module that are assigned, and the string below each."""
    return [
        (ast.unparse(value.targets[0]), below.value.value)
        for value, below in itertools.pairwise(tree.body)
        if isinstance(value, ast.Assign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    ]


def blocks(text: str) -> list[str]:
    assert "```" not in text and ">>>" not in text, f"indent code by four instead: {text[:80]!r}"
    indented = [match[1] for match in BLOCK.finditer(LIST.split(text)[0])]
    return [block for block in indented if CODE.match(block.lstrip())]


# Imports that examples leave out.
IMPORTED = {"maxlib": maxlib, "jax": jax, "jnp": jnp, "nnx": nnx, "functools": functools, "llama": llama} | {
    room.__name__.rpartition(".")[2]: room
    for room in (adapters, data, inference, nn, ops, plan, post_training, quantization, sharding, training)
}
# All matrices have one shape, so that functions of matrices compile once.
CONFIG = llama.Config(
    vocab=32,
    num_layers=2,
    dim=32,
    mlp_dim=32,
    num_heads=1,
    num_kv_heads=1,
    head_dim=32,
    rope=ops.Rope(32, max_length=64),
)


def trained() -> dict[str, Any]:
    """A small model, with and without an adapter, and what trains it."""
    make = lambda: llama.Llama(CONFIG, rngs=nnx.Rngs(0))
    row = {"tokens": np.arange(8, dtype=np.int32), "targets": np.arange(1, 9, dtype=np.int32)}
    rows = grain.MapDataset.source([row] * 8).repeat()
    return {
        "batch": {name: jnp.stack([array] * 8) for name, array in row.items()},
        "cfg": CONFIG,
        "optimizer": training.adamw(1e-3),
        "loader": data.Loader(lambda part: rows[part], batch_size=8),
        "model": filled(make),
        "tokens": jnp.stack([row["tokens"]] * 8),
        "tuned": filled(lambda: adapters.add(make(), adapters.LoRA(rank=2, alpha=4), rngs=nnx.Rngs(1))),
    }


@pytest.fixture
def surroundings(home) -> dict[str, Any]:
    names = ("model", "tuned")
    return home | {name: jax.tree.map(jnp.copy, home[name]) for name in names}  # a training step takes its arrays


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> dict[str, Any]:
    """The files that examples expect: a corpus, a tokenizer, tokens in several formats, a model of the hub."""
    home = tmp_path_factory.mktemp("docstrings")
    small = trained()
    maxlib.save_pretrained(small["model"], home / "HuggingFaceTB" / "SmolLM2-135M")
    (home / "corpus").mkdir()
    (home / "corpus" / "a.txt").write_text("one two three " * 20)
    (home / "tokens").mkdir()
    np.arange(10_000, dtype=np.uint32).tofile(home / "tokens" / "a.npy")
    test_megatron.write(home / "corpus_text_document", [np.arange(10_000)])
    (home / "shards").mkdir()
    test_webdataset.write(home / "shards" / "0.tar", {"a": {"txt": b"one two three"}})
    marks = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    tokenizer = tokenization.train_bpe(["one two three"], vocab_size=300, special_tokens=("<bos>", "<eos>", *marks))
    documents = data.in_memory([list(range(1, 30))]).repeat()
    return small | {
        "home": home,
        "Checkpointer": lambda path, **options: checkpoint.Checkpointer(home / path.replace(":", ""), **options),
        "code": data.in_memory([[1, 2, 3]]),
        "datasets": types.SimpleNamespace(load_dataset=lambda *_, **__: types.SimpleNamespace(num_shards=1)),
        "documents": documents,
        "tokenize_one": lambda document: document,
        "tokenizer": tokenizer,
        "web": data.in_memory([[4, 5, 6]]),
    }


# What these document compiles for long, and is called by tests of its own.
SLOW = {
    "Attention", "CrossAttention", "DiLoCo", "EmbeddingHead", "GatedResidual", "Generator", "HyperConnection", "LocalEngine",
    "LogitBias", "MLA", "MoE", "Trainer", "awq", "capture", "compare_methods", "denoise", "for_inference",
    "fused_linear_cross_entropy", "gptq", "init_sharded", "make_train_step", "rotate", "smoothquant", "use",
}  # fmt: skip


def parameters() -> list[Any]:
    """Every example."""
    return [
        pytest.param(*example, id=".".join(example[:2]), marks=[pytest.mark.full] * (example[1] in SLOW))
        for example in examples()
    ]


def test_names_of_maxlib_exist():
    """Also in those that run as `full`."""
    rooms = [name for name, value in IMPORTED.items() if value.__name__ == f"maxlib.{name}"]
    imports = f"import maxlib\nfrom maxlib import {', '.join(rooms)}\nfrom maxlib.models import llama"
    wrong = {".".join(at): page_names.wrong_names([imports, textwrap.dedent(code)]) for *at, code in examples()}
    assert len(rooms) > 5 and {name: lines for name, lines in wrong.items() if lines} == {}


@pytest.mark.parametrize(("module", "name", "code"), parameters())
def test_examples_run(module, name, code, surroundings, monkeypatch):
    monkeypatch.chdir(surroundings["home"])
    package = importlib.import_module(module.rpartition("._")[0] or module)
    public = {name: getattr(package, name) for name in dir(package) if not name.startswith("_")}
    exec(textwrap.dedent(code), public | vars(importlib.import_module(module)) | IMPORTED | surroundings)


def test_blocks_are_found():
    assert len(examples()) >= 5
    text = "First.\n\n    a = 1\n    b = 2\n\nMore:\n\n    c = 3\n\nArgs:\n  x: one\n    that goes on.\n"
    assert [block.split() for block in blocks(text)] == [["a", "=", "1", "b", "=", "2"], ["c", "=", "3"]]
    assert blocks("First.\n\n    A A | B  the lead (two layers)\n") == []
    with pytest.raises(SyntaxError):  # the broken example that nothing tested
        exec(textwrap.dedent("    a = f(1) b =\n    g(a) h(b)\n"))
