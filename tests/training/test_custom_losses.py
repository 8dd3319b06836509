"""Losses defined outside of maxlib: with microbatches, on meshes, in 1F1B pipelines; with a frozen reference."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, sharding, training
from maxlib.training._step import make_gradient
from tests.nn.tiny import tiny_llama
from tests.training import custom_losses, tiny

ROWS, T = 8, 32
GPIPE, EARLY = (sharding.Pipeline(microbatches=4, schedule=schedule) for schedule in ("gpipe", "1f1b"))
LOSSES = {"focal": custom_losses.Focal(gamma=1.5), "pairs in a row": custom_losses.Preferred(beta=0.3)}
REMAT = {"focal": None, "pairs in a row": "full"}


def model():
    """The same weights each time, in arrays that a step may delete."""
    return tiny_llama(num_layers=4, vocab=64)


def batch(seed=0):
    """Rows of two answers of uneven lengths; the last row does not count."""
    rng = np.random.default_rng(seed)
    data = tiny.batch(ROWS, T, vocab=64, seed=seed)
    lengths = np.sort(rng.integers(4, T, (ROWS, 2)))[:, :, None]
    at = np.arange(T)[None, :]
    data["segment_ids"] = np.where(at < lengths[:, 0], 1, np.where(at < lengths[:, 1], 2, 0)).astype(np.int32)
    data["targets"] = np.where(data["segment_ids"] > 0, data["targets"], -1)
    data["reference"] = rng.normal(-4, 0.3, (ROWS, T)).astype(np.float32)
    data["weight"] = np.array([1.0] * (ROWS - 1) + [0.0], np.float32)
    return data


def run(name, spread):
    """The gradient, the mean loss and the statistics, as a step computes them in the active layout."""
    gradient = make_gradient(LOSSES[name], dtype=jnp.float32, remat=REMAT[name])
    compiled = jax.jit(gradient, compiler_options=tiny.QUICKLY)
    return compiled(*nn.partition(spread), batch(), jax.random.key(0))


@functools.cache
def alone(name):
    loss = functools.partial(LOSSES[name], dtype=jnp.float32)
    compiled = jax.jit(tiny.by_autodiff(loss), compiler_options=tiny.QUICKLY)
    return jax.device_get(compiled(*nn.partition(model()), batch(), jax.random.key(0)))


def check(got, want):
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5)
    np.testing.assert_allclose(got[2].num_targets, want[2].num_targets)
    assert got[2].sums.keys() == want[2].sums.keys()
    for name, value in want[2].sums.items():
        np.testing.assert_allclose(got[2].sums[name], value, rtol=1e-5, err_msg=name)
    assert got[0].keys() == want[0].keys()
    for path, gradient in want[0].items():
        np.testing.assert_allclose(got[0][path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)


@functools.cache
def logits_alone():
    run = jax.jit(lambda m, tokens, ids: m.logits(m(tokens, segment_ids=ids, dtype=jnp.float32).hidden))
    return np.asarray(run(model(), batch()["tokens"], batch()["segment_ids"]), np.float64)


@pytest.mark.parametrize("name", LOSSES)
def test_an_outside_loss_is_its_formula(name):
    data, logits = batch(), logits_alone()
    counts, index = data["targets"] >= 0, np.maximum(data["targets"], 0)[..., None]

    def log_prob(temperature):
        z = logits / temperature
        return np.take_along_axis(z - np.log(np.exp(z).sum(-1, keepdims=True)), index, -1)[..., 0]

    if name == "focal":
        want = np.sum((-((1 - np.exp(log_prob(1.0))) ** 1.5) * log_prob(1.0))[counts]) / counts.sum()
    else:
        ratio = np.where(counts, log_prob(0.8) - data["reference"], 0)
        chosen, rejected = ((ratio * (data["segment_ids"] == segment)).sum(1) for segment in (1, 2))
        want = np.log1p(np.exp(-0.3 * (chosen - rejected)))[:-1].mean()
    np.testing.assert_allclose(alone(name)[1], want, rtol=1e-5)


def few(chosen, *all_of):
    """All combinations; those other than `chosen` are marked `full`."""
    product = set(itertools.product(*all_of))
    assert product.issuperset(chosen)
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.full) for case in sorted(product - set(chosen)))]


MESHES = {
    "fsdp x tensor": ({"fsdp": 4, "tensor": 2}, sharding.FSDP_TP),
    "data x context": ({"data": 2, "context": 4}, sharding.DP | sharding.CP_RING),
    "gpipe x fsdp": ({"stage": 4, "fsdp": 2}, sharding.FSDP | GPIPE),
}


# tests/post_training/test_losses.py has others on a mesh by default.
@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), list(itertools.product(LOSSES, MESHES)))
def test_on_a_mesh_as_on_one_device(name, mesh):
    degrees, rules = MESHES[mesh]
    layout = sharding.Layout(sharding.make_mesh(**degrees), rules)
    spread = jax.device_put(model(), sharding.shardings(model(), layout))
    with sharding.use(layout):
        check(run(name, spread), alone(name))


PIPELINES = {
    "alone": ({"stage": 2}, sharding.DP | EARLY),
    "fsdp": ({"stage": 4, "fsdp": 2}, sharding.FSDP | EARLY),
    "data x tensor": ({"stage": 2, "data": 2, "tensor": 2}, sharding.TP | EARLY),
}


@pytest.mark.full
@pytest.mark.parametrize(("name", "mesh"), few([("focal", "alone")], LOSSES, PIPELINES))
def test_in_a_1f1b_pipeline_as_on_one_device(name, mesh):
    degrees, rules = PIPELINES[mesh]
    mesh = sharding.make_mesh(**degrees, devices=jax.devices()[: math.prod(degrees.values())])
    layout = sharding.Layout(mesh, rules)
    spread = jax.device_put(model(), sharding.shardings(model(), layout))
    with sharding.use(layout):
        check(run(name, spread), alone(name))


@pytest.mark.parametrize("name", [pytest.param("focal", marks=pytest.mark.full), "pairs in a row"])
def test_microbatches_make_the_whole(name):
    """A step of plain gradient descent at the rate 1 takes the gradient of the whole batch from the weights."""
    optimizer = optax.sgd(1.0)
    step = training.make_train_step(LOSSES[name], optimizer, dtype=jnp.float32, remat=REMAT[name], microbatches=4)
    step = tiny.jit_step(step)
    state = training.make_state(model(), optimizer)
    before, (gradients, loss, stats) = jax.device_get((state.trainable, alone(name)))
    state, metrics = jax.device_get(step(state, batch()))
    norm = np.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values()))
    means = {key: value / stats.num_targets for key, value in stats.sums.items()}
    for key, value in (means | {"loss": loss, "grad_norm": norm, "num_targets": stats.num_targets}).items():
        np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)
    for path, value in before.items():
        want = value - gradients[path]
        np.testing.assert_allclose(state.trainable[path], want, atol=1e-5 * np.abs(want).max(), err_msg=path)


class WithReference(nnx.Module):
    """Two models in one: the trained one and its reference."""

    def __init__(self, policy, reference):
        self.policy, self.reference = policy, reference


def against_reference(model, batch, key):
    """`preferred` with the reference computed on the way, not found in the batch."""
    frozen = model.reference(batch["tokens"], segment_ids=batch["segment_ids"], dtype=jnp.float32)
    head = model.reference.head_weight()
    scores = nn.token_log_probs(frozen.hidden, head, batch["targets"], temperature=0.8)
    loss = LOSSES["pairs in a row"]
    return loss(model.policy, batch | {"reference": scores.log_prob}, key, dtype=jnp.float32, remat="full")


class Pairs(tiny.Loader):
    def __next__(self):
        super().__next__()
        return batch(self.next)


@pytest.mark.full
@pytest.mark.parametrize("mesh", [None, {"fsdp": 8}])
def test_a_frozen_reference_beside_the_policy_trains_as_one_in_the_batch(mesh, monkeypatch):
    monkeypatch.setattr("maxlib.training._trainer.jit_step", tiny.jit_step)
    score = jax.jit(lambda m, b: against_scores(m, b), compiler_options=tiny.QUICKLY)

    class Referenced(Pairs):
        def __next__(self):
            data = super().__next__()
            return data | {"reference": np.asarray(score(model(), data))}

    layout = None if mesh is None else sharding.Layout(sharding.make_mesh(**mesh), sharding.FSDP)
    options = {"optimizer": optax.sgd(0.3), "layout": layout}
    both = WithReference(model(), model())
    frozen = training.Trainer(
        both, loader=Pairs(), loss=against_reference, filter=training.trainable_only("policy.*"), **options
    )
    loss = LOSSES["pairs in a row"]
    stored = training.Trainer(model(), loader=Referenced(), loss=loss, dtype=jnp.float32, remat="full", **options)
    first, _ = frozen.fit(1), stored.fit(1)
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)  # the policy is the reference
    assert first["grad_norm"] > 1e-2
    last, want = frozen.fit(3), stored.fit(3)
    assert last["loss"] == pytest.approx(want["loss"], rel=1e-5)
    assert last["margin"] == pytest.approx(want["margin"], abs=1e-6)  # of sums near -50, which float32 holds to 4e-6
    assert all(path.startswith("policy.") for path in frozen.state.trainable)
    jax.tree.map(np.testing.assert_array_equal, frozen.model.reference, model())
    for path, value in stored.state.trainable.items():
        np.testing.assert_allclose(frozen.state.trainable[f"policy.{path}"], value, atol=1e-5, err_msg=path)


def against_scores(model, batch):
    """Log-probabilities of the targets, for `referenced` batches."""
    out = model(batch["tokens"], segment_ids=batch["segment_ids"], dtype=jnp.float32)
    return nn.token_log_probs(out.hidden, model.head_weight(), batch["targets"], temperature=0.8).log_prob


@pytest.mark.full
def test_a_plain_loss_may_run_the_model_twice_on_nested_batches():
    """Chosen and rejected answers in arrays of their own: microbatches and meshes divide both alike."""
    data = {half: tiny.batch(ROWS, 12, seed=seed) for seed, half in enumerate(("chosen", "rejected"))}
    optimizer = optax.sgd(1.0)

    def step(layout=None, microbatches=1):
        run = tiny.jit_step(training.make_train_step(custom_losses.contrast, optimizer, microbatches=microbatches))
        state = training.make_state(training.copy_model(tiny.model(), layout), optimizer)
        return jax.device_get(run(state, training.shard_batch(data, layout)))

    at_once, metrics = step()
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, devices=jax.devices()[:4]), sharding.FSDP)
    with sharding.use(layout):
        spread = step(layout, microbatches=2)
    assert metrics["num_targets"] == ROWS
    for name in ("loss", "margin", "grad_norm"):
        np.testing.assert_allclose(spread[1][name], metrics[name], rtol=1e-5)
    for path, value in at_once.trainable.items():
        np.testing.assert_allclose(spread[0].trainable[path], value, atol=1e-5 * np.abs(value).max(), err_msg=path)


class CountsHidden(training.Loss):
    def from_hidden(self, model, hidden, batch):
        return jnp.sum(hidden), training.Stats(jnp.sum(hidden), {})


class Scaled(training.Loss):
    """Reads what it has added to the batch itself."""

    def prepare(self, model, batch, *, dtype, remat):
        assert (dtype, remat) == (jnp.float32, None)
        return model, batch | {"factor": 3.0}

    def from_hidden(self, model, hidden, batch):
        return jnp.asarray(batch["factor"]), training.Stats(jnp.ones(()), {})


def test_what_a_pipeline_cannot_divide_is_refused():
    mesh = sharding.make_mesh(stage=2, devices=jax.devices()[:2])
    arguments = (*nn.partition(jax.eval_shape(model)), batch(), jax.random.key(0))
    trace = lambda loss, **options: jax.eval_shape(make_gradient(loss, dtype=jnp.float32, **options), *arguments)
    with sharding.use(sharding.Layout(mesh, sharding.DP | EARLY)):
        with pytest.raises(TypeError, match="a subclass of training.Loss"):
            trace(custom_losses.contrast)
        with pytest.raises(ValueError, match="num_targets must be a function of the batch alone"):
            trace(CountsHidden())
        with pytest.raises(ValueError, match="compares with a second model"):
            trace(Scaled())
        with pytest.raises(ValueError, match="microbatches=2 cannot be combined with a 1F1B pipeline"):
            trace(training.NextToken(), microbatches=2)
        arguments[2]["lengths"] = np.zeros(3, np.int32)
        with pytest.raises(ValueError, match=r"8 rows of tokens, .* lengths \(3,\)"):
            trace(training.NextToken())


def test_a_loss_may_prepare_its_model_and_batch():
    loss = jax.jit(functools.partial(Scaled(), dtype=jnp.float32))
    assert float(loss(model(), batch())[0]) == 3.0


def test_a_loss_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match=r"such as training.NextToken\(\), got"):
        training.make_train_step(training.NextToken, optax.sgd(1.0))
    with pytest.raises(TypeError, match="remat.*does not take"):
        training.make_train_step(lambda model, batch, key: None, optax.sgd(1.0), remat="full")
    with pytest.raises(NotImplementedError, match="Loss must define from_hidden"):
        jax.eval_shape(training.Loss(), model(), batch())
