"""Losses with a frozen model beside the trained one: a reference or a teacher."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import adapters, nn, quantization, sharding, training
from maxlib import post_training as pt
from maxlib.training._gradients import bind_options
from tests.nn.tiny import filled_llama
from tests.post_training.every_loss import VOCAB, built, check, halves
from tests.training import tiny

preferred = functools.partial(pt.DPO(0.5), dtype=jnp.float32)


def distilled(model, batch, key):
    return pt.Distillation(beta=0.4, temperature=1.5, hard=0.3)(model, batch["chosen"], dtype=jnp.float32)


def labelled(model, batch, key):
    answers = batch["chosen"] | {"desirable": jnp.arange(8) % 2 == 0, "mismatched": batch["rejected"]}
    return pt.KTO()(model, answers, dtype=jnp.float32)


def odds(model, batch, key):
    return pt.ORPO(0.2)(model.trained, batch, dtype=jnp.float32)


@functools.cache
def beside(seed=1):
    """The frozen model has another width."""
    return pt.WithFrozen(built(), filled_llama(seed, num_layers=1, vocab=VOCAB, dim=24))


def test_a_model_beside_itself_is_frozen_as_it_is_now():
    model = tiny.model()
    both = pt.WithFrozen(model, model)
    training.copy_model(both)  # which refuses one parameter at two places
    before = np.asarray(both.frozen.embed.w[...])
    model.embed.w.set_value(model.embed.w[...] + 1)
    np.testing.assert_array_equal(both.frozen.embed.w[...], before)
    np.testing.assert_array_equal(both.trained.embed.w[...], before + 1)


def test_a_reference_moves_towards_the_policy():
    policy, reference = (filled_llama(seed, num_layers=1, vocab=VOCAB) for seed in (0, 1))
    state = training.make_state(pt.WithFrozen(policy, reference), optax.sgd(1.0))
    run = types.SimpleNamespace(state=state, checkpointer=None)
    before = jax.tree.map(np.asarray, run.state.model)
    pt.MovingReference(0.25)(run)
    assert jax.tree.structure(run.state) == jax.tree.structure(state)  # the step donates each array once
    after = run.state.model
    assert jax.tree.structure(after) == jax.tree.structure(before)
    for old, new, p in zip(*map(jax.tree.leaves, (before.frozen, after.frozen, before.trained)), strict=True):
        np.testing.assert_allclose(new, 0.25 * p + 0.75 * old, rtol=1e-6)
    assert all(
        (x == y).all() for x, y in zip(jax.tree.leaves(before.trained), jax.tree.leaves(after.trained), strict=True)
    )
    run.checkpointer = types.SimpleNamespace(base="org/name")
    with pytest.raises(ValueError, match="a moved reference would be lost"):
        pt.MovingReference(0.25)(run)
    other = types.SimpleNamespace(state=training.make_state(beside(), optax.sgd(1.0)))
    with pytest.raises(ValueError, match="two equal architectures"):
        pt.MovingReference()(other)


def taught(loss, spread, data):
    def gradients(params, rest, data):
        f = lambda params: loss(nn.combine(params, rest), data, jax.random.key(0))
        (value, stats), grads = jax.value_and_grad(f, has_aux=True)(params)
        return grads, value, stats

    only = training.trainable_only("trained.*")
    compiled = jax.jit(gradients, compiler_options=tiny.QUICKLY)
    return jax.device_get(compiled(*nn.partition(spread, only), jax.tree.map(jnp.asarray, data)))


def test_the_frozen_model_is_left_alone_without_a_filter():
    """Weight decay needs no gradient, so it would shrink a reference or a teacher that the optimizer sees."""
    both = beside()
    state = training.make_state(both, training.adamw(0.1))
    assert set(state.trainable) == {f"trained.{path}" for path in nn.partition(both.trained)[0]}
    step = jax.jit(training.make_train_step(preferred, training.adamw(0.1)), compiler_options=tiny.QUICKLY)
    state, _ = step(state, halves())
    before, after = nn.variables(beside().frozen), nn.variables(state.model.frozen)
    assert all(np.array_equal(value.get_value(), after[path].get_value()) for path, value in before.items())


def test_beside_a_frozen_model_adapters_are_trained_alone():
    put_on = lambda model: adapters.add(model, adapters.LoRA(2, 4), rngs=nnx.Rngs(0))
    adapted = put_on(built())
    want = {f"trained.{path}" for path in nn.partition(adapted, adapters.trainable)[0]}
    both = pt.WithFrozen(adapted, put_on(built()))
    assert set(training.make_state(pt.WithFrozen(adapted, built()), training.adamw(0.1)).trainable) == want
    assert set(nn.partition(both, nn.tree.default_filter(both))[0]) == want


def test_noise_and_dropout_are_of_the_trained_model_alone():
    """A reference in the batch has neither, so one beside the model must not; and the trained one must have both."""
    both, data, noise = beside(), jax.tree.map(jnp.asarray, halves()), {"dropout": {"mlp": 0.5}, "neftune_alpha": 5.0}
    loss = bind_options(pt.DPO(0.5), dtype=jnp.float32, **noise)
    made = bind_options(pt.DPO(0.5, reference=lambda model: model), dtype=jnp.float32, **noise)

    def stored(model):
        scored = {half: pt.log_probs(model, rows, dtype=jnp.float32).log_prob for half, rows in data.items()}
        return {half: rows | {"reference_log_probs": scored[half]} for half, rows in data.items()}

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def values(both, key):
        of_batch = [loss(both.trained, stored(model), key)[0] for model in (both.frozen, both.trained)]
        return of_batch, [loss(both, data, key)[0], made(both.trained, data, key)[0]]

    (want, got), (other, _) = (values(both, jax.random.key(seed)) for seed in (0, 1))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert all(abs(a - b) > 1e-3 * abs(a) for a, b in zip(want, other, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("loss", [preferred, distilled, labelled, odds])
def test_with_a_frozen_model_on_a_mesh(loss):
    want = taught(loss, beside(), halves())
    assert all(path.startswith("trained.") for path in want[0])
    layout = sharding.Layout(sharding.make_mesh(fsdp=4, tensor=2), sharding.FSDP_TP)
    spread = jax.device_put(beside(), sharding.shardings(beside(), layout))
    with sharding.use(layout):
        check(taught(loss, spread, halves()), want)


def test_a_reference_in_the_batch_is_one_beside_the_model():
    """`add_reference` and `add_teacher` store what `WithFrozen` computes; all tokens as top-k are the divergence."""
    both, data = beside(), jax.tree.map(jnp.asarray, halves())

    class Once(tiny.Loader):
        def __next__(self):
            self.next += 1
            return halves()

    stored = next(pt.add_reference(Once(), both.frozen, dtype=jnp.float32))

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def preferences(both, stored):
        itself = pt.DPO(0.5, reference=lambda model: model)(both.trained, data, dtype=jnp.float32)
        return preferred(both, data), preferred(both.trained, stored), itself

    (want, stats), (got, _), (itself, _) = preferences(both, stored)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(itself / stats.num_targets, np.log(2), rtol=1e-6)
    with pytest.raises(ValueError, match="the reference was scored at temperature 1.0, the loss has 0.5"):
        pt.DPO(temperature=0.5)(both.trained, stored)

    loader = pt.add_teacher(Once(), both.frozen, k=VOCAB, temperature=1.5, dtype=jnp.float32)
    first, state = next(loader)["chosen"], loader.get_state()
    assert state == {"0": {"next": 1}} and first["teacher_ids"].shape == (*data["chosen"]["tokens"].shape, VOCAB)
    divergence = functools.partial(pt.Distillation(temperature=1.5), dtype=jnp.float32)

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def divergences(both, first):
        return divergence(both.trained, first)[0], divergence(both, data["chosen"])[0]

    np.testing.assert_allclose(*divergences(both, first), rtol=1e-4)
    with pytest.raises(ValueError, match="the teacher was scored at temperature 1.5, the loss has 1.0"):
        pt.Distillation()(both.trained, first)


def test_a_teacher_may_be_in_int8():
    teacher = jax.tree.map(lambda x: 4 * x, beside().frozen)  # so that its layers matter
    rounded = jax.jit(lambda model: quantization.for_inference(model, "int8"))(teacher)
    data = jax.tree.map(jnp.asarray, halves())
    loss = jax.jit(lambda both: distilled(both, data, None)[0], compiler_options=tiny.QUICKLY)
    exact, got, want = (
        loss(pt.WithFrozen(beside().trained, teacher))
        for teacher in (teacher, rounded, quantization.full_precision(rounded))
    )
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert abs(exact / want - 1) > 5e-5  # more than the tolerance


def test_a_teacher_may_be_on_another_mesh():
    class Once(tiny.Loader):
        def __next__(self):
            return halves()["chosen"]

    theirs, ours = (
        sharding.Layout(sharding.make_mesh(fsdp=4, devices=devices), sharding.FSDP)
        for devices in (jax.devices()[:4], jax.devices()[4:])
    )
    teacher = beside().frozen
    options = {"k": 4, "dtype": jnp.float32}
    spread = pt.add_teacher(
        Once(), jax.device_put(teacher, sharding.shardings(teacher, theirs)), layout=theirs, **options
    )
    batch = training.shard_batch(next(spread), ours)
    assert all(x.devices() == {*ours.mesh.devices.flat} for x in jax.tree.leaves(batch))
    want = next(pt.add_teacher(Once(), teacher, **options))
    np.testing.assert_array_equal(batch["teacher_ids"], want["teacher_ids"])
    np.testing.assert_allclose(batch["teacher_log_probs"], want["teacher_log_probs"], atol=1e-5)
