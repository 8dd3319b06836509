"""Moments and layers offloaded to the host: the training results do not change."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import maxlib
from maxlib import checkpoint, nn, ops, plan, sharding, training
from maxlib.models import llama
from maxlib.training._restore import items_of
from tests.nn.tiny import filled
from tests.plan.jobs import CONFIG, layout
from tests.training import tiny

BOTH = sharding.OFFLOAD_OPTIMIZER | sharding.OFFLOAD_LAYERS


def two_devices():
    return sharding.make_mesh(fsdp=2, devices=jax.devices()[:2])


def start(rules, optimizer=None):
    mesh, model = two_devices(), tiny.model()
    layout = sharding.Layout(mesh, rules)
    model = jax.device_put(model, sharding.shardings(model, layout))
    optimizer = tiny.optimizer(model) if optimizer is None else optimizer
    with sharding.use(layout):
        return training.make_state(model, optimizer), optimizer, mesh


@functools.cache
def trained(offload: bool):
    """Three steps, the first of which starts from moments of zero."""
    rules = sharding.FSDP | (BOTH if offload else {})
    state, optimizer, mesh = start(rules)
    layout = sharding.Layout(mesh, rules)
    with sharding.use(layout):
        step = training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32, remat="full")
        step = tiny.jit_step(step)
        for seed in range(3):
            state, metrics = step(state, training.shard_batch(tiny.batch(seed=seed), layout))
    return state, metrics


def memories(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): x.sharding.memory_kind for path, x in leaves}


def test_training_is_the_same_and_stays_on_the_host():
    (want, expected), (got, metrics) = trained(False), trained(True)
    assert {*memories((want.trainable, want.opt_state)).values()} == {"device"}
    where = memories((got.trainable, got.opt_state))
    on_host = {name for name, kind in where.items() if kind == "pinned_host"}
    moments = {name for name in where if ".mu." in name or ".nu." in name}
    assert len(moments) == 2 * len(got.trainable)
    assert on_host == moments | {f"0.layers.groups.1.0.mlp.{part}.w" for part in ("up", "down")}

    def same(a, b):
        assert a.sharding.spec == b.sharding.spec
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)

    jax.tree.map(same, (got.trainable, got.opt_state), (want.trainable, want.opt_state))
    assert float(metrics["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-6)


@pytest.mark.parametrize("to_host", [True, pytest.param(False, marks=pytest.mark.full)])
def test_checkpoints_do_not_know_the_memory(to_host, tmp_path):
    saved = trained(not to_host)[0]
    with checkpoint.Checkpointer(tmp_path) as checkpointer:
        checkpointer.groupings = nn.tree.groupings(saved.rest)
        checkpointer.save(3, items_of(saved))
        checkpointer.wait()
        like = items_of(start(sharding.FSDP | (BOTH if to_host else {}))[0])
        restored = checkpointer.restore(like=like)
    assert memories({name: restored[name] for name in like}) == memories(like)
    jax.tree.map(np.testing.assert_array_equal, restored["opt"], saved.opt_state)
    jax.tree.map(np.testing.assert_array_equal, restored["params"], saved.trainable)


def test_any_optimizer_that_treats_layers_by_themselves():
    """Also one that keeps parameters, inside one that keeps scalars and decides over all of them."""
    optimizer = training.skip_spikes(training.offload_by_layer(training.ema(optax.lion(1e-2))))
    state, _, mesh = start(sharding.FSDP | BOTH, optimizer)
    plain, _, _ = start(sharding.FSDP, optimizer)
    assert {*memories(optax.tree.get(state.opt_state, "average")).values()} == {"pinned_host"}
    stacked = nn.tree.stacked_paths(state.rest)
    update = jax.jit(functools.partial(optimizer.update, stacked=stacked), compiler_options=tiny.QUICKLY)
    with sharding.use(sharding.Layout(mesh, sharding.FSDP | BOTH)):
        got = update(plain.trainable, state.opt_state, state.trainable, value=1.0)
    with sharding.use(sharding.Layout(mesh, sharding.FSDP)):
        want = update(plain.trainable, plain.opt_state, plain.trainable, value=1.0)
    assert memories(got[1]) == memories(state.opt_state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=0), got, want)


def test_what_cannot_be_is_said():
    mesh = two_devices()
    with pytest.raises(ValueError, match="keeps all of them on the device: use training.adamw"):
        start(sharding.FSDP | sharding.OFFLOAD_OPTIMIZER, optax.adam(1e-3))
    rules = sharding.FSDP | sharding.OFFLOAD_LAYERS
    layout, (state, optimizer, _) = sharding.Layout(mesh, rules), start(rules, optax.adamw(1e-3))
    with sharding.use(layout), pytest.raises(ValueError, match="which this optimizer does not support"):
        jax.eval_shape(training.make_train_step(tiny.loss, optimizer), state, tiny.batch())
    for offload in (sharding.OFFLOAD_OPTIMIZER, sharding.OFFLOAD_LAYERS):
        with pytest.raises(ValueError, match="cannot also be split into pipeline stages"):
            sharding.Layout(mesh, offload | sharding.PP)


def test_a_backend_without_that_memory_is_named(monkeypatch):
    class Memory:
        kind = "device"

    mesh = two_devices()
    monkeypatch.setattr(type(mesh.devices.flat[0]), "addressable_memories", lambda _: [Memory()])
    with pytest.raises(ValueError, match=r"needs the memory 'pinned_host', but cpu only has \['device'\]"):
        sharding.Layout(mesh, sharding.OFFLOAD_OPTIMIZER)


@pytest.mark.full
def test_plans_count_the_host_by_itself():
    job = functools.partial(plan.Job, model=CONFIG, target="h100x8", sequence=16)
    usual = plan.estimated(job())
    offloaded = plan.estimated(job(layout=layout("fsdp+offload_optimizer+offload_layers")))
    assert usual.host == 0 and "on the host" not in str(usual) and "on the host" in str(offloaded)
    total = lambda p: p.parameters + p.optimizer + p.host
    assert total(offloaded) == total(usual) and offloaded.optimizer < 100 < usual.optimizer
    assert offloaded.parameters < usual.parameters and offloaded.peak < usual.peak - usual.optimizer


def test_files_do_not_know_the_memory(tmp_path):
    cfg = dataclasses.replace(CONFIG, rope=ops.Rope(CONFIG.head_dim, max_length=64))
    model = filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))
    maxlib.save_pretrained(model, tmp_path / "a")
    got = maxlib.from_pretrained(tmp_path / "a", layout=sharding.Layout(two_devices(), sharding.FSDP | BOTH))
    on_host = {path for path, kind in memories(got).items() if kind == "pinned_host"}
    assert on_host and all(".groups.0.0." in path for path in on_host)
    maxlib.save_pretrained(got, tmp_path / "b")
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
