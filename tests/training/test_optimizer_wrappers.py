"""Skipped steps, averages, rates by path and frozen parameters, with the step that uses them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlib import nn, training
from tests.training import tiny

PARAMS = {"w": jnp.ones(3)}


def run(optimizer, gradients, losses):
    """Returns parameters and skipped updates, step by step."""
    update = jax.jit(optimizer.update)
    params, state, seen = PARAMS, optimizer.init(PARAMS), []
    for gradient, loss in zip(gradients, losses, strict=True):
        updates, state = update({"w": jnp.full(3, gradient)}, state, params, value=jnp.float32(loss))
        params = optax.apply_updates(params, updates)
        seen.append(bool(state.skipped))
    return params, state, seen


@pytest.mark.parametrize(
    ("gradient", "loss"), [(9.0, 1.0), (1.0, 2.0), (np.nan, 1.0), (1.0, np.inf)], ids=["norm", "loss", "nan", "inf"]
)
def test_a_spike_leaves_no_trace(gradient, loss):
    make = lambda: training.skip_spikes(optax.adam(0.1), warmup_steps=3)
    spiked = run(make(), [1.0, 1.1, 0.9, gradient, 1.0], [1.0, 0.9, 1.0, loss, 0.8])
    clean = run(make(), [1.0, 1.1, 0.9, 1.0], [1.0, 0.9, 1.0, 0.8])
    assert spiked[2] == [False, False, False, True, False]
    jax.tree.map(np.testing.assert_array_equal, spiked[:2], clean[:2])


@pytest.mark.parametrize("mean", [-3.0, 0.0, 3.0])
def test_losses_of_any_sign_are_skipped_by_their_deviation(mean):
    """The losses of policies are around zero: what is usual is no spike, and what is far is one."""
    usual = np.random.default_rng(0).normal(mean, 0.2, 150)
    optimizer = training.skip_spikes(optax.sgd(0.1), decay=0.9, warmup_steps=50)
    seen = run(optimizer, [1.0] * 152, [*usual, mean + 20.0, mean])[2]
    assert not any(seen[:150])
    assert seen[150:] == [True, False]


def test_early_steps_are_skipped_only_when_they_are_not_finite():
    skipped = run(training.skip_spikes(optax.sgd(0.1), warmup_steps=3), [1.0, 90.0, np.nan], [1.0, 9.0, 1.0])[2]
    assert skipped == [False, False, True]


def test_the_step_reports_what_it_skips_and_the_state_stays_good():
    def loss(model, batch, key):
        total, stats = training.NextToken()(model, batch, key, dtype=jnp.float32)
        return total * batch["scale"][0], stats

    optimizer = training.skip_spikes(training.adamw(1e-2, mask=None))
    state = training.make_state(tiny.model(), optimizer)
    step = jax.jit(training.make_train_step(loss, optimizer, log_schedule=lambda step: 10.0 + step))
    batch = tiny.batch() | {"scale": jnp.array([np.nan])}
    after, metrics = step(state, batch)
    assert metrics["skipped"] == 1
    assert metrics["finite"]
    jax.tree.map(np.testing.assert_array_equal, after.trainable, state.trainable)
    metrics = step(after, batch | {"scale": jnp.array([1.0])})[1]
    assert metrics["skipped"] == 0 and metrics["learning_rate"] == 10  # a skipped step moves no schedule


def test_the_average_follows_the_parameters():
    optimizer = training.ema(training.adamw(1e-2, mask=None), decay=0.9)
    state = training.make_state(tiny.model(), optimizer)
    want = jax.tree.map(np.asarray, state.trainable)
    step = jax.jit(training.make_train_step(training.NextToken(), optimizer))
    for _ in range(3):
        state, _ = step(state, tiny.batch())
        want = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * np.asarray(p), want, state.trainable)
    got, _ = nn.partition(training.ema_model(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8), got, want)
    params = {"w": jnp.full(8, 0.7, jnp.bfloat16)}
    still = training.ema(optax.sgd(0.0), decay=0.999)
    run = jax.jit(lambda s: jax.lax.fori_loop(0, 5000, lambda _, s: still.update(params, s, params)[1], s))
    np.testing.assert_allclose(run(still.init(params)).average["w"], params["w"].astype(jnp.float32), rtol=1e-5)
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        training.ema(optax.sgd(1.0), decay=99.9)
    with pytest.raises(ValueError, match="has no average"):
        training.ema_model(training.make_state(tiny.model(), training.adamw(1e-2, mask=None)))


def test_nothing_changes_updates_after_the_average_has_seen_them():
    model = jax.eval_shape(tiny.llama)
    rates = training.scale_by_path({"layers.attn.*": 0.5}, model=model)
    for wrong in (
        optax.chain(training.ema(optax.sgd(1.0)), rates),
        training.skip_spikes(optax.chain(optax.chain(training.ema(optax.sgd(1.0))), rates)),
    ):
        with pytest.raises(ValueError, match=r"ema\(...\) comes before another"):
            jax.eval_shape(lambda optimizer=wrong: training.make_state(tiny.llama(), optimizer))
    for right in (
        training.ema(optax.chain(optax.sgd(1.0), rates)),
        training.skip_spikes(optax.chain(optax.clip(1.0), training.ema(optax.sgd(1.0)))),
    ):
        jax.eval_shape(lambda optimizer=right: training.make_state(tiny.llama(), optimizer))


def test_rates_by_path():
    model = tiny.filled_llama()
    params, _ = nn.partition(model)
    factors = {"layers.attn.q.*": 0.0, "layers.attn.*": 0.5}
    optimizer = optax.chain(optax.sgd(1.0), training.scale_by_path(factors, model=model))
    updates, _ = jax.jit(lambda params: optimizer.update(params, optimizer.init(params), params))(
        jax.tree.map(np.ones_like, params)
    )
    short = nn.tree.pattern_paths(model)
    rate = {short[path]: float(-u.mean()) for path, u in updates.items()}
    assert rate["layers.attn.q.w"] == 0
    assert rate["layers.attn.o.w"] == 0.5
    assert rate["layers.mlp.up.w"] == rate["embed.w"] == 1
    with pytest.raises(ValueError, match=r"\['atn'\] match none.*embed\.w"):
        training.scale_by_path({"atn": 2.0}, model=model).init(params)


def test_what_is_frozen_stays_and_has_no_moments():
    model = tiny.filled_llama()
    optimizer = training.adamw(1e-2, mask=None)
    state = training.make_state(model, optimizer, filter=training.trainable_only("layers.mlp.*", "norm.scale"))
    names = {nn.tree.pattern_paths(model)[path] for path in state.trainable}
    assert names == {"norm.scale", *(f"layers.mlp.{part}.w" for part in ("gate", "up", "down"))}
    assert optax.tree.get(state.opt_state, "mu").keys() == state.trainable.keys()


def test_a_pattern_that_fits_nothing_is_an_error():
    """As those of `scale_by_path` and of adapters; the head of a tied model is the one of a docstring."""
    filter = training.trainable_only("layers.attn.*", "head.w")
    start = lambda filter, **changes: jax.eval_shape(
        lambda: training.make_state(tiny.llama(**changes), optax.sgd(0.1), filter=filter)
    )
    assert {path.rpartition(".")[2] for path in start(filter).trainable} == {"w"}
    with pytest.raises(ValueError, match=r"\['layers\.mpl\.\*'\] match none"):
        start(training.trainable_only("layers.mpl.*"))
    with pytest.raises(ValueError, match=r"\['head\.w'\] match none \(a tied head has none\); there are .*embed\.w"):
        start(filter, tied=True)


def test_coarse_parameters_whose_changes_are_lost_are_said():
    coarse = lambda: nn.cast(tiny.model(), jnp.bfloat16)
    start = lambda build, optimizer: jax.eval_shape(lambda: training.make_state(build(), optimizer))
    with pytest.warns(
        UserWarning, match=r"(\d+) of \1 .* are bfloat16.*dtype=jnp\.float32.*bfloat16_moments.*moments=jnp\.bfloat16"
    ):
        start(coarse, training.adamw(1e-5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for optimizer in (training.adamw(1e-4, moments=jnp.bfloat16), training.bfloat16_moments(optax.lion(1e-4))):
            start(coarse, optimizer)
        start(tiny.model, training.adamw(1e-4))


def test_moments_in_bfloat16_follow_those_in_float32():
    """Changes of a thousandth, which rounding to the nearest would lose, add up on average; parameters in bfloat16 move
    too.
    """
    params = {"w": jnp.full(4096, 1.0, jnp.bfloat16), "b": jnp.ones(4096)}
    grads = jax.tree.map(lambda p: jnp.full(p.shape, 0.5, p.dtype), params)
    exact = training.adamw(1e-3, mask=None, b2=0.999, weight_decay=0.0, clip=None)
    low = training.adamw(1e-3, mask=None, b2=0.999, weight_decay=0.0, clip=None, moments=jnp.bfloat16)
    moments = {}
    for name, optimizer in (("exact", exact), ("low", low)):
        update, state, now = jax.jit(optimizer.update), optimizer.init(params), params
        for _ in range(30):
            updates, state = update(grads, state, now)
            now = optax.apply_updates(now, updates)
        moments[name] = now, *(optax.tree.get(state, moment) for moment in ("mu", "nu"))
    assert {x.dtype for moment in moments["exact"][1:] for x in moment.values()} == {jnp.dtype("float32")}
    assert {x.dtype for moment in moments["low"][1:] for x in moment.values()} == {jnp.dtype("bfloat16")}
    mean = lambda x: float(x.astype(jnp.float32).mean())
    for got, want in zip(moments["low"][1:], moments["exact"][1:], strict=True):
        assert all(mean(got[path]) == pytest.approx(mean(want[path]), rel=0.005) for path in params)
    assert mean(moments["low"][0]["w"]) == pytest.approx(1 - 30 * 1e-3, abs=2e-3)
    assert mean(moments["low"][0]["b"]) == pytest.approx(1 - 30 * 1e-3, abs=1e-3)
    assert mean(moments["exact"][0]["w"]) == 1.0  # each change is less than half of what bfloat16 can tell apart


def test_a_state_in_bfloat16_trains():
    optimizer = training.bfloat16_moments(optax.lion(1e-3))
    cast = jax.jit(lambda model: nn.cast(model, jnp.bfloat16, lambda path, v: "norm" not in path))
    state = training.make_state(cast(tiny.model()), optimizer)
    dtypes = lambda state: [x.dtype for x in jax.tree.leaves((state.trainable, state.opt_state))]
    step, before, losses = tiny.jit_step(training.make_train_step(tiny.loss, optimizer)), dtypes(state), []
    assert state.trainable["embed.w"].dtype == jnp.bfloat16
    assert state.trainable["layers.groups.1.0.norm.scale"].dtype == jnp.float32
    for _ in range(6):
        state, metrics = step(state, tiny.batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.02 and dtypes(state) == before
    assert optax.tree.get(state.opt_state, "mu")["embed.w"].dtype == jnp.bfloat16


def test_moments_of_other_dtypes_are_refused():
    with pytest.raises(ValueError, match="float32, bfloat16 or float8_e4m3fn, got float16"):
        training.adamw(1e-2, mask=None, moments=jnp.float16)
