"""QLoRA on weights that stay in the few bits in which another library's files have them."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import qwix
from flax import nnx
from safetensors.numpy import load_file, save_file

import maxlib
from maxlib import adapters, nn, ops, quantization, training
from maxlib.models import llama
from tests.models import parity

CFG = llama.Config(
    vocab=64,
    num_layers=2,
    dim=64,
    mlp_dim=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rope=ops.Rope(32, max_length=64),
)


def write_int4(model, path):
    maxlib.save_pretrained(quantization.for_inference(model, "int4"), path, quantized="compressed-tensors")


def write_nf4(model, path):
    """As bitsandbytes writes it: blocks of 64, two codes in a byte with the first in the high half."""
    maxlib.save_pretrained(model, path)
    file, tensors = path / "model.safetensors", {}
    codes = qwix.QArray(jnp.arange(16, dtype=jnp.uint4)[None], jnp.ones((1, 1)), None, "nf4")
    table = np.asarray(qwix.dequantize(codes), np.float32)[0]
    for name, w in load_file(file).items():
        if w.ndim < 2 or "embed" in name or "lm_head" in name:
            tensors[name] = w
            continue
        blocks = w.reshape(-1, 64)
        scale = np.abs(blocks).max(axis=1)
        nearest = (
            np.abs(blocks[..., None] / scale[:, None, None] - table).argmin(axis=-1).astype(np.uint8).reshape(-1, 2)
        )
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(w.shape)}
        tensors[name] = (nearest[:, 0] << 4 | nearest[:, 1])[:, None]
        tensors |= {f"{name}.absmax": scale, f"{name}.quant_map": table}
        tensors[f"{name}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.full  # the guide takes one step of it in the default run
@pytest.mark.parametrize(("write", "qtype"), [(write_int4, "int4"), (write_nf4, "nf4")])
def test_adapters_train_on_kept_weights(write, qtype, tmp_path):
    write(jax.jit(lambda: llama.Llama(CFG, rngs=nnx.Rngs(0)))(), tmp_path / "base")
    base = maxlib.from_pretrained(tmp_path / "base", keep_quantized=True)
    kept = {n: np.array(v.get_value()) for n, v in nn.variables(base).items()}
    assert {w.w.qtype for _, w in nn.tree.find(base.layers, nn.Einsum)} == {qtype}

    tokens = jnp.asarray(parity.tokens(CFG.vocab, 24))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    optimizer = optax.adam(0.02)
    adapted = jax.jit(lambda model: adapters.add(model, adapters.LoRA(rank=4, alpha=8), rngs=nnx.Rngs(1)))(base)
    state = training.make_state(training.copy_model(adapted), optimizer)
    step = training.jit_step(training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32))
    losses = []
    for _ in range(6):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]

    after = nn.variables(adapters.base_model(state.model))
    assert after.keys() == kept.keys()
    for name, value in kept.items():
        np.testing.assert_array_equal(after[name].get_value(), value, err_msg=name)
    adapters.save(state.model, tmp_path / "adapter", base=str(tmp_path / "base"))
    again = adapters.load(base, tmp_path / "adapter")
    want = parity.logits(state.model, tokens)
    assert np.abs(parity.logits(again, tokens) - want).max() < 1e-5 * want.std()
    assert np.abs(parity.logits(base, tokens) - want).max() > 0.1 * want.std()
