"""vLLM on a CPU, and transformers, continue prompts as maxlib does, from quantized weights that maxlib wrote.

vLLM needs an environment of its own, whose Python `MAXLIB_VLLM` names (tests/inference/test_vllm.py).
"""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlib
from maxlib import inference, nn, ops, quantization
from maxlib.models import llama
from maxlib.nn import sites
from maxlib.quantization._matmul import Quantized

PYTHON = os.environ.get("MAXLIB_VLLM")
pytestmark = pytest.mark.full
CFG = llama.Config(
    vocab=64,
    num_layers=2,
    dim=64,
    mlp_dim=96,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rope=ops.Rope(32, max_length=256),
)
PROMPTS, COUNT = [[5, 9, 2], [11, 3, 4, 8, 60, 7], [1], [33, 21], [50, 2, 2], [17, 40, 30]], 16
SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}


@pytest.fixture(scope="module", params=["int4", "int4_asymmetric", "int8_w8a8"])
def written(request, tmp_path_factory):
    """A quantized model with logits of a trained one's spread, and its directory."""
    model = jax.jit(lambda: llama.Llama(CFG, rngs=nnx.Rngs(0)))()
    model.head.w = model.head.w.replace(model.head.w[...] * 40)
    small = quantization.for_inference(model, request.param)
    path = tmp_path_factory.mktemp("vllm") / request.param
    maxlib.save_pretrained(small, path, quantized="compressed-tensors")
    return small, path


def ours(model, ids, start, dtype=jnp.float32):
    """The log-probability of each id from `start` on, and the margin by which the best id leads."""
    logits = model.logits(model(jnp.asarray([ids]), dtype=dtype).hidden)[0, start - 1 : -1]
    log_probs = np.asarray(jax.nn.log_softmax(logits))
    second, best = np.sort(log_probs, axis=-1)[:, -2:].T
    return log_probs[np.arange(COUNT), ids[start:]], best - second


@dataclasses.dataclass(frozen=True)
class RoundedTo127:
    """Matmul that rounds activations as vLLM's kernels: 127 stands for the largest of a token, not 127.5.

    compressed-tensors and qwix take 127.5, so all values of vLLM's are rounded from another grid.
    """

    def einsum(self, spec, x, w):
        of_x, _, of_y = ops.spelled_out(spec, x.ndim).replace("->", ",").split(",")
        summed = tuple(d for d, letter in enumerate(of_x) if letter not in of_y)
        scale = jnp.abs(x).max(axis=summed, keepdims=True) / 127
        rounded = jnp.round(x / jnp.where(scale > 0, scale, 1)) * scale
        return nn.matmul.PlainMatmul().einsum(spec, rounded, w[...])


def as_vllm_rounds(model):
    def change(path, site):
        rounds = not isinstance(site, nn.Embed) and isinstance(site.matmul, Quantized)
        return sites.replace(site, matmul=RoundedTo127()) if rounds else site

    return sites.map_sites(model, change)


def check(model, answers, dtype, ties=False):
    """Log-probabilities as ours, and equal greedy text where an id leads by more than they may differ.

    With `ties` they may differ by what the rounding of activations changes.
    """
    generator = inference.Generator(model, dtype=jnp.float32)
    texts = generator.generate(PROMPTS, max_new_tokens=COUNT)
    rows = [[*prompt, *ids] for prompt, (ids, _) in zip(PROMPTS, answers, strict=True)]
    starts = [len(prompt) for prompt in PROMPTS]
    want, margins = zip(*(ours(model, *row) for row in zip(rows, starts, strict=True)), strict=True)
    # In float32 the answers are ours; in another dtype they differ as ours in that dtype do.
    rounded = [ours(model, *row, dtype)[0] for row in zip(rows, starts, strict=True)]
    exact = quantization.full_precision(model) if ties else model
    plain = [ours(exact, *row)[0] for row in zip(rows, starts, strict=True)]
    bound = 1.5 * max(1e-4, np.std(np.subtract(rounded, want)), np.std(np.subtract(plain, want)))
    difference = np.std(np.subtract([log_probs for _, log_probs in answers], want))
    print(f"log-probabilities differ by {difference:.2g}, may by {bound:.2g}")  # for the results page
    assert difference < bound

    compared = 0
    for text, (ids, _), margin in zip(texts, answers, margins, strict=True):
        unsure = np.flatnonzero(margin < 4 * bound)  # an id there may be another
        count = int(unsure[0]) if len(unsure) else COUNT
        assert list(ids)[:count] == list(text)[:count]
        compared += count
    assert compared >= COUNT, "the first ids must be clear, else nothing is compared"


@pytest.mark.skipif(PYTHON is None, reason="MAXLIB_VLLM must be a Python with vLLM")
def test_vllm_continues_as_we_do(written):
    small, path = written
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | SETTINGS
    reader = Path(__file__).with_name("vllm_reader.py")
    dtype = "bfloat16" if path.name.startswith("int4") else "float32"  # its kernel for int4 has no float32
    command = [str(PYTHON), "-P", str(reader), str(path), dtype, str(COUNT), json.dumps(PROMPTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    answers = json.loads(lines[0].removeprefix("answers "))
    answers = [(answer["ids"], answer["log_probs"]) for answer in answers]
    check(as_vllm_rounds(small), answers, jnp.dtype(dtype))


def test_transformers_continues_as_we_do(written):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    pytest.importorskip("compressed_tensors")
    small, path = written
    # compressed-tensors 0.20 leaves packed zero points packed unless transformers dequantizes.
    has_zeros = path.name == "int4_asymmetric"
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if has_zeros else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options)
    answers = []
    for prompt in PROMPTS:
        made = model.generate(
            torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        with torch.no_grad():
            log_probs = model(made).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        ids = made[0, len(prompt) :]
        answers.append((ids.tolist(), log_probs[torch.arange(COUNT), ids].tolist()))
    # The largest number of a token is half-way between 127 and 128: its last bit decides what it is rounded to.
    check(small, answers, jnp.float32, ties=path.name == "int8_w8a8")
