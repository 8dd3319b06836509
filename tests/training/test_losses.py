"""The loss of language models against its formula."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, sharding, training
from tests.outside import outside
from tests.training import tiny

SGD = optax.sgd(0.1)


@jax.jit
def _logits(model, tokens):
    return model.logits(model(tokens, dtype=jnp.float32).hidden)


def test_sums_over_targets_with_everything_on():
    model, batch = tiny.model(), jax.tree.map(jnp.asarray, tiny.batch(4, uneven=True))
    logits = np.asarray(_logits(model, batch["tokens"]), np.float64)
    lse = np.log(np.exp(logits).sum(-1))
    targets = np.asarray(batch["targets"])
    log_prob = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0] - lse
    smooth = lse - logits.mean(-1)
    counts = targets >= 0
    want = np.sum((0.9 * -log_prob + 0.1 * smooth + 1e-2 * lse**2)[counts])

    loss = training.NextToken(z_loss=1e-2, label_smoothing=0.1)
    value, stats = jax.jit(functools.partial(loss, dtype=jnp.float32))(model, batch)
    assert float(value) == pytest.approx(want, rel=1e-5)
    assert float(stats.sums["nll"]) == pytest.approx(-log_prob[counts].sum(), rel=1e-5)
    assert float(stats.sums["accuracy"]) == (logits.argmax(-1) == targets)[counts].sum()
    assert float(stats.num_targets) == counts.sum()


def _weighted():
    batch = jax.tree.map(jnp.asarray, tiny.batch(4, uneven=True))
    weights = np.random.default_rng(1).uniform(0, 3, batch["targets"].shape).astype(np.float32)
    weights[2, :4] = 0
    return batch, weights


def test_weights_of_targets_make_a_weighted_mean():
    model, (batch, weights) = tiny.model(), _weighted()
    logits = np.asarray(_logits(model, batch["tokens"]), np.float64)
    targets = np.asarray(batch["targets"])
    log_prob = np.take_along_axis(logits, np.maximum(targets, 0)[..., None], -1)[..., 0]
    nll, learned = np.log(np.exp(logits).sum(-1)) - log_prob, targets >= 0
    metrics = []
    for microbatches in (1, 2):
        step = training.make_train_step(training.NextToken(), SGD, dtype=jnp.float32, microbatches=microbatches)
        weighted = batch | {"loss_weights": weights}
        state, values = jax.jit(step, compiler_options=tiny.QUICKLY)(training.make_state(tiny.model(), SGD), weighted)
        metrics.append((state.trainable, values))
    for _, values in metrics:
        assert float(values["loss"]) == pytest.approx(
            np.sum((weights * nll)[learned]) / weights[learned].sum(), rel=1e-5
        )
        assert float(values["num_targets"]) == pytest.approx(weights[learned].sum(), rel=1e-6)
        assert float(values["nll"]) == pytest.approx(nll[learned].mean(), rel=1e-5)  # of the targets, unweighted
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), *(m[0] for m in metrics))


def test_a_weight_of_two_is_the_target_twice():
    model, (batch, _) = tiny.model(), _weighted()
    loss = jax.jit(functools.partial(training.NextToken(), dtype=jnp.float32))
    twice = {name: np.concatenate([x, x[1:2]]) for name, x in batch.items()}
    weights = np.ones(batch["targets"].shape, np.float32)
    weights[1] = 2
    value, stats = loss(model, batch | {"loss_weights": weights})
    wanted, counted = loss(model, twice)
    assert float(value / stats.num_targets) == pytest.approx(float(wanted / counted.num_targets), rel=1e-6)


def test_other_names_of_weights_are_errors():
    with pytest.raises(ValueError, match=r"reads batch\['loss_weights'\], got 'token_weights': rename it"):
        training.NextToken().check_names(tiny.batch() | {"token_weights": 1})


@pytest.mark.parametrize("loss", [training.NextToken(), training.DFT()])
def test_targets_of_minus_100_are_not_learned_and_not_counted(loss):
    """The count of targets, and with it the mean, agrees with what is summed."""
    model, batch = tiny.model(), jax.tree.map(jnp.asarray, tiny.batch(uneven=True))
    theirs = batch | {"targets": jnp.where(batch["targets"] < 0, -100, batch["targets"])}
    both = jax.jit(jax.value_and_grad(functools.partial(loss, dtype=jnp.float32), has_aux=True))
    jax.tree.map(np.testing.assert_array_equal, both(model, theirs), both(model, batch))


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split vocabulary"])
def test_the_loss_of_ids_outside_the_vocabulary_is_nan(split):
    """A later batch is seen by nobody but the step, where an id from the table's end would train in silence."""
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP) if split else None
    with sharding.use(layout) if split else contextlib.nullcontext():
        model = tiny.model()
        model = jax.device_put(model, sharding.shardings(model, layout)) if split else model
        if split:
            assert layout.axis_size("vocab") > 1
        run = jax.jit(lambda batch: tiny.loss(model, batch)[0], compiler_options=tiny.QUICKLY)
        batch = tiny.batch(8)
        assert np.isfinite(run(batch))
        for name, bad in itertools.product(("tokens", "targets"), (tiny.VOCAB, -2, 10**6)):
            ids = batch[name].copy()
            ids[3, 1] = bad
            assert np.isnan(run(batch | {name: ids})), (name, bad)
        ids = batch["tokens"].copy()
        ids[3, 1] = -1  # a target without a loss, but no token
        assert np.isnan(run(batch | {"tokens": ids}))


@pytest.mark.full
def test_a_model_from_outside_adds_losses_of_its_own():
    """Its integer leaf is no business of the gradient; documents reach its masks."""
    model, batch = outside(), jax.tree.map(jnp.asarray, tiny.batch(2, vocab=48))
    batch["segment_ids"] = jnp.repeat(jnp.array([[1, 2, 0]]), 4, axis=1).repeat(2, axis=0)
    params, rest = nn.partition(model)

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def both(params):
        f = lambda params: tiny.loss(nn.combine(params, rest), batch)
        out = nn.combine(params, rest)(batch["tokens"], segment_ids=batch["segment_ids"], dtype=jnp.float32)
        return jax.value_and_grad(f, has_aux=True)(params), out.aux

    ((value, stats), grads), aux = both(params)
    extra = float(jnp.sum(aux["loss/size"]))
    assert extra > 0
    assert float((value - stats.sums["nll"]) / stats.num_targets) == pytest.approx(extra, rel=1e-3)
    np.testing.assert_allclose(stats.sums["size"] / stats.num_targets, aux["size"], rtol=1e-5)
    assert stats.sums["size"].shape == (5,)
    assert grads.keys() == params.keys() and not any("calls" in path for path in params)


@pytest.mark.parametrize(
    "degrees", [pytest.param(dict(fsdp=8), marks=pytest.mark.full), dict(data=2, fsdp=2, tensor=2)]
)
def test_few_rows_travel_to_a_large_head_and_lookups_leave_the_table(degrees):
    V, D = 512, 16
    embed = nn.Embed(V, D, rngs=nnx.Rngs(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, V, (8, 5)), jnp.int32)

    def loss(embed, ids):
        hidden = embed(ids[:, :-1], dtype=jnp.float32)
        return nn.cross_entropy(hidden, embed.w[...], ids[:, 1:])[0]

    want, want_grad = jax.jit(jax.value_and_grad(loss), compiler_options=tiny.QUICKLY)(embed, ids)
    mesh = sharding.make_mesh(**degrees)
    layout = sharding.Layout(mesh, sharding.FSDP_TP)
    places = sharding.shardings(embed, layout)
    with sharding.use(layout):
        gradient = jax.jit(jax.value_and_grad(loss), in_shardings=(places, None), out_shardings=(None, places))
        compiled = gradient.lower(embed, ids).compile(compiler_options=tiny.QUICKLY)
    got, got_grad = compiled(jax.device_put(embed, places), ids)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(got_grad.w[...], want_grad.w[...], atol=1e-5)
    assert f"f32[{V},{D}]" not in compiled.as_text()  # neither the table nor its gradient is ever whole
