"""One training step: against plain autodiff, against microbatches, and on every mesh."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxlib import nn, post_training, sharding, training
from maxlib.training import _step
from tests.training import tiny

MESHES = {
    "DP": {"data": 8},
    "FSDP": {"fsdp": 8},
    "TP": {"data": 4, "tensor": 2},
    "FSDP_TP": {"data": 2, "fsdp": 2, "tensor": 2},
}


SGD = optax.sgd(0.5, momentum=0.9)  # compiles in half of AdamW's time, and does not hide the gradient's size


def steps(model, batch, *, count=2, loss=tiny.loss, optimizer=SGD, **options):
    state = training.make_state(model, optimizer)
    step = tiny.jit_step(training.make_train_step(loss, optimizer, **options))
    for _ in range(count):
        state, metrics = step(state, batch)
    return state, metrics


def test_steps_and_evaluation_are_traced_once():
    step = chex.assert_max_traces(training.make_train_step(tiny.loss, SGD), n=1)
    evaluate = chex.assert_max_traces(training.make_eval_step(tiny.loss), n=1)
    step, evaluate = tiny.jit_step(step), jax.jit(evaluate, compiler_options=tiny.QUICKLY)
    state = training.make_state(tiny.model(), SGD)
    for seed in range(3):
        state, _ = step(state, tiny.batch(seed=seed))
        evaluate(state, tiny.batch(seed=seed))
    assert state.step == 3


def close(a, b, *, rtol=2e-4):
    for path in a:
        scale = np.abs(np.asarray(a[path])).max()
        np.testing.assert_allclose(a[path], b[path], atol=rtol * scale, rtol=0, err_msg=path)


@functools.cache
def reference():
    """Two steps on one device in one piece."""
    return steps(tiny.model(), tiny.batch(uneven=True))


@functools.cache
def accumulated():
    return steps(tiny.model(), tiny.batch(uneven=True), microbatches=4)


def test_a_misspelt_name_in_remat_is_refused():
    """It would keep nothing, so the step would recompute what it was told to keep."""

    def trace(model, remat, loss=training.NextToken(), batch=tiny.batch()):
        step = training.make_train_step(loss, SGD, dtype=jnp.float32, remat=remat)
        jax.eval_shape(step, jax.eval_shape(lambda: training.make_state(model(), SGD)), batch)

    for remat in (("attention_output",), {"attention_output": "keep", "q": "keep"}):
        with pytest.raises(ValueError, match="names 'attention_output', .*: did you mean 'attention_out'"):
            trace(tiny.llama, remat)
    trace(tiny.llama, ("attention_out", "latent"))  # which its layers do not have
    trace(Marking, ("own",))
    with pytest.raises(ValueError, match="names 'owm', .* mark own: did you mean 'own'"):
        trace(Marking, ("owm",))
    with pytest.raises(ValueError, match="names 'owm', .* mark own: did you mean 'own'"):
        trace(Marking, ("owm",), post_training.SimPO(), {"chosen": tiny.batch(), "rejected": tiny.batch()})


def test_a_metric_of_a_loss_cannot_replace_the_steps_own():
    def loss(model, batch, key):
        value, stats = tiny.loss(model, batch)
        return value, training.Stats(stats.num_targets, {"finite": value, "loss": value})

    state = jax.eval_shape(lambda: training.make_state(tiny.model(), SGD))
    for step in (training.make_train_step(loss, SGD), training.make_eval_step(loss)):
        with pytest.raises(ValueError, match="the step itself reports finite, loss"):
            jax.eval_shape(step, state, tiny.batch())


def test_weights_that_sum_to_less_than_one_do_not_shrink_the_step():
    def loss(model, batch, key):
        value, stats = tiny.loss(model, batch)
        return value / 1000, training.Stats(stats.num_targets / 1000, {"value": value / 1000})

    _, want = accumulated()
    _, got = steps(tiny.model(), tiny.batch(uneven=True), loss=loss, microbatches=4)
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=1e-5)
    np.testing.assert_allclose([got["loss"], got["value"]], [want["loss"]] * 2, rtol=1e-5)


class Marking(tiny.Bigram):
    """A model whose layers mark an intermediate of their own."""

    def __init__(self):
        super().__init__(rngs=nnx.Rngs(0))
        make = lambda _, rngs: MarkingLayer(rngs=rngs)
        self.layers = nn.Stack(make, 2, rngs=nnx.Rngs(0))


class MarkingLayer(nnx.Module):
    def __init__(self, *, rngs):
        self.scale = nnx.Param(jnp.ones(16), axes=("embed",))

    def __call__(self, x, ctx, cache):
        return jnp.sin(checkpoint_name(jnp.sin(x * self.scale[...][None, None]), "own")), cache, {}


def test_a_step_is_plain_autodiff_and_optax():
    model, batch = tiny.model(), tiny.batch(uneven=True)
    optimizer = tiny.optimizer(model)
    params, rest = nn.partition(model)

    @functools.partial(jax.jit, compiler_options=tiny.QUICKLY)
    def by_hand(params):
        loss, grads = jax.value_and_grad(mean_loss)(params)
        updates, _ = optimizer.update(grads, optimizer.init(params), params)
        return loss, optax.tree.norm(grads), optax.apply_updates(params, updates)

    def mean_loss(params):
        model = nn.combine(params, rest)
        hidden = model(jnp.asarray(batch["tokens"]), dtype=jnp.float32).hidden
        logits = hidden @ model.head_weight().T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["targets"], 0))
        return jnp.sum(losses * (batch["targets"] >= 0)) / jnp.sum(batch["targets"] >= 0)

    loss, norm, want = by_hand(params)
    state, metrics = steps(model, batch, count=1, optimizer=optimizer)
    close(want, state.trainable)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-4)
    assert metrics["num_targets"] == (batch["targets"] >= 0).sum()
    assert metrics["finite"] and state.step == 1


def test_accumulation_is_the_big_batch():
    """Microbatches have different numbers of targets, one none at all."""
    state, metrics = accumulated()
    want, want_metrics = reference()
    close(want.trainable, state.trainable)
    for name in want_metrics:
        assert float(metrics[name]) == pytest.approx(float(want_metrics[name]), rel=1e-4), name


def test_a_split_model_outside_of_its_layout_is_a_warning():
    layout = sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP)
    model = placed(tiny.model(), layout)
    with pytest.warns(
        UserWarning, match=r"such as .*, are split over devices, but no layout .*with sharding.use\(layout\)"
    ):
        training.make_state(model, SGD)
    with sharding.use(layout):
        training.make_state(model, SGD)  # a warning would be an error


def test_tokens_are_counted_without_padding_in_batches_of_batches():
    """Targets are others: pairs, or the answers of chats."""
    padded = tiny.batch(4, 6) | {"segment_ids": np.repeat([[1, 1, 2, 2, 0, 0]], 4, axis=0)}
    valid = tiny.batch(2, 6) | {"valid": np.arange(6) < np.array([[5], [2]])}
    for batch, want in ((tiny.batch(4, 6), 24), (padded, 16), ({"chosen": padded, "rejected": valid}, 16 + 7)):
        assert int(_step.num_tokens(batch)) == want
    metrics = reference()[1]
    assert metrics["num_tokens"] == 96 > metrics["num_targets"]


def test_accumulation_must_divide_the_batch():
    with pytest.raises(ValueError, match="3 microbatches must divide the batch's 8 rows"):
        steps(tiny.model(), tiny.batch(), microbatches=3)


def test_images_by_themselves_are_not_cut_as_if_they_were_rows():
    """Two for each row: every second image belongs to another row than every second row."""
    images = np.zeros((16, 3, 4, 4), np.float32)
    with pytest.raises(
        ValueError,
        match=r"split a batch by its 8 rows of tokens, .* images \(16, 3, 4, 4\)\. Store them by row; images",
    ):
        steps(tiny.model(), tiny.batch() | {"images": images}, microbatches=2)


@pytest.mark.parametrize(
    ("rules", "mesh", "sizes", "words"),
    [
        ("fsdp", {"fsdp": 8}, (6, 12), r"its 6 rows must be a multiple of 8, .* over \{'fsdp': 8\}; change the batch"),
        ("fsdp", {"data": 2, "fsdp": 2}, (8, 12, 4), r"its 8 rows must be a multiple of 16, .*, times 4 microbatches"),
        ("fsdp+cp_ring", {"context": 8}, (8, 33), r"its 33 tokens must be a multiple of 8, because the rule 'seq'"),
        ("tp_sp", {"tensor": 8}, (8, 33), r"its 33 tokens must be a multiple of 8, because the rule 'seq'"),
        ("dp+pp:2", {"data": 2, "stage": 2}, (6, 12), None),  # of which stages share rows only where they can
        ("fsdp", {"fsdp": 1}, (3, 33), None),
    ],
)
def test_a_mesh_divides_what_is_trained_on(rules, mesh, sizes, words):
    rows, length, microbatches = (*sizes, 1)[:3]
    mesh = sharding.make_mesh(**mesh, devices=jax.devices()[: math.prod(mesh.values())])
    step = training.make_train_step(tiny.loss, SGD, microbatches=microbatches)
    with sharding.use(sharding.Layout(mesh, sharding.preset(rules))):
        state = jax.eval_shape(lambda: training.make_state(tiny.model(), SGD))
        run = lambda: jax.eval_shape(step, state, tiny.batch(rows, length))
        if words is None:
            assert run()[1]["loss"].shape == ()
        else:
            with pytest.raises(ValueError, match=words):
                run()


def test_remat_changes_nothing():
    assert_same_updates(steps(tiny.model(), tiny.batch(uneven=True), remat="full"), reference())


@pytest.mark.full
@pytest.mark.parametrize("remat", ["full", "dots", ["attention_out", "attention_lse"]], ids=str)
def test_remat_of_attention_changes_nothing(remat):
    assert_same_updates(steps(tiny.llama(), tiny.batch(rows=16, uneven=True), remat=remat), llama_reference())


def assert_same_updates(got, want):
    close(want[0].trainable, got[0].trainable, rtol=1e-5)
    assert float(got[1]["grad_norm"]) == pytest.approx(float(want[1]["grad_norm"]), rel=1e-5)


@functools.cache
def llama_reference():
    return steps(tiny.llama(), tiny.batch(rows=16, uneven=True))


@pytest.mark.full  # by default that of tests/training/test_trainer.py
@pytest.mark.parametrize("preset", MESHES)
@pytest.mark.parametrize("microbatches", [1, 2])
def test_every_preset_is_one_device(preset, microbatches):
    """Loss, gradient norm and two updates; parameters and moments stay in their place, so the step compiles once."""
    layout = sharding.Layout(sharding.make_mesh(**MESHES[preset]), getattr(sharding, preset))
    batch = tiny.batch(rows=16, uneven=True)
    want, want_metrics = llama_reference()
    with sharding.use(layout):
        state = training.make_state(placed(tiny.llama(), layout), SGD)
        places = jax.tree.map(lambda x: x.sharding, (state.trainable, state.opt_state))
        step = tiny.jit_step(training.make_train_step(tiny.loss, SGD, microbatches=microbatches))
        for _ in range(2):
            state, metrics = step(state, training.shard_batch(batch, layout))
    close(want.trainable, state.trainable)
    for name in want_metrics:
        assert float(metrics[name]) == pytest.approx(float(want_metrics[name]), rel=1e-4), name
    assert jax.tree.map(lambda x: x.sharding, (state.trainable, state.opt_state)) == places
    momentum = optax.tree_utils.tree_get(state.opt_state, "trace")
    assert all(momentum[path].sharding == state.trainable[path].sharding for path in momentum)


def placed(model, layout):
    return jax.device_put(model, sharding.shardings(model, layout))


def test_a_donated_state_is_gone_and_the_new_one_is_whole():
    model = tiny.model()
    state = training.make_state(training.copy_model(model), SGD)
    old = jax.tree.leaves(state)
    state, _ = training.jit_step(training.make_train_step(tiny.loss, SGD))(state, tiny.batch())
    assert any(x.is_deleted() for x in old)
    assert not any(x.is_deleted() for x in jax.tree.leaves((state, model)))


def test_a_copy_on_more_devices_has_arrays_of_its_own():
    model = tiny.model()
    copy = training.copy_model(model, sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP))
    jax.tree.map(lambda x: x.delete(), copy)  # as a step does
    assert not any(x.is_deleted() for x in jax.tree.leaves(model))


def noisy(model, batch, key):
    value, stats = tiny.loss(model, batch)
    noise = jax.random.uniform(key)
    return value * batch["factor"][0], training.Stats(stats.num_targets, {"noise": noise, "square": noise**2})


def test_keys_differ_by_step_and_microbatch_and_what_is_not_finite_is_flagged():
    step = jax.jit(training.make_train_step(noisy, SGD, microbatches=2), compiler_options=tiny.QUICKLY)
    batch = tiny.batch() | {"factor": np.ones(8, np.float32)}
    first = training.make_state(tiny.model(), SGD)
    second, metrics = step(first, batch)
    _, again = step(first, batch)
    _, later = step(second, batch)
    assert float(metrics["noise"]) == float(again["noise"]) != float(later["noise"])
    tokens = float(metrics["num_targets"])
    total, squares = float(metrics["noise"]) * tokens, float(metrics["square"]) * tokens
    assert squares > total**2 / 2 * (1 + 1e-6)  # equal draws would make it equal
    assert metrics["finite"] and later["finite"]
    _, bad = step(second, batch | {"factor": np.full(8, np.inf, np.float32)})
    assert not bad["finite"]


def test_evaluation_weighs_every_target_alike():
    model = tiny.model()
    batch = tiny.batch(uneven=True)
    parts = [{name: x[i : i + 2] for name, x in batch.items()} for i in (2, 4, 6)]
    rest = {name: x[2:] for name, x in batch.items()}
    state = training.make_state(model, optax.identity())
    step = jax.jit(training.make_eval_step(tiny.loss))
    want, got = training.evaluate(step, state, [rest]), training.evaluate(step, state, parts)
    assert got.keys() == want.keys() == {"num_targets", "loss", "nll", "accuracy"}
    for name in want:
        assert float(got[name]) == pytest.approx(float(want[name]), rel=1e-5)
    with pytest.raises(ValueError, match="at least one batch with a target"):
        training.evaluate(step, state, [])


def test_evaluation_draws_anew_for_every_batch_and_the_same_again():
    """A loss with noise would else see a few noise levels, however many batches there are."""
    loss = lambda model, batch, key: (jax.random.uniform(key), training.Stats(jnp.ones(()), {}))
    step, state = jax.jit(training.make_eval_step(loss)), training.make_state(tiny.model(), optax.identity())
    first, again, other = (float(step(state, tiny.batch(seed=seed)).sums["loss"]) for seed in (1, 1, 2))
    assert first == again != other


def test_evaluation_refuses_what_every_device_would_compute():
    with sharding.use(sharding.Layout(sharding.make_mesh(fsdp=8), sharding.FSDP)):
        state = jax.eval_shape(lambda: training.make_state(tiny.model(), optax.identity()))
        with pytest.raises(ValueError, match="its 6 rows must be a multiple of 8"):
            jax.eval_shape(training.make_eval_step(tiny.loss), state, tiny.batch(6))


@pytest.fixture
def asked(monkeypatch):
    """The devices and meshes for which flags are asked, and one that no compiler knows: on a CPU there are none."""
    asked = []

    def automatic_options(device, mesh):
        asked.append((device, {axis: size for axis, size in mesh.items() if size > 1}))
        return {"xla_no_such_flag": True}

    monkeypatch.setattr("maxlib.distributed.xla_flags.automatic_options", automatic_options)
    return asked


CPU = ("cpu", "cpu")


def test_a_compiled_step_gets_the_flags_of_its_device_and_mesh(asked):
    step = training.jit_step(lambda state, batch: (state, batch))  # made outside of the layout that runs it
    with sharding.use(sharding.Layout(sharding.make_mesh(fsdp=-1))):
        with pytest.raises(Exception, match="xla_no_such_flag"):
            step({"x": jnp.ones(2)}, {})
        assert asked == [(CPU, {"fsdp": 8})]
        step.lower({"x": jnp.ones(2)}, {})
    assert asked == [(CPU, {"fsdp": 8})]  # the same mesh
    with pytest.raises(Exception, match="xla_no_such_flag"):
        step({"x": jnp.ones(2)}, {})
    assert asked[1:] == [(CPU, {})]


@pytest.mark.parametrize("placed", [0, 1])
def test_without_a_layout_the_mesh_is_that_of_the_arguments(placed, asked):
    """Of a state or a batch that other code has placed, in arrays or in their shapes."""
    place = jax.sharding.NamedSharding(jax.make_mesh((2, 4), ("data", "model")), jax.sharding.PartitionSpec("data"))
    arguments = [{"step": 3, "x": jnp.ones(2)}, {"tokens": jnp.ones(2)}]
    arguments[placed]["y"] = jax.device_put(jnp.ones(4), place)
    step = training.jit_step(lambda state, batch: (state, batch))
    with pytest.raises(Exception, match="xla_no_such_flag"):
        step(*arguments)
    arguments[placed]["y"] = jax.ShapeDtypeStruct((4,), jnp.float32, sharding=place)
    step.lower(*arguments)
    assert asked == [(CPU, {"data": 2, "model": 4})]
