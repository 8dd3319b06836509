"""The training step moves the biases of trained routers as the paper says, however the batch is divided."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, checkpoint, nn, sharding, training
from maxlib import post_training as pt
from maxlib.models import deepseek
from maxlib.ops import Rope
from tests.nn.tiny import filled
from tests.training import tiny

E, RATE = 4, 1e-3
SGD = optax.sgd(0.1)
PP = sharding.Pipeline("stage", microbatches=4)


class Layer(nnx.Module):
    """An MLP of experts, whose router begins so uneven that every step has some to move."""

    def __init__(self, *, rngs: nnx.Rngs):
        router = nn.Router(16, E, top_k=2, score=jax.nn.sigmoid, expert_bias=True, rngs=rngs)
        self.norm, self.moe = nn.RMSNorm(16), nn.MoE(16, 8, router=router, rngs=rngs)

    def __call__(self, x: Any, ctx: Any, cache: Any):
        y, aux = self.moe(self.norm(x), ctx)
        return x + y, cache, aux


class Mixture(tiny.Bigram):
    """Routing without attention: a token's experts depend on nothing but the token."""

    def __init__(self, kinds: str | int = "abb", *, rngs: nnx.Rngs):
        super().__init__(rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Layer(rngs=rngs), kinds, rngs=rngs)

    def __call__(self, tokens, *, positions=None, segment_ids=None, valid=None, cache=None, dtype=None, remat=None):
        ctx = nn.make_context(*tokens.shape, valid=valid)
        x, _, aux = self.layers(self.embed(tokens, dtype=dtype), ctx, remat=remat)
        return nn.Output(x, None, aux)


def mixture(kinds: str | int = "abb"):
    return filled(lambda: Mixture(kinds, rngs=nnx.Rngs(0)))


def padded(rows=8, length=12):
    """Rows of other lengths, and other numbers of targets: in microbatches neither are alike."""
    data = tiny.batch(rows, length)
    data["valid"] = np.arange(length)[None] < 1 + np.arange(rows)[:, None]
    data["targets"][:, ::3] = -1
    data["targets"][: rows // 2] = -1
    return data


def biases(model):
    """`L E`, layer by layer."""
    return np.stack([np.asarray(model.layers[i].moe.router.expert_bias[...]) for i in range(len(model.layers))])


def after_a_step(model, data, *, loss=tiny.loss, filter=None, optimizer=SGD, **options):
    state = training.make_state(model, optimizer, filter=filter)
    step = jax.jit(training.make_train_step(loss, optimizer, **options), compiler_options=tiny.QUICKLY)
    return step(state, data)


@jax.jit
def reported(model, tokens, valid):
    return model(tokens, valid=valid, dtype=jnp.float32).aux


def by_hand(model, data, rate=RATE):
    """Of the definition: counts of real tokens, and the sign of what is missing to the mean."""
    aux = reported(model, data["tokens"], data["valid"])
    counts = np.asarray(aux["moe/load"], np.float64) * np.sum(data["valid"]) * 2
    counts = np.round(counts)
    return rate * np.sign(counts.mean(axis=1, keepdims=True) - counts)


@pytest.mark.parametrize("microbatches", [pytest.param(1, marks=pytest.mark.full), 4])
def test_a_step_moves_the_biases_as_the_paper_says(microbatches):
    """Microbatches move what the whole batch moves."""
    model, data = mixture(), padded()
    want = by_hand(model, data)
    assert len(set(want.ravel())) > 1
    state, metrics = after_a_step(model, data, microbatches=microbatches)
    np.testing.assert_allclose(biases(state.model), want, atol=1e-9)
    assert metrics["moe/load"].shape == (3, E) and "moe/counts" not in metrics


@pytest.mark.full
def test_on_a_mesh_as_on_one_device():
    model, data = mixture(), padded()
    want = by_hand(model, data)
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=4), sharding.FSDP)
    with sharding.use(layout):
        state, _ = after_a_step(training.copy_model(model, layout), data)
    np.testing.assert_allclose(biases(state.model), want, atol=1e-9)


def test_routers_that_are_not_trained_stay():
    state, _ = after_a_step(mixture(1), padded(), filter=training.trainable_only("layers.moe.up.*"))
    assert not biases(state.model).any()


@pytest.mark.full
def test_routers_under_adapters_stay():
    adapted = adapters.add(mixture(), adapters.LoRA(2, 4), rngs=nnx.Rngs(0))
    state, _ = after_a_step(adapted, padded())
    assert not biases(state.model).any()


@pytest.mark.full
def test_routers_of_what_is_frozen_stay():
    model, data = mixture(), padded()
    loss = lambda model, batch, key: tiny.loss(model.trained, batch, key)
    state, _ = after_a_step(pt.WithFrozen(model, model), data, loss=loss, microbatches=2)
    np.testing.assert_allclose(biases(state.model.trained), by_hand(model, data), atol=1e-9)
    assert not biases(state.model.frozen).any()


@pytest.mark.full
def test_a_skipped_step_moves_nothing():
    """Its gradient is not finite, and the state stays as it was."""
    model, data = mixture(), padded()
    bad = lambda model, batch, key: (lambda loss, stats: (loss * jnp.nan, stats))(*tiny.loss(model, batch, key))
    state, metrics = after_a_step(model, data, loss=bad, optimizer=training.skip_spikes(SGD))
    assert metrics["skipped"] and not biases(state.model).any()


def test_a_loss_without_counts_is_said():
    """A function of its own that drops what the layers report."""
    loss = lambda model, batch, key: (lambda loss, stats: (loss, training.Stats(stats.num_targets, {})))(
        *tiny.loss(model, batch, key)
    )
    with pytest.warns(
        UserWarning, match=r"3 expert biases of trained routers.*reports none.*router_bias_update_rate=0"
    ):
        jax.eval_shape(training.make_train_step(loss, SGD), training.make_state(mixture(), SGD), padded())
    step = training.make_train_step(loss, SGD, router_bias_update_rate=0)
    jax.eval_shape(step, training.make_state(mixture(), SGD), padded())  # a warning would be an error


@pytest.mark.full
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch):
    """Bit for bit, biases too."""
    tiny.share_steps(monkeypatch)
    make = lambda name, **options: training.Trainer(
        mixture,
        SGD,
        tiny.Loader(),
        loss=tiny.loss,
        checkpointer=checkpoint.Checkpointer(tmp_path / name, every=2),
        router_bias_update_rate=0.01,
    )
    uninterrupted, first = make("whole"), make("run")
    uninterrupted.fit(4)
    first.fit(2)
    second = make("run")
    second.fit(4)
    assert np.array_equal(biases(uninterrupted.model), biases(second.model)) and biases(uninterrupted.model).any()
    np.testing.assert_allclose(biases(first.model) / 0.01, np.round(biases(first.model) / 0.01), atol=1e-5)
    for path, value in uninterrupted.state.trainable.items():
        np.testing.assert_array_equal(value, second.state.trainable[path])


def latent(kinds):
    """A dense layer, then those with experts, in a decoder that pipelines take."""
    size = {"vocab": 64, "num_layers": len(kinds), "num_dense": 1, "dim": 32, "mlp_dim": 48, "expert_dim": 24}
    of_heads = {"num_heads": 4, "q_rank": 16, "kv_rank": 16, "nope_dim": 8, "v_dim": 8, "rope": Rope(4)}
    routing = {"num_experts": E, "num_shared": 1, "top_k": 2, "renormalize": True}
    model = deepseek.DeepSeek(deepseek.Config(version=3, **size, **of_heads, **routing), rngs=nnx.Rngs(0))
    model.layers = model.layers.restacked(kinds)
    return model


@pytest.mark.full
@pytest.mark.parametrize(("kinds", "repeats"), [("dmmmm", 2), ("dababcc", 1)], ids=["around", "layers after it"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_in_a_pipeline_as_on_one_device(schedule, kinds, repeats):
    """Layers before, in and after the pipeline report in the order of layers."""
    model, data = (jax.jit(lambda: latent(kinds))(), padded() | {"tokens": tiny.batch(8, 12, vocab=64)["tokens"]})
    want, metrics = after_a_step(model, data)
    of = lambda state: {
        path: np.asarray(v.get_value()) for path, v in nn.variables(state.model).items() if "_bias" in path
    }
    mesh = sharding.make_mesh(stage=2, data=2, devices=jax.devices()[:4])
    layout = sharding.Layout(mesh, sharding.DP | sharding.Pipeline("stage", 4, repeats, schedule))
    with sharding.use(layout):
        spread = training.copy_model(model, layout)
        got, reported = after_a_step(spread, data, loss=training.NextToken(), dtype=jnp.float32)
    assert of(want).keys() == of(got).keys() and any(v.any() for v in of(want).values())
    for path, value in of(want).items():
        np.testing.assert_allclose(of(got)[path], value, atol=1e-9, err_msg=path)
    assert reported["moe/load"].shape == metrics["moe/load"].shape
