"""Adapters on eight devices, in pipelines, with rematerialisation and accumulation: the step equals that of
one device.
"""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import adapters, nn, sharding, training
from maxlib.training import copy_model
from tests.adapters.test_adapters import LORA, model, tuned
from tests.training import tiny
from tests.training.tiny import batch, jit_step

CLOSE = {"rtol": 0, "atol": 2e-5}


def step(base, *, layout=None, **options):
    """Returns factors and loss of one step of SGD."""
    optimizer = optax.sgd(0.1)
    run = jit_step(training.make_train_step(training.NextToken(), optimizer, dtype=jnp.float32, **options))

    with contextlib.nullcontext() if layout is None else sharding.use(layout):
        # On a mesh a copy may share arrays with the model, and the step deletes what it is given.
        fresh = jax.device_put(jax.tree.map(np.array, base))
        state = training.make_state(copy_model(fresh, layout), optimizer, filter=adapters.trainable)
        state, metrics = run(state, batch(8))
    return {n: np.asarray(v) for n, v in state.trainable.items()}, float(metrics["loss"])


DORA = adapters.LoRA(2, 4, dora=True)
both = pytest.param("both", marks=pytest.mark.full)


@functools.cache
def adapted(name):
    """A model without attention and experts, by default; losses of routers depend on how a batch is cut."""
    base, rules = {
        "mlps": (tiny.model, DORA),
        "llama": (lambda: model("llama"), LORA),
        "both": (lambda: model("both"), DORA),
    }[name]
    return tuned(base(), rules, size=0.1)


@functools.cache
def alone(name):
    return step(adapted(name))


def same(got, want):
    assert got[1] == pytest.approx(want[1], abs=1e-5)
    for name, value in want[0].items():
        np.testing.assert_allclose(got[0][name], value, **CLOSE, err_msg=name)


def on(strategy, **axes):
    return sharding.Layout(sharding.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())]), strategy)


@pytest.mark.parametrize("name", ["mlps", both])
def test_a_mesh_computes_the_same_step(name):
    same(step(adapted(name), layout=on(sharding.FSDP_TP | {"kv_heads": None}, fsdp=2, tensor=2)), alone(name))


@pytest.mark.full
def test_experts_on_a_mesh_compute_the_same_step():
    same(step(adapted("both"), layout=on(sharding.FSDP | sharding.EP, expert=4, data=2)), alone("both"))


@pytest.mark.full
def test_remat_computes_the_same_step():
    same(step(adapted("both"), remat="full"), alone("both"))


@pytest.mark.full
def test_accumulation_computes_the_same_step():
    same(step(adapted("llama"), microbatches=2), alone("llama"))


@pytest.mark.parametrize("name", ["mlps", pytest.param("llama", marks=pytest.mark.full)])
def test_a_pipeline_computes_the_same_step(name):
    strategy = sharding.FSDP | sharding.Pipeline("stage", microbatches=2)
    same(step(adapted(name), layout=on(strategy, stage=2, fsdp=2)), alone(name))


@pytest.mark.parametrize("name", ["mlps", both])
def test_the_rank_is_replicated(name):
    mixed = adapted(name)
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP | {"kv_heads": None})
    variables = nn.variables(mixed)
    specs = {n: layout.sharding(n, variables[n]).spec for n in nn.partition(mixed, adapters.trainable)[0]}
    where = {n: nn.tree.axes(mixed)[n].index("lora_rank") for n in specs if not n.endswith("magnitude")}
    assert all(len(specs[n]) <= d or specs[n][d] is None for n, d in where.items())
    assert any("fsdp" in str(specs[n]) for n in where), "factors are split as their weights are"
