"""The arrays that each policy keeps for the backward pass, checked by the shapes of autodiff's residuals."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn
from maxlib.models import llama
from tests.nn.tiny import LLAMA, filled, filled_llama, tokens
from tests.training.tiny import QUICKLY

B, T, L = 2, 8, 3
HEADS, KEYS = LLAMA.num_heads * LLAMA.head_dim, LLAMA.num_kv_heads * LLAMA.head_dim
OUT = HEADS + LLAMA.num_heads  # the result, and a log-sum-exp for each head
KEPT = {
    "full": 0,
    "attention": OUT,
    "qkv": HEADS + 2 * KEYS,
    "dots_except_mlp": HEADS + 2 * KEYS + LLAMA.dim,  # the MLP's result is in the next input
    "dots": HEADS + 2 * KEYS + LLAMA.dim + 2 * LLAMA.mlp_dim,
    "minimal": HEADS + 2 * KEYS + OUT + LLAMA.dim + 2 * LLAMA.mlp_dim,
}


@functools.cache
def model():
    return filled_llama(num_layers=L)


def loss(params, rest, remat):
    hidden = nn.combine(params, rest)(tokens(B, T), dtype=jnp.float32, remat=remat).hidden
    return jnp.sum(jnp.sin(hidden))


def saved(remat) -> int:
    """Numbers that the backward pass gets of the layers, for each token and layer, beside their inputs."""
    params, rest = nn.partition(model())
    residuals = jax.eval_shape(lambda params: jax.vjp(lambda p: loss(p, rest, remat), params)[1], params)
    weights = {x.shape for x in params.values()}
    of_layers = [x for x in jax.tree.leaves(residuals) if x.shape[:1] == (L,) and x.shape not in weights]
    return sum(math.prod(x.shape) for x in of_layers) // (L * B * T)


@functools.cache
def saved_by(remat: str) -> int:
    return saved(remat)


SEVERAL = ("full", "minimal")  # by default
PARAMS = [pytest.param(name, marks=() if name in SEVERAL else pytest.mark.full) for name in KEPT]


@pytest.mark.parametrize("remat", PARAMS)
def test_named_policies_keep_what_they_say(remat):
    assert saved_by(remat) - saved_by("full") == KEPT[remat]


def test_each_intermediate_has_a_choice_of_its_own():
    # "q" lies on the host
    each = {"gate": "keep", "q": "offload", "attn": "recompute", "mlp": "recompute"}
    assert saved(each) - saved_by("full") == LLAMA.mlp_dim + HEADS
    left = {"moe": "keep", "q": "recompute", "k": "recompute", "v": "recompute"}
    assert nn.remat.kept_on_device("qkv_offload") == left
    with pytest.raises(ValueError, match=r"'keep', 'offload' or 'recompute' for a name; got \{'q': 'host'\}"):
        nn.remat.remat_policy({"q": "host"})


@pytest.mark.full
def test_what_lies_on_the_host_comes_back():
    params, rest = nn.partition(model())
    gradient = lambda remat: jax.jit(jax.grad(lambda p: loss(p, rest, remat)), compiler_options=QUICKLY)
    got, want = gradient({"q": "offload", "k": "keep"})(params), gradient(None)(params)
    # Only what leaves has its layout chosen: else the TPU's compiler may turn all layers' at once, on the device.
    away, kept = (str(gradient(remat).trace(params).jaxpr) for remat in ({"q": "offload"}, "qkv"))
    assert "MemorySpace.Host" in away and "layout_constraint" in away and "layout_constraint" not in kept
    for path, g in want.items():
        np.testing.assert_allclose(got[path], g, atol=1e-6 * np.abs(g).max(), err_msg=path)


@functools.cache
def in_periods(period: int = 2) -> nn.Stack:
    kinds = [i % period for i in range(4)]
    return filled(lambda: nn.Stack(lambda _, rngs: llama.Block(LLAMA, rngs=rngs), kinds, rngs=nnx.Rngs(0)))


def run(stack, x):
    return jnp.sum(jnp.sin(stack(x, nn.make_context(B, T), remat="full")[0]))


def test_layers_of_a_period_are_recomputed_one_after_the_other():
    """Each waits with its input for the gradient of its output, and its weights do not wait."""
    wide, waiting = f"tensor<{B}x{T}x{LLAMA.dim}xf32>", {}
    for period in (1, 2):
        text = jax.jit(jax.grad(run)).lower(in_periods(period), jnp.ones((B, T, LLAMA.dim))).as_text()
        barriers = [line for line in text.splitlines() if "optimization_barrier" in line and wide in line]
        assert not any(f"x{LLAMA.mlp_dim}x" in line for line in barriers)
        waiting[period] = [line.partition(" : ")[2].count(wide) for line in barriers]
    assert waiting == {1: [], 2: [2, 2]}


def test_on_tpus_a_layers_gradients_come_before_the_layer_below_it(monkeypatch):
    """The gradient of a layer's input waits for those of all its weights."""
    x, waiting = jnp.ones((B, T, LLAMA.dim)), {}
    as_on_a_tpu(monkeypatch)
    for period in (1, 2):
        lowered = jax.jit(jax.grad(run)).lower(in_periods(period), x)
        wide = f"tensor<{LLAMA.mlp_dim}x{LLAMA.dim}xf32>"
        barriers = [line for line in lowered.as_text().splitlines() if "optimization_barrier" in line and wide in line]
        waiting[period] = [line.partition(" : ")[2].count("tensor<") for line in barriers]
    weights = len(jax.tree.leaves(in_periods()[0]))
    assert waiting == {1: [], 2: [1 + weights] * 2}


def as_on_a_tpu(monkeypatch) -> None:
    monkeypatch.setattr("maxlib.nn.stack._run.current_device", lambda: ("tpu", "TPU v5p"))
    monkeypatch.setattr("maxlib.nn.stack._run.keep_float32", lambda w: w)  # has barriers of its own


@pytest.mark.full
def test_the_order_on_tpus_changes_no_value(monkeypatch):
    x = jnp.ones((B, T, LLAMA.dim))
    want = jax.jit(jax.grad(run))(in_periods(), x)
    as_on_a_tpu(monkeypatch)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(lambda *x: jax.grad(run)(*x))(in_periods(), x), want)


def test_on_tpus_nothing_waits_for_weights_that_are_not_trained(monkeypatch):
    matmuls = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr("maxlib.nn.stack._run.current_device", lambda platform=platform: (platform, ""))
        lowered = jax.jit(jax.grad(run, argnums=1)).lower(in_periods(), jnp.ones((B, T, LLAMA.dim)))
        matmuls.append(lowered.as_text().count("dot_general"))
    assert matmuls[0] == matmuls[1] > 0
