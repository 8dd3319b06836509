"""The contracts of docs/decisions.md, on a model unknown to maxlib (tests/outside.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, ops, plan, sharding, training
from maxlib.models import gpt2, llama
from tests.counting import batch, loss, trained
from tests.nn.tiny import filled
from tests.outside import VOCAB, Outside, outside

ROWS, LENGTH = 8, 12


def batches(steps: int) -> list[dict]:
    return [batch(i, VOCAB, length=LENGTH) for i in range(steps)]


@jax.jit
def layers(model):
    return list(model.blocks)


@pytest.fixture(scope="module")
def model():
    return outside()


@pytest.fixture(scope="module")
def run(model):
    """State and losses of 60 steps on one device."""
    return trained(model, batches(60))


def test_it_keeps_the_model_contract(model):
    assert isinstance(model, nn.Model)


def test_it_trains_and_what_must_not_be_trained_is_not(model, run):
    state, losses = run
    assert losses[29] < 0.7 * losses[0]
    assert not any("calls" in path for path in state.trainable)
    assert "loss/size" in jax.eval_shape(loss, model, batch(0, VOCAB, length=LENGTH))[1].sums
    np.testing.assert_array_equal(layers(state.model)[0].calls[...], 0)
    assert np.isfinite(np.asarray(model.embed.w[...])).all()  # the caller's model is still there


def test_it_saves_and_restores_in_another_layout(tmp_path, run):
    """Saved with scanned layers, continued with every layer on its own: the same run."""
    from maxlib.checkpoint import Checkpointer

    abstract = lambda unstacked: jax.eval_shape(lambda: Outside(unstacked=unstacked, rngs=nnx.Rngs(0)))
    model, other, (state, _) = abstract(False), abstract(True), run
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(model)) as saver:
        saver.save(3, {"params": state.trainable, "opt": state.opt_state})
    optimizer = training.adamw(3e-2, mask=training.decay_mask(other))
    fresh = jax.eval_shape(lambda: training.make_state(Outside(unstacked=True, rngs=nnx.Rngs(0)), optimizer))
    with Checkpointer(tmp_path, groupings=nn.tree.groupings(other)) as reader:
        items = reader.restore(like={"params": fresh.trainable, "opt": fresh.opt_state})
    trainable = lambda model: [nn.partition(layer)[0] for layer in model.blocks]
    restored = trainable(nn.combine(jax.device_get(items["params"]), fresh.rest))
    saved = trainable(jax.device_get(state.model))
    for i in range(5):
        jax.tree.map(np.testing.assert_array_equal, restored[i], saved[i])
    mu = lambda opt: {p: v for p, v in opt[1][0].mu.items() if "embed" in p}
    jax.tree.map(np.testing.assert_array_equal, mu(items["opt"]), mu(state.opt_state))


def test_it_generates(run):
    model = run[0].model
    got = inference.generate(model, [[3, 4, 5, 6], [20, 21]], max_new_tokens=6, dtype=jnp.float32)
    assert got == [[7, 8, 9, 10, 11, 12], [22, 23, 24, 25, 26, 27]]


def test_its_loss_on_eight_devices_is_that_of_one(model, run):
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP)
    placed = jax.device_put(model, sharding.shardings(model, layout))
    with sharding.use(layout):
        got = jax.jit(lambda model: loss(model, batch(0, VOCAB, length=LENGTH))[1].sums["nll"])(placed)
    np.testing.assert_allclose(got / (ROWS * LENGTH), run[1][0], rtol=2e-5)


@pytest.mark.full
@pytest.mark.parametrize("rules", ["FSDP_TP", "DP", "FSDP", "TP"])
def test_it_trains_on_eight_devices(rules, run):
    rules = getattr(sharding, rules)
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    layout = sharding.Layout(mesh, rules)
    placed = sharding.init_sharded(lambda: Outside(rngs=nnx.Rngs(0)), layout)
    with sharding.use(layout):
        state, got = trained(placed, batches(3))
    np.testing.assert_allclose(got, run[1][:3], rtol=2e-5)
    for path, place in sharding.shardings(nn.variables(placed), layout).items():
        if path in state.trainable:
            assert state.trainable[path].sharding.is_equivalent_to(place.get_value(), state.trainable[path].ndim)


def test_a_familys_own_attention_answers_too():
    """GPT-2's lies the other way round in memory, and is planned and chosen as any other of its size."""
    sizes = {"vocab": 64, "num_layers": 2, "dim": 16, "mlp_dim": 32, "num_heads": 2}
    small = filled(lambda: gpt2.GPT2(gpt2.Config(**sizes, num_positions=64), rngs=nnx.Rngs(0)))
    chosen = nn.with_attention(small, "chunked")
    assert {layer.attn.implementation for layer in chosen.layers} == {"chunked"}
    assert jax.tree.structure(nn.with_attention(chosen, None)) == jax.tree.structure(small)
    tokens = batch(0, VOCAB, length=LENGTH)["tokens"]
    hidden = jax.jit(lambda model: model(tokens, dtype=jnp.float32).hidden)
    np.testing.assert_allclose(hidden(chosen), hidden(small), atol=1e-5)

    def moved(build, strategy):
        job = plan.Job(build, "h100x4", layout=sharding.Layout({"context": 4}, strategy), sequence=64)
        return {
            collective.kind: collective.bytes
            for collective in plan.estimated(job).costs.collectives
            if collective.axes == ("context",)
        }

    other = llama.Config(**sizes, num_kv_heads=2, head_dim=8, rope=ops.Rope(8))
    ours = moved(lambda: gpt2.GPT2(gpt2.Config(**sizes, num_positions=64), rngs=nnx.Rngs(0)), sharding.CP_RING)
    theirs = moved(lambda: llama.Llama(other, rngs=nnx.Rngs(0)), sharding.CP_RING)
    assert ours["collective-permute"] == theirs["collective-permute"] > 0
