"""Every loss: packed, in microbatches, on meshes and in a 1F1B pipeline, compared with the plain loss."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import nn, sharding, training
from maxlib.post_training._reference import interleaved
from maxlib.training._gradients import bind_options, with_embedding_noise
from maxlib.training._step import means
from tests.post_training.every_loss import (
    ALL,
    EARLY,
    FEW,
    GPIPE,
    ROWS,
    Everything,
    alone,
    batch,
    built,
    check,
    chosen,
    close_sums,
    full,
    gradient,
    halves,
    model,
    run,
    separate,
)
from tests.training import tiny


@chosen
def test_losses_differ_and_have_gradients(names):
    sums = alone(names)[2].sums
    values = {name: float(sums[f"{name}/loss"] / sums[f"{name}/count"]) for name in names}
    assert all(np.isfinite(list(values.values()))) and len({round(v, 5) for v in values.values()}) >= len(names) - 2
    assert sums["sigmoid/count"] == 2 * ROWS - 1 and sums["mis/count"] == 4 * ROWS - 2
    assert sums["dapo/count"] == sums["top_k/count"] == (batch()["targets"] >= 0).sum()


@chosen
def test_packed_is_separate(names):
    """Rows of their own, in pairs of sub-batches where losses compare two."""
    first, second = separate(batch())

    def both(params, rest, data, key):
        def mean(model):
            pairs = interleaved(data)
            inputs = {"segment_ids": pairs["segment_ids"], "dtype": jnp.float32}
            hidden = model(pairs["tokens"], **inputs).hidden
            value, stats = Everything(names).from_hidden(model, hidden, pairs)
            return value / ROWS, stats

        (value, stats), grads = jax.value_and_grad(lambda params: mean(nn.combine(params, rest)), has_aux=True)(params)
        return grads, value, stats

    check(run(both, model(), {"chosen": first, "rejected": second}), alone(names))


MESHES = {
    "fsdp x tensor": ({"fsdp": 4, "tensor": 2}, sharding.FSDP_TP),
    "data x context": ({"data": 2, "context": 4}, sharding.DP | sharding.CP_RING),
    "fsdp": ({"fsdp": 8}, sharding.FSDP),
    "gpipe x fsdp": ({"stage": 4, "fsdp": 2}, sharding.FSDP | GPIPE),
}


@chosen
@pytest.mark.parametrize("mesh", ["fsdp x tensor", full("data x context"), full("fsdp"), full("gpipe x fsdp")])
def test_on_a_mesh_as_on_one_device(mesh, names):
    degrees, rules = MESHES[mesh]
    layout = sharding.Layout(sharding.make_mesh(**degrees), rules)
    spread = jax.device_put(model(), sharding.shardings(model(), layout))
    with sharding.use(layout):
        check(run(gradient(names), spread, batch()), alone(names))


PIPELINES = {
    "data x tensor": ({"stage": 2, "data": 2, "tensor": 2}, sharding.TP | EARLY),
    "fsdp": ({"stage": 4, "fsdp": 2}, sharding.FSDP | EARLY),
}


@pytest.mark.full
@pytest.mark.parametrize("names", [FEW, ALL], ids=["few", "all"])
@pytest.mark.parametrize("mesh", PIPELINES)
def test_in_a_1f1b_pipeline_as_on_one_device(mesh, names):
    degrees, rules = PIPELINES[mesh]
    layout = sharding.Layout(sharding.make_mesh(**degrees), rules)
    spread = jax.device_put(model(), sharding.shardings(model(), layout))
    with sharding.use(layout):
        check(run(gradient(names), spread, batch()), alone(names))


@pytest.mark.full  # by default that of tests/training/test_custom_losses.py
@pytest.mark.parametrize("names", [FEW, ALL], ids=["few", "all"])
def test_microbatches_make_the_whole(names):
    optimizer = optax.sgd(1.0)
    step = training.make_train_step(Everything(names), optimizer, dtype=jnp.float32, microbatches=4)
    step = tiny.jit_step(step)
    state, metrics = jax.device_get(step(training.make_state(model(), optimizer), jax.tree.map(jnp.asarray, batch())))
    want_grads, value, stats = alone(names)
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    close_sums({name: metrics[name] for name in stats.sums}, means(jax.tree.map(jnp.asarray, stats)))
    before = nn.partition(model())[0]
    got = {path: np.asarray(before[path]) - x for path, x in state.trainable.items()}
    for path, want in want_grads.items():  # differences of parameters are rounded at their size
        np.testing.assert_allclose(got[path], want, atol=1e-5 * np.abs(want).max() + 2e-7, err_msg=path)


def test_noise_on_token_vectors_is_drawn_with_the_key():
    data = jax.tree.map(jnp.asarray, halves()["chosen"])

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def values(model, data):
        noisy = bind_options(training.DFT(), dtype=jnp.float32, neftune_alpha=20.0)
        plain = training.DFT()(model, data, dtype=jnp.float32)
        return [noisy(model, data, jax.random.key(seed))[0] for seed in (0, 1, 0)], plain[0]

    (first, second, again), plain = jax.device_get(values(built(), data))
    assert first == again and first != second and first != plain
    with pytest.raises(TypeError, match="needs a model with embed_tokens"):
        bind_options(training.DFT(), neftune_alpha=20.0)(tiny.model(), data, jax.random.key(0))


def test_the_noise_of_a_document_is_the_same_alone_padded_and_packed():
    """±alpha / √(L D), where L counts the document's own tokens."""
    size = lambda length: 20.0 / (length * built().cfg.dim) ** 0.5
    segment_ids = jnp.repeat(jnp.array([1, 2, 0]), jnp.array([5, 9, 2]), total_repeat_length=16)[None]
    layouts = {
        "alone": ({}, [(0, 16)]),
        "padded": ({"valid": jnp.arange(16)[None] < 5}, [(0, 5)]),
        "packed": ({"segment_ids": segment_ids}, [(0, 5), (5, 14)]),
    }

    @jax.jit
    def distances(inputs):
        tokens, noisy = jnp.zeros((1, 16), jnp.int32), with_embedding_noise(built(), jax.random.key(0), 20.0)
        plain, moved = (model.embed_inputs(tokens, dtype=jnp.float32, **inputs)[0] for model in (built(), noisy))
        return jnp.max(jnp.abs(moved - plain), axis=(0, 2))

    for name, (inputs, documents) in layouts.items():
        got = np.asarray(distances(inputs))
        for start, stop in documents:
            largest = size(stop - start)
            assert 0.95 * largest < got[start:stop].max() <= largest * (1 + 1e-5), (name, start)
