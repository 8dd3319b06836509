"""GPTQ: less error than rounding to nearest and than qwix's, in dense layers and in experts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from flax import nnx
from qwix.contrib import gptq_core

from maxlib import ops, quantization
from maxlib.models import llama, mixtral
from maxlib.quantization._gptq import _rounded

DENSE = llama.Config(
    vocab=64,
    num_layers=2,
    dim=64,
    mlp_dim=96,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    rope=ops.Rope(32, max_length=64),
)


@pytest.mark.full
def test_error_is_at_most_that_of_qwix():
    """The same matrix and inputs: the loss is the error of the outputs."""
    random = np.random.default_rng(0)
    x = random.standard_normal((256, 8)) @ random.standard_normal((8, 64)) + 0.3 * random.standard_normal((256, 64))
    w, h = jnp.asarray(random.standard_normal((16, 64)), jnp.float32), jnp.asarray(x.T @ x, jnp.float32)
    how = qwix._src.core.qarray.HowToQuantize(qtype=jnp.int4, channelwise_axes=[0], tiled_axes={1: 32})
    with jax.numpy_rank_promotion("allow"):
        theirs = qwix.dequantize(gptq_core.quantize_weight(w, h, how)[0])
    values, scale = _rounded(w[None], h[None], "int4", 32, 0.01)
    ours = values[0] * jnp.repeat(scale[0], 32, axis=1)
    nearest = qwix.dequantize(qwix.quantize(w, jnp.int4, channelwise_axes=[0], tiled_axes={1: 32}))
    loss = lambda rounded: float(jnp.einsum("oi,ij,oj->", rounded - w, h, rounded - w))
    assert loss(ours) < 1.02 * loss(theirs)
    assert loss(ours) < 0.5 * loss(nearest)


@pytest.mark.parametrize("family", ["dense", pytest.param("experts", marks=pytest.mark.full)])
def test_a_model_changes_less_than_by_rounding_to_nearest(family):
    if family == "dense":
        model = jax.jit(lambda: llama.Llama(DENSE, rngs=nnx.Rngs(0)))()
    else:
        cfg = mixtral.Config(
            vocab=64, num_layers=2, dim=64, expert_dim=96, num_heads=2, num_kv_heads=1, head_dim=32, num_experts=4, top_k=2,
            rope=ops.Rope(32, max_length=64),
        )  # fmt: skip
        model = jax.jit(lambda: mixtral.Mixtral(cfg, rngs=nnx.Rngs(0)))()
    tokens = jax.random.randint(jax.random.key(0), (4, 64), 0, 64)
    rules = [quantization.Rule(None, match="layers.attn.o"), quantization.Rule(quantization.INFERENCE["int4"])]
    small, nearest = quantization.gptq(model, [tokens], rules), quantization.for_inference(model, rules)
    assert quantization.report(small).rows == quantization.report(nearest).rows
    assert small.layers.grouping == nearest.layers.grouping
    errors, of_nearest = quantization.compare(model, small, tokens), quantization.compare(model, nearest, tokens)
    assert errors.logit_error < 0.8 * of_nearest.logit_error


def test_formats_and_rules_are_checked():
    model = jax.jit(lambda: llama.Llama(DENSE, rngs=nnx.Rngs(0)))()
    with pytest.raises(ValueError, match="GPTQ rounds to int4 or int8, got nf4"):
        quantization.gptq(model, [], "nf4")
