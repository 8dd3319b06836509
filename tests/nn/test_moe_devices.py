"""Mixture of experts on eight devices: equal to one, and what moves between them."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding
from tests.nn.experts import DIM, LOSSES, MLP, E, X, call, close, in_float64, inputs, moe, value_and_gradients

MESHES = {
    "dropless": (dict(data=2, fsdp=2, tensor=2), None, "EIO"),
    "with a capacity": (dict(fsdp=4, tensor=2), 0.8, "EOI"),
}


def loss_and_gradients(layer, x, valid):
    trainable, rest = nn.partition(layer)

    def loss(trainable, x):
        y, aux = nn.combine(trainable, rest)(x, nn.context(*valid.shape, valid=valid))
        return jnp.sum(jnp.sin(y)) + sum(v for k, v in aux.items() if k.startswith("loss/")), (y, aux)

    return jax.device_get(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(trainable, x))


@pytest.mark.parametrize("name", MESHES)
def test_eight_devices_equal_one(name):
    degrees, capacity_factor, layout = MESHES[name]
    mesh, rules, x = sharding.make_mesh(**degrees), sharding.FSDP_TP, inputs(B=8)
    layer = moe(bias=True, losses=LOSSES, capacity_factor=capacity_factor, layout=layout)
    valid = jnp.arange(7)[None] < jnp.arange(8)[:, None]
    want = loss_and_gradients(layer, x, valid)
    with sharding.use(mesh, rules):
        got = loss_and_gradients(jax.device_put(layer, sharding.shardings(layer, mesh, rules)), x, valid)
    close(got, want)


SPLIT_EXPERTS = {
    "one on each device": (dict(expert=8), sharding.EP, (1, MLP, DIM)),
    "in parts": (dict(expert=2, fsdp=2, tensor=2), sharding.PRESETS["ep_tp"], (4, MLP // 2, DIM // 2)),
}


@pytest.mark.parametrize("name", SPLIT_EXPERTS)
def test_experts_split_over_devices_equal_the_loop(name):
    """Values and gradients, dropless and with room for all."""
    degrees, rules, part = SPLIT_EXPERTS[name]
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), bias=True)
    mesh, x, valid = sharding.make_mesh(**degrees), inputs(B=8), np.arange(7)[None] < np.arange(8)[:, None]
    context = lambda: nn.context(*valid.shape, valid=jnp.asarray(valid))
    want = jax.device_get(value_and_gradients(lambda layer, x: layer.reference(x, context()), layer, x))
    split = jax.device_put(layer, sharding.shardings(layer, mesh, rules))
    assert split.gate.w[...].addressable_shards[0].data.shape == part
    for capacity_factor in (None, 8 / X):
        split.capacity_factor = capacity_factor
        with sharding.use(mesh, rules):
            got = value_and_gradients(lambda layer, x: layer(x, context())[0], split, x)
        close(jax.device_get(got), want)


def test_dropless_whether_experts_share_evenly_or_two_get_everything():
    """The usual exchange and the one for the worst case, in one program; which one runs is for the data to say."""
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)))
    mesh, x = sharding.make_mesh(expert=4, data=2), inputs(B=8, T=16)
    split = jax.device_put(layer, sharding.shardings(layer, mesh, sharding.EP))
    gradients = jax.jit(jax.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m(x)[0])), argnums=(0, 1)))
    looped = jax.jit(jax.value_and_grad(lambda m, x: jnp.sum(jnp.sin(m.reference(x))), argnums=(0, 1)))
    for even in (True, False):
        for one in (layer, split):
            one.router.gate.w[...] = one.router.gate.w[...] * even  # equal scores: the first experts win everywhere
        assert (np.bincount(np.ravel(layer.router(x).experts)).max() == 8 * 16) != even
        with sharding.use(mesh, sharding.EP):
            got = gradients(split, x)
        close(jax.device_get(got), jax.device_get(looped(layer, x)))


@pytest.mark.parametrize(("B", "degrees"), [(1, dict(data=4, tensor=2)), (4, dict(data=1, tensor=8))])
def test_what_does_not_divide_stays_whole(B, degrees):
    layer, x = moe(bias=True), inputs(B=B)
    assert MLP % 8
    with sharding.use(sharding.make_mesh(**degrees), sharding.TP):
        got = call(layer, x)
    close(jax.device_get(got[0]), in_float64(layer, x)[0])


def test_no_activations_cross_the_data_axis():
    """Each device sorts its own tokens: only weights are gathered over the mesh."""
    mesh, x, layer = sharding.make_mesh(fsdp=8), inputs(B=8, T=256), moe()
    with sharding.use(mesh, sharding.FSDP):
        layer = jax.device_put(layer, sharding.shardings(layer, mesh, sharding.FSDP))
        x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("fsdp")))
        step = jax.jit(jax.grad(lambda m, x: m(x)[0].sum(), argnums=(0, 1)))
        text = step.lower(layer, x).compile().as_text()
    moved = re.findall(
        r"= \(?\w+\[([\d,]*)\].* (?:all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text
    )
    sizes = [math.prod(int(n) for n in shape.split(",")) for shape in moved]
    assert len(sizes) >= 3 and max(sizes) <= E * MLP * DIM < x.size / 8


@pytest.mark.parametrize("capacity_factor", [None, 2.0])
def test_tokens_travel_to_their_experts(capacity_factor):
    """No expert's weights move, nor more tokens than one device has: dropless they go in as many turns as there are
    devices.
    """
    layer = moe(make_router=lambda: nn.Router(DIM, 8, top_k=X, rngs=nnx.Rngs(1)), capacity_factor=capacity_factor)
    mesh, x = sharding.make_mesh(expert=8), inputs(B=8, T=16)
    layer = jax.device_put(layer, sharding.shardings(layer, mesh, sharding.EP | {"embed": None}))
    x = jax.device_put(x, jax.NamedSharding(mesh, jax.P("expert")))
    with sharding.use(mesh, sharding.EP | {"embed": None}):
        run = jax.jit(lambda m, x: sharding.constrain(m(x)[0], "batch", "seq", None))
        text = run.lower(layer, x).compile().as_text()
    found = re.findall(r"= (.*?) (all-gather|all-to-all|all-reduce|collective-permute)(?:-start)?\(", text)
    assert {kind for shape, kind in found if "f32" in shape and f",{DIM}]" in shape} == {"all-to-all"}
    assert not any(f"{MLP},{DIM}]" in shape or f"{DIM},{MLP}]" in shape for shape, _ in found)
