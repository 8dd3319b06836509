"""Greedy text equals transformers', below, across and beyond the length at which rotary scaling begins."""

import copy

import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib.inference import Generator

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.full  # by default test_generate.py has rows of two lengths, against passes over each row

ORIGINAL = 16  # where dynamic NTK begins to stretch, and LongRoPE switches
FACTORS = {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [2.0, 5.0, 20.0, 30.0]}
INNER = {"original_max_position_embeddings": ORIGINAL}
SCALINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, **INNER},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **INNER},
    "longrope": {"factor": 4.0, **FACTORS, **INNER},
}
BASE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.3,  # so that what is attended to decides
}
LENGTHS = {"below": 3, "across": 10, "at": 16, "switch": 17, "beyond": 26}
NEW = 12


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """One model in both libraries, by family and scaling."""
    made = {}

    def make(family: str, kind: str):
        if (family, kind) not in made:
            torch.manual_seed(0)
            longest = ORIGINAL if kind == "dynamic" else 4 * ORIGINAL
            rope = {"rope_type": kind, "rope_theta": 100.0, **SCALINGS[kind]}
            extra = {"original_max_position_embeddings": ORIGINAL} if family == "Phi3" else {}
            cls = getattr(transformers, f"{family}Config")
            config = cls(**BASE, **extra, max_position_embeddings=longest, rope_parameters=rope)
            theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            directory = tmp_path_factory.mktemp(f"{family}-{kind}")
            theirs.save_pretrained(directory)
            made[family, kind] = theirs, Generator(maxlib.from_pretrained(directory), dtype=jnp.float32)
        return made[family, kind]

    return make


def prompts(*names: str) -> list[list[int]]:
    return [np.random.default_rng(LENGTHS[n]).integers(0, 61, LENGTHS[n]).tolist() for n in names]


def by_transformers(model, prompt: list[int]) -> list[int]:
    """Of a prompt alone, by a model that has seen no longer one: transformers' frequencies stay grown."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = copy.deepcopy(model).generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False
        )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize(("name", "capacity"), zip(LENGTHS, (None, 38, 64, 129, 1000), strict=True))
@pytest.mark.parametrize(
    ("family", "kind"), [*(("Llama", kind) for kind in SCALINGS), ("Phi3", "longrope"), ("Qwen2", "dynamic")]
)
def test_every_scaling_alone(pair, family, kind, name, capacity):
    theirs, ours = pair(family, kind)
    (row,) = prompts(name)
    assert ours.generate([row], max_new_tokens=NEW, capacity=capacity) == [by_transformers(theirs, row)]


@pytest.mark.parametrize(
    ("family", "kind"), [*(("Llama", kind) for kind in SCALINGS), ("Phi3", "longrope"), ("Qwen2", "dynamic")]
)
def test_every_scaling_mixed(pair, family, kind):
    theirs, ours = pair(family, kind)
    for names, capacity in ((["below", "beyond"], None), (["across", "at", "switch"], None), (reversed(LENGTHS), 45)):
        rows = prompts(*names)
        want = [by_transformers(theirs, row) for row in rows]
        assert ours.generate(rows, max_new_tokens=NEW, capacity=capacity) == want
