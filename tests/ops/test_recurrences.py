"""Recurrent operations against their definitions in float64: values, gradients, documents, padding, states, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.observability import forward_flops
from maxlib.ops._recurrent.chunks import unit_lower_inverse
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


@pytest.mark.parametrize(("rule", "slow"), [*[(rule, SLOW) for rule in RECURRENCES.values()], (KDA, 10.0)])
def test_gradients_are_those_of_the_definition(rule, slow):
    x = rule.inputs(slow=slow) | {"initial_state": rule.initial_state()}
    with jax.enable_x64(True):
        want = jax.device_get(gradients(rule, "sequential", in_float64(x)))
    got = gradients(rule, "chunked", jax.tree.map(jnp.asarray, x))
    for name in x:
        close(got[name], want[name], 1e-4)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradients(rule, implementation, x):
    """Returns the gradients of a loss of outputs and state, with documents and padding."""

    def loss(x):
        masks = {"is_start": jnp.asarray(STARTS), "valid": jnp.asarray(VALID)}
        out, state = rule(x, **masks, implementation=implementation)
        weights = np.random.default_rng(3).normal(size=out.shape).astype(np.float32)
        return jnp.sum(out * weights) + jnp.sum(state**2)

    return jax.grad(loss)(x)


def test_a_state_carries_a_sequence_over(rule):
    """In pieces, of many tokens and of one, each beginning with the state that the one before left."""
    x, state, outputs = rule.inputs(tokens=T - 1), jnp.zeros(rule.state), []
    for begin, end in ((0, 74), (74, 75), (75, T - 1)):
        out, state = rule.run(cut(x, slice(None), slice(begin, end)), None, None, state, None)
        outputs.append(out)
    want, last = rule.definition(**x)
    close(np.concatenate(outputs, axis=1), want, rule.atol)
    close(state, last, rule.atol)


def test_padding_leaves_the_state_as_it_is(rule):
    before = rule.initial_state()
    valid = np.arange(T)[None] < np.array([[23], [0]])
    out, state = rule.run(rule.inputs(), np.zeros_like(STARTS), valid, before)
    assert not np.asarray(out)[~valid].any()
    np.testing.assert_array_equal(state[1], before[1])


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
    alone = lambda *args: rule.run(*args, "sequential")
    gradients, (out, state) = both(split, x)
    for ours, theirs in zip((out, state), both(alone, x)[1], strict=True):
        close(ours, theirs, 1e-5)
    with jax.enable_x64(True):
        want = jax.device_get(both(alone, in_float64(x))[0])
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


# ---------------------------------------------------------------------------------------------- only the delta rule


@pytest.mark.full
def test_gradients_without_documents_and_with_long_steps():
    """Of the outputs and the last state; steps up to 2."""
    x = GATED_DELTA.inputs() | {"initial_state": GATED_DELTA.initial_state()}
    x["beta"] = 2 * x["beta"]
    weights = np.random.default_rng(3).normal(size=(B, T, 4, 6)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x):
        def loss(x):
            out, state = GATED_DELTA(x, implementation=implementation)
            return jnp.sum(out * weights) + jnp.sum(state**2)

        return jax.grad(loss)(x)

    with jax.enable_x64(True):
        want = jax.device_get(gradients("sequential", in_float64(x)))
    got = gradients("chunked", jax.tree.map(jnp.asarray, x))
    jax.tree.map(lambda got, want: close(got, want, 1e-4), got, want)


def test_gradients_in_bfloat16():
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), GATED_DELTA.inputs(tokens=70))
    rule = lambda implementation: lambda x: jnp.sum(GATED_DELTA(x, implementation=implementation)[0] ** 2)
    got = jax.jit(jax.grad(rule("chunked")))(narrow)
    want = jax.jit(jax.grad(rule("sequential")))(jax.tree.map(lambda a: a.astype(jnp.float32), narrow))
    assert {a.dtype for a in got.values()} == {jnp.bfloat16.dtype}
    jax.tree.map(lambda got, want: close(got.astype(np.float32), want, 3e-2), got, want)


@pytest.mark.full
def test_gradients_within_other_transforms():
    """Row by row under vmap, in a rematerialised loop."""
    x = jax.tree.map(jnp.asarray, GATED_DELTA.inputs(tokens=70))
    rule = lambda x: jnp.sum(GATED_DELTA(x, implementation="chunked")[0] ** 2)
    one_row = lambda x: rule(jax.tree.map(lambda a: a[None], x))
    step = jax.checkpoint(lambda total, row: (total + jax.vmap(one_row)(row).sum(), None))
    rows = jax.tree.map(lambda a: a[:, None], x)
    got = jax.jit(jax.grad(lambda rows: jax.lax.scan(step, 0.0, rows)[0]))(rows)
    want = jax.jit(jax.grad(rule))(x)
    jax.tree.map(lambda got, want: close(got[:, 0], want, 1e-5), got, want)


@pytest.mark.full
def test_gradients_of_gradients():
    x = jax.tree.map(jnp.asarray, GATED_DELTA.inputs(tokens=70))

    def penalty(implementation, k):
        of_v = jax.grad(lambda v: jnp.sum(GATED_DELTA(x | {"k": k, "v": v}, implementation=implementation)[0]))
        return jnp.sum(of_v(x["v"]) ** 2)

    got, want = (jax.jit(jax.grad(functools.partial(penalty, name)))(x["k"]) for name in ("chunked", "sequential"))
    close(got, want, 1e-4)


def test_the_inverse_of_a_triangle():
    lower = np.tril(np.random.default_rng(0).normal(size=(3, 64, 64)), -1).astype(np.float32) * 0.3
    got, gradient = jax.vjp(jax.jit(unit_lower_inverse), lower)
    close(got, np.linalg.inv(np.eye(64) + lower.astype(np.float64)), 2e-5)
    weights = np.random.default_rng(1).normal(size=lower.shape).astype(np.float32)
    turned = np.linalg.inv(np.eye(64) + lower.astype(np.float64)).swapaxes(1, 2)
    close(gradient(weights)[0], np.tril(-turned @ weights @ turned, -1), 1e-4)


# ---------------------------------------------------------------------------------------------- Kimi's, Mamba-2's


def test_a_decay_for_each_head_is_the_gated_delta_rule():
    x = KDA.inputs()
    x["log_decay"] = np.broadcast_to(x["log_decay"][..., :1], x["log_decay"].shape)
    want = jax.jit(ops.gated_delta_rule)(**x | {"log_decay": x["log_decay"][..., 0]}, initial_state=KDA.initial_state())
    for ours, theirs in zip(KDA.run(x, None, None, KDA.initial_state()), want, strict=True):
        close(ours, theirs, 2e-5)


def test_memory_of_ssd_is_a_state_for_each_block():
    """For a state four times as wide the op keeps no more for the backward pass than what it was given, and one state
    for each block.
    """
    tokens = 4096

    def kept(size: int) -> int:
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in SSD.inputs(tokens=tokens).items()}
        x |= dict.fromkeys("bc", jax.ShapeDtypeStruct((B, tokens, 2, size), jnp.float32))
        _, backward = jax.eval_shape(lambda x: jax.vjp(lambda x: ops.ssd(**x)[0], x), x)
        return sum(a.size for a in jax.tree.leaves(backward))

    narrow, wide = kept(7), kept(4 * 7)
    # b and c, and a state for each of four blocks; a state for each token would be 1024 times as much.
    assert wide - narrow <= 3 * 7 * B * (2 * tokens * 2 + 8 * 6 * 5) * 1.2


# FLOPs of a token by the formulas of the chunked forms, for the heads and widths of `inputs`, in chunks of 64.
FLOPS = {
    "gated_delta_rule": 2 * (2 * 2 * 64 * 8 + 4 * (64 * (8 + 2 * 6) + 3 * 8 * 6)),
    "kimi_delta_attention": 2 * 3 * (2 * 64 * 8 + 64 * (8 + 2 * 6) + 3 * 8 * 6),
    "ssd": 2 * (2 * 64 * 7 + 6 * (64 * 5 + 2 * 5 * 7)),
}


def test_flops_are_those_of_the_matmuls(rule):
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in rule.inputs(tokens=1024).items()}
    assert forward_flops(lambda x: rule(x)[0], x) == FLOPS[rule.op] * 1024 * B


def test_bad_input(rule):
    x = jax.tree.map(jnp.asarray, rule.inputs(tokens=3))
    with pytest.raises(ValueError, match="there must be at least one token"):
        rule({name: a if a.ndim == 1 else a[:, :0] for name, a in x.items()})
    with pytest.raises(ValueError, match="one of jax_linear_attention, .*chunked, sequential, got 'fast'"):
        rule(x, implementation="fast")
    if rule is GATED_DELTA:
        with pytest.raises(ValueError, match="value heads must be a multiple"):
            rule(x | {"q": x["q"].repeat(3, 2), "k": x["k"].repeat(3, 2)})
    if rule is SSD:
        with pytest.raises(ValueError, match="heads must be a multiple of the G groups"):
            rule(x | {"b": x["b"].repeat(2, 2), "c": x["c"].repeat(2, 2)})
