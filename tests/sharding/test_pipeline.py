"""Layers over devices: what passes through stages is what one device computes, and only neighbours talk."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.models import deepseek, gemma2, gemma3, gpt2
from tests.nn.tiny import tiny_llama
from tests.sharding.test_context import batch

PP = {"layers": sharding.Pipeline("stage", microbatches=4)}


def llama(num_layers=4):
    return tiny_llama(num_layers=num_layers, vocab=64)


def gemma():
    size = {"vocab": 64, "num_layers": 8, "dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    return gemma2.Gemma2(gemma2.Config(**size, window=9, rope=ops.Rope(8)), rngs=nnx.Rngs(0))


def experts():
    """A dense layer, then four with experts, and latent attention."""
    size = {"vocab": 64, "num_layers": 5, "num_dense": 1, "dim": 32, "mlp_dim": 48, "expert_dim": 24, "num_heads": 4}
    latent = {"q_rank": 16, "kv_rank": 16, "nope_dim": 8, "v_dim": 8, "rope": ops.Rope(4)}
    routing = {"num_experts": 4, "num_shared": 1, "top_k": 2, "renormalize": True}
    return deepseek.DeepSeek(deepseek.Config(version=3, **size, **latent, **routing), rngs=nnx.Rngs(0))


def rows(count: int):
    return jax.tree.map(lambda a: np.concatenate([a] * (count // 2)), batch())


@functools.partial(jax.jit, static_argnames="remat")
def loss_and_gradients(params, rest, data, remat=None):
    loss = lambda p: training.next_token_loss(nn.combine(p, rest), data, dtype=jnp.float32, remat=remat)[0]
    return jax.value_and_grad(loss)(params)


CASES = {
    "dense": (llama, {"stage": 4, "fsdp": 2}, sharding.FSDP, None),
    "a period of two": (gemma, {"stage": 4, "tensor": 2}, sharding.TP, "full"),
    "a prefix, experts, long sequences": (
        experts,
        {"stage": 2, "context": 2, "expert": 2},
        sharding.EP | sharding.CP_RING,
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_one_device(case):
    build, degrees, rules, remat = CASES[case]
    model, data = jax.jit(build)(), rows(8)
    want = loss_and_gradients(*nn.partition(model), data)
    mesh, rules = sharding.make_mesh(**degrees), rules | PP
    spread = jax.device_put(model, sharding.shardings(model, mesh, rules))
    with sharding.use(mesh, rules):
        got = loss_and_gradients(*nn.partition(spread), data, remat=remat)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    for path, gradient in want[1].items():
        np.testing.assert_allclose(got[1][path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)
    weight = nn.variables(spread)["layers.body.0.attn.o.w"].get_value()
    assert weight.addressable_shards[0].data.shape[0] == weight.shape[0] // mesh.shape["stage"]


def test_only_activations_move():
    """Weights stay where they are; every tick activations move on by one stage, and those of the last one go to all."""
    model, data = jax.jit(llama)(), rows(8)
    mesh, rules = sharding.make_mesh(stage=4, devices=jax.devices()[:4]), sharding.DP | PP
    spread = jax.device_put(model, sharding.shardings(model, mesh, rules))
    with sharding.use(mesh, rules):
        hidden = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).hidden)
        text = hidden.lower(spread, data["tokens"]).compile().as_text()
    moved = re.findall(r"= (\S+) (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(", text)
    assert {kind for _, kind in moved} == {"collective-permute", "all-reduce"}, moved
    assert all("32,32]" in shape for shape, _ in moved), moved  # T x D of a microbatch


def test_layers_and_rows_must_divide():
    mesh = sharding.make_mesh(stage=4, data=2)
    with pytest.raises(ValueError, match=r"axis 'layers' of size 6 does not divide"):
        sharding.create(lambda: llama(6), mesh, PP)
    with sharding.use(mesh, PP), pytest.raises(ValueError, match="6 rows cannot be cut into 4 microbatches"):
        llama()(jnp.zeros((6, 8), jnp.int32))
    with sharding.use(mesh, PP), pytest.raises(ValueError, match="6 repeats of layers cannot be cut into 4"):
        llama(6)(jnp.zeros((4, 8), jnp.int32))
    with pytest.raises(ValueError, match="at least one microbatch"):
        sharding.Pipeline("stage", microbatches=0)


def test_experts_report_the_mean_over_microbatches():
    model, tokens = jax.jit(experts)(), rows(8)["tokens"]
    run = jax.jit(lambda model, tokens: model(tokens, dtype=jnp.float32).aux)
    want = run(model, tokens)
    with sharding.use(sharding.make_mesh(stage=4, data=2), sharding.DP | PP):
        got = run(model, tokens)
    assert want.keys() == got.keys()
    np.testing.assert_allclose(got["moe/load"], want["moe/load"], atol=1e-6)


@functools.partial(jax.jit, static_argnames="remat")
def one_f_one_b(params, rest, data, remat=None):
    grads, mean, stats = training.one_f_one_b(dtype=jnp.float32, remat=remat)(params, rest, data, jax.random.key(0))
    return mean * stats.tokens, jax.tree.map(lambda g: g * stats.tokens, grads), stats.sums


@pytest.mark.parametrize("case", CASES)
def test_one_f_one_b_gives_the_loss_and_gradients_of_one_device(case):
    build, degrees, rules, remat = CASES[case]
    model, data = jax.jit(build)(), rows(8)
    data["targets"][:3, :9] = -1  # microbatches with other numbers of targets
    want = loss_and_gradients(*nn.partition(model), data)
    mesh, rules = sharding.make_mesh(**degrees), rules | PP
    spread = jax.device_put(model, sharding.shardings(model, mesh, rules))
    with sharding.use(mesh, rules):
        got = one_f_one_b(*nn.partition(spread), data, remat=remat)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    assert got[1].keys() == want[1].keys()
    for path, gradient in want[1].items():
        np.testing.assert_allclose(got[1][path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)


def scaled():
    """Vectors that are scaled on entry."""
    size = {"vocab": 64, "num_layers": 2, "dim": 32, "mlp_dim": 48, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    ropes = {"rope": ops.Rope(8), "local_rope": ops.Rope(8, 100.0)}
    kinds = {"layer_types": (gemma3.GLOBAL,) * 2, "window": 9}
    return gemma3.Gemma3(gemma3.Config(**size, **ropes, **kinds), rngs=nnx.Rngs(0))


def positioned():
    """Positions that are learned, and added on entry."""
    cfg = gpt2.Config(vocab=64, num_layers=2, dim=32, mlp_dim=48, num_heads=4, num_positions=64)
    return gpt2.GPT2(cfg, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("build", [scaled, positioned])
def test_one_f_one_b_enters_as_the_model_does(build):
    model, data = jax.jit(build)(), rows(8)
    want = loss_and_gradients(*nn.partition(model), data)
    with sharding.use(sharding.make_mesh(stage=2, devices=jax.devices()[:2]), sharding.DP | PP):
        got = one_f_one_b(*nn.partition(model), data)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    # A bias of keys has no gradient, no softmax sees it: what is computed there is noise.
    noise = 1e-7 * max(np.abs(gradient).max() for gradient in want[1].values())
    for path, gradient in want[1].items():
        np.testing.assert_allclose(got[1][path], gradient, atol=1e-5 * np.abs(gradient).max() + noise, err_msg=path)


def test_one_f_one_b_says_what_it_cannot_do():
    params, rest = nn.partition(llama())
    with pytest.raises(ValueError, match="there is no pipeline"):
        one_f_one_b(params, rest, rows(8))
    with (
        sharding.use(sharding.make_mesh(stage=2, data=4), sharding.DP | PP),
        pytest.raises(ValueError, match="text only"),
    ):
        one_f_one_b(params, rest, rows(8) | {"images": jnp.zeros((1, 3, 4, 4))})
