"""Adapters on eight devices, in pipelines, rematerialised and accumulated: the same step as on one."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, nn, sharding, training
from maxlib.training._placement import own_model
from tests.adapters.test_adapters import LORA, put_on, trained
from tests.quantization.tiny import model
from tests.training.tiny import Bigram, batch, jit_step

CLOSE = {"rtol": 0, "atol": 2e-5}


def step(base, *, layout=None, accumulate=1, **options):
    """Returns factors and loss of one step of SGD."""
    loss = functools.partial(training.next_token_loss, dtype=jnp.float32, **options)
    rows = jax.tree.map(jnp.asarray, batch(8))
    optimizer = optax.sgd(0.1)
    whole = training.accumulate(loss, accumulate) if accumulate > 1 else loss
    run = jit_step(training.make_train_step(whole, optimizer))

    fresh = jax.tree.map(lambda x: jnp.array(np.array(x)), base)  # the step deletes what it is given

    def go():
        state = training.make_state(own_model(fresh, layout), optimizer, filter=adapters.trainable)
        state, metrics = run(state, rows)
        return {n: np.asarray(v) for n, v in state.trainable.items()}, float(metrics["loss"])

    if layout is None:
        return go()
    with sharding.use(layout):
        return go()


@pytest.fixture(scope="module", params=["mlps", pytest.param("both", marks=pytest.mark.full)])
def mixed(request):
    """Attention and experts, by default neither: a sixth of the program."""
    base = Bigram(16, rngs=nnx.Rngs(0)) if request.param == "mlps" else model("both")
    return trained(put_on(base, adapters.LoRA(2, 4, dora=True)), size=0.1)


@pytest.fixture(scope="module")
def alone(mixed):
    return step(mixed)


def same(got, want):
    assert got[1] == pytest.approx(want[1], abs=1e-5)
    for name, value in want[0].items():
        np.testing.assert_allclose(got[0][name], value, **CLOSE, err_msg=name)


@pytest.mark.parametrize(
    ("axes", "strategy"),
    [
        ({"fsdp": 2, "tensor": 2}, sharding.FSDP_TP | {"kv_heads": None}),
        pytest.param({"expert": 2, "fsdp": 2}, sharding.FSDP | sharding.EP, marks=pytest.mark.full),
    ],
    ids=["fsdp_tp", "experts"],
)
def test_a_mesh_computes_the_same_step(mixed, alone, axes, strategy):
    layout = sharding.Layout(sharding.make_mesh(**axes, devices=jax.devices()[: math.prod(axes.values())]), strategy)
    same(step(mixed, layout=layout), alone)


@pytest.mark.full
def test_remat_computes_the_same_step(mixed, alone):
    same(step(mixed, remat="full"), alone)


@pytest.fixture(scope="module")
def llama():
    return trained(put_on(model("llama"), LORA), size=0.1)  # losses of routers depend on the cut


@pytest.mark.full
def test_accumulation_computes_the_same_step(llama):
    same(step(llama, accumulate=2), step(llama))


def test_a_pipeline_computes_the_same_step(llama):
    want = step(llama)
    strategy = sharding.FSDP | sharding.Pipeline("stage", microbatches=2)
    same(
        step(llama, layout=sharding.Layout(sharding.make_mesh(stage=2, fsdp=2, devices=jax.devices()[:4]), strategy)),
        want,
    )


def test_the_rank_is_replicated(mixed):
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP | {"kv_heads": None})
    found = nn.variables(mixed)
    specs = {n: layout.sharding(n, found[n]).spec for n in nn.partition(mixed, adapters.trainable)[0]}
    where = {n: nn.tree.axes(mixed)[n].index("lora_rank") for n in specs if not n.endswith("magnitude")}
    assert all(len(specs[n]) <= d or specs[n][d] is None for n, d in where.items())
    assert any("fsdp" in str(specs[n]) for n in where), "factors are split as their weights are"
