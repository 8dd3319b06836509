"""Recurrent operations against their definitions in float64: values, gradients, documents, padding, states, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import sharding
from tests.ops.recurrences import GATED_DELTA, KDA, RECURRENCES, SLOW, SSD, STARTS, VALID, B, T, close, cut, in_float64


@pytest.fixture(params=RECURRENCES.values(), ids=RECURRENCES)
def rule(request):
    return request.param


@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_it_is_its_definition(rule, implementation):
    """With documents, padding, a state before the first token, and heads that share keys or groups."""
    state = rule.initial_state()
    got = rule.run(rule.inputs(), STARTS, VALID, state, implementation)
    want = rule.definition(**rule.inputs(), is_start=STARTS, valid=VALID, state=state)
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs, rule.atol)


@pytest.mark.parametrize(
    ("rule", "slow"),
    [
        *[(rule, 3e-3) for rule in RECURRENCES.values()],
        (KDA, 40.0),
        *[pytest.param(rule, 40.0, marks=pytest.mark.full) for rule in (GATED_DELTA, SSD)],
    ],
)
def test_fast_and_slow_decays(rule, slow):
    """Fast ones would overflow above the diagonal, or where decays are taken apart; with slow ones errors would add
    up.
    """
    x = rule.inputs(slow=slow)
    close(rule.run(x)[0], rule.definition(**x)[0], rule.decay_atol)


def test_documents_in_a_row_are_those_documents_alone(rule):
    x = rule.inputs()
    whole, _ = rule.run(x, STARTS)
    alone, _ = rule.run(cut(x, slice(1), slice(5, 70)))
    close(whole[:1, 5:70], alone, rule.atol)
    leaked, _ = rule.run(x)
    assert np.abs(leaked[0, 130:] - whole[0, 130:]).max() > 0.1 * np.std(whole)  # it does make a difference


@pytest.mark.parametrize(("rule", "slow"), [*[(rule, SLOW) for rule in RECURRENCES.values()], (KDA, 10.0)])
def test_gradients_are_those_of_the_definition(rule, slow):
    x = rule.inputs(slow=slow) | {"initial_state": rule.initial_state()}
    weights = np.random.default_rng(3).normal(size=rule.run(rule.inputs())[0].shape).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x):
        def loss(x):
            masks = {"is_start": jnp.asarray(STARTS), "valid": jnp.asarray(VALID)}
            out, state = rule(x, **masks, implementation=implementation)
            return jnp.sum(out * weights) + jnp.sum(state**2)

        return jax.grad(loss)(x)

    with jax.enable_x64(True):
        want = jax.device_get(gradients("sequential", in_float64(x)))
    got = gradients("chunked", jax.tree.map(jnp.asarray, x))
    for name in x:
        close(got[name], want[name], 1e-4)


def test_a_state_carries_a_sequence_over(rule):
    """In pieces, of many tokens and of one, each beginning with the state that the one before left."""
    x, state, found = rule.inputs(), jnp.zeros(rule.state), []
    for begin, end in ((0, 100), (100, 101), (101, 105), (105, T)):
        out, state = rule.run(cut(x, slice(None), slice(begin, end)), None, None, state, None)
        found.append(out)
    want, last = rule.definition(**x)
    close(np.concatenate(found, axis=1), want, rule.atol)
    close(state, last, rule.atol)


def test_padding_leaves_the_state_as_it_is(rule):
    x, valid, before = rule.inputs(tokens=40), np.arange(40)[None] < np.array([[23], [0]]), rule.initial_state()
    out, state = rule.run(x, None, valid, before)
    assert not np.asarray(out)[~valid].any()
    np.testing.assert_array_equal(state[1], before[1])
    close(state[:1], rule.run(cut(x, slice(1), slice(23)), None, None, before[:1])[1], rule.atol)


@pytest.mark.parametrize("rule", [GATED_DELTA, KDA], ids=lambda rule: rule.op)
def test_keys_of_length_zero_stay_finite(rule):
    x = rule.inputs(tokens=40)
    out, state = rule.run(x | {name: np.zeros_like(x[name]) for name in "qk"})
    assert not np.asarray(out).any() and np.isfinite(state).all()


def test_the_state_is_float32_for_narrow_inputs(rule):
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), rule.inputs(tokens=70))
    out, state = rule.run(x)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    close(out.astype(np.float32), rule.definition(**x)[0], 2e-2)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_devices_that_share_a_sequence_are_one(rule, implementation):
    """Values, and gradients against float64; documents begin anywhere, and the last devices have padding only."""
    x, before = rule.inputs(tokens=160), rule.initial_state()
    starts, valid = np.pad(STARTS, ((0, 0), (0, 10))), np.arange(160)[None] < np.array([[110], [160]])
    tokens = P(None, "context")
    specs = {name: P() if part.ndim == 1 else tokens for name, part in x.items()}

    def loss(op, x):
        out, state = op(x, starts, valid, before)
        return (out**2).sum() + (state**2).sum(), (out, state)

    def local(x, starts, valid, state):
        options = {"is_start": starts, "valid": valid, "initial_state": state, "implementation": implementation}
        return rule(x, **options, axis_name="context")

    mesh, ends = sharding.make_mesh(context=8), {"in_specs": (specs, tokens, tokens, P()), "out_specs": (tokens, P())}
    split = jax.shard_map(local, mesh=mesh, **ends, check_vma=False)
    both = lambda op, x: jax.jit(jax.grad(functools.partial(loss, op), has_aux=True))(x)
    one = lambda *args: rule.run(*args, "sequential")
    gradients, (out, state) = both(split, x)
    for ours, theirs in zip((out, state), both(one, x)[1], strict=True):
        close(ours, theirs, 1e-5)
    with jax.enable_x64(True):
        want = jax.device_get(both(one, in_float64(x))[0])
    for name in x:
        close(gradients[name], want[name], 2e-5 if rule is KDA else 1e-5)


@pytest.mark.parametrize("rule", [GATED_DELTA, KDA], ids=lambda rule: rule.op)
def test_memory_does_not_grow_with_the_state(rule):
    """For a value four times as wide the op keeps no more for the backward pass than what it was given."""
    tokens, (_, N, HK, HV) = 4096, rule.state

    def kept(width: int) -> int:
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in rule.inputs(tokens=tokens).items()}
        x["v"] = jax.ShapeDtypeStruct((B, tokens, N, width), jnp.float32)
        _, backward = jax.eval_shape(lambda x: jax.vjp(lambda x: rule(x)[0], x), x)
        return sum(a.size for a in jax.tree.leaves(backward))

    narrow, wide = kept(HV), kept(4 * HV)
    assert wide - narrow < B * tokens * N * 3 * HV * 1.2  # the values themselves; a state is `HK` times as large
    if rule is GATED_DELTA:
        assert narrow < B * tokens * N * (2 * HK + 2 * HV + 6)
