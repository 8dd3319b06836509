"""The gated delta rule against its definition in float64: values, gradients, documents, padding, states, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.observability import forward_flops
from maxlib.ops._gated_delta.inverse import unit_lower_inverse

B, T, K, N, HK, HV = 2, 150, 2, 4, 8, 6  # two chunks and a part of a third; two value heads to a key head
SLOW = 0.05  # of the decay: a state that is not reset shows hundreds of tokens later


def inputs(seed: int = 0, tokens: int = T, slow: float = SLOW) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "q": normal(B, tokens, K, HK),
        "k": normal(B, tokens, K, HK),
        "v": normal(B, tokens, N, HV),
        "log_decay": -slow * np.log1p(np.exp(normal(B, tokens, N))),
        "beta": 1 / (1 + np.exp(-normal(B, tokens, N))),
    }


def definition(q, k, v, log_decay, beta, is_start=None, valid=None, state=None):
    """Row by row, head by head and token by token."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k, out = unit(q) * q.shape[-1] ** -0.5, unit(k), np.zeros(v.shape)
    last = np.zeros((*v.shape[::2], q.shape[-1], v.shape[-1]))
    for b, n in np.ndindex(last.shape[:2]):
        key = n // (v.shape[2] // q.shape[2])
        S = last[b, n] if state is None else np.asarray(state, np.float64)[b, n].copy()
        for t in range(q.shape[1]):
            if valid is not None and not valid[b, t]:
                continue
            S = np.zeros_like(S) if is_start is not None and is_start[b, t] else np.exp(log_decay[b, t, n]) * S
            kt = k[b, t, key]
            S = S + np.outer(kt, beta[b, t, n] * (v[b, t, n] - kt @ S))
            out[b, t, n] = q[b, t, key] @ S
        last[b, n] = S
    return out, last


@functools.partial(jax.jit, static_argnames="implementation")
def run(inputs, is_start=None, valid=None, initial_state=None, implementation="chunked"):
    return ops.gated_delta_rule(
        **inputs, is_start=is_start, valid=valid, initial_state=initial_state, implementation=implementation
    )


def close(got, want, atol=2e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol * np.std(want))


STATE = np.random.default_rng(9).normal(size=(B, N, HK, HV)).astype(np.float32)
STARTS = np.zeros((B, T), bool)
STARTS[0, [0, 5, 70, 71, 128]] = STARTS[1, [64, 100]] = True  # within a chunk, at its border, two in a chunk
VALID = np.ones((B, T), bool)
VALID[0, 90:128] = VALID[1, 140:] = False  # before a document, and at the end


@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_it_is_its_definition(implementation):
    """With documents, padding, a state before the first token, and value heads that share key heads."""
    got = run(inputs(), STARTS, VALID, STATE, implementation)
    want = definition(**inputs(), is_start=STARTS, valid=VALID, state=STATE)
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("slow", [3e-3, pytest.param(40.0, marks=pytest.mark.full)])
def test_fast_and_slow_decays(slow):
    """Fast ones would overflow above the diagonal; with slow ones errors would add up."""
    x = inputs(slow=slow)
    close(run(x)[0], definition(**x)[0], 5e-5)


def test_slow_decays_between_fast_ones():
    """Values and gradients: running sums of hundreds must leave no error in the small differences of a chunk."""
    x = inputs()
    x["log_decay"] = np.where(np.random.default_rng(4).random((B, T, N)) < 0.5, 600 * x["log_decay"], x["log_decay"])

    @functools.partial(jax.jit, static_argnums=0)
    def both(implementation, x):
        rule = lambda x: ops.gated_delta_rule(**x, implementation=implementation)[0]
        return rule(x), jax.grad(lambda x: jnp.sum(rule(x) ** 2))(x)

    with jax.enable_x64(True):
        want = jax.device_get(both("sequential", jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x)))
    jax.tree.map(close, both("chunked", jax.tree.map(jnp.asarray, x)), want)


def test_documents_in_a_row_are_those_documents_alone():
    x = inputs()
    whole, _ = run(x, STARTS)
    alone, _ = run({name: a[:1, 5:70] for name, a in x.items()})
    close(whole[:1, 5:70], alone)
    leaked, _ = run(x)
    assert np.abs(leaked[0, 130:] - whole[0, 130:]).max() > 0.1 * np.std(whole)  # it does make a difference


@pytest.mark.parametrize(
    ("masks", "max_step"), [({"is_start": jnp.asarray(STARTS), "valid": jnp.asarray(VALID)}, 1), ({}, 2)]
)
def test_gradients_are_those_of_the_definition(masks, max_step):
    """Of the outputs and the last state: with documents and padding; without, and with steps up to 2."""
    x = inputs() | {"initial_state": STATE}
    x["beta"] = max_step * x["beta"]
    weights = np.random.default_rng(3).normal(size=(B, T, N, HV)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x):
        def loss(x):
            out, state = ops.gated_delta_rule(**x, **masks, implementation=implementation)
            return jnp.sum(out * weights) + jnp.sum(state**2)

        return jax.grad(loss)(x)

    with jax.enable_x64(True):
        want = jax.device_get(gradients("sequential", jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x)))
    got = gradients("chunked", jax.tree.map(jnp.asarray, x))
    for name in x:
        close(got[name], want[name], 1e-4)


def test_gradients_within_other_transforms():
    """Row by row under vmap, in a rematerialised loop, and of gradients."""
    x = jax.tree.map(jnp.asarray, inputs(tokens=70))
    rule = lambda x: jnp.sum(ops.gated_delta_rule(**x, implementation="chunked")[0] ** 2)
    by_row = jax.vmap(lambda x: rule(jax.tree.map(lambda a: a[None], x)))
    row = jax.checkpoint(lambda total, x: (total + rule(jax.tree.map(lambda a: a[None], x)), None))
    looped = lambda x: jax.lax.scan(row, 0.0, x)[0]
    want = jax.jit(jax.grad(rule))(x)
    for loss in (lambda x: by_row(x).sum(), looped):
        jax.tree.map(lambda got, want: close(got, want, 1e-5), jax.jit(jax.grad(loss))(x), want)

    def penalty(implementation, k):
        of_v = jax.grad(
            lambda v: jnp.sum(ops.gated_delta_rule(**x | {"k": k, "v": v}, implementation=implementation)[0])
        )
        return jnp.sum(of_v(x["v"]) ** 2)

    got, want = (jax.jit(jax.grad(functools.partial(penalty, name)))(x["k"]) for name in ("chunked", "sequential"))
    close(got, want, 1e-4)


def test_the_inverse_of_a_triangle():
    lower = np.tril(np.random.default_rng(0).normal(size=(3, 64, 64)), -1).astype(np.float32) * 0.3
    got, gradient = jax.vjp(jax.jit(unit_lower_inverse), lower)
    close(got, np.linalg.inv(np.eye(64) + lower.astype(np.float64)))
    weights = np.random.default_rng(1).normal(size=lower.shape).astype(np.float32)
    turned = np.linalg.inv(np.eye(64) + lower.astype(np.float64)).swapaxes(1, 2)
    close(gradient(weights)[0], np.tril(-turned @ weights @ turned, -1), 1e-4)


def test_a_state_carries_a_sequence_over():
    """In pieces, of many tokens and of one, each beginning with the state that the one before left."""
    x, state, found = inputs(), jnp.zeros((B, N, HK, HV)), []
    for begin, end in ((0, 100), (100, 101), (101, 105), (105, T)):
        out, state = run({name: a[:, begin:end] for name, a in x.items()}, None, None, state, None)
        found.append(out)
    want, last = definition(**x)
    close(np.concatenate(found, axis=1), want)
    close(state, last)


def test_padding_leaves_the_state_as_it_is():
    x, valid = inputs(tokens=40), np.arange(40)[None] < np.array([[23], [0]])
    out, state = run(x, None, valid, STATE)
    assert not np.asarray(out)[~valid].any()
    np.testing.assert_array_equal(state[1], STATE[1])
    close(state[:1], run({name: a[:1, :23] for name, a in x.items()}, None, None, STATE[:1])[1])


def test_the_state_is_float32_for_narrow_inputs():
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs(tokens=70))
    (out, state), backward = jax.vjp(run, x)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    close(out.astype(np.float32), definition(**x)[0], 2e-2)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), x)
    want = jax.vjp(lambda x: run(x, implementation="sequential"), wide)[1]((out.astype(jnp.float32), state))[0]
    (got,) = backward((out, state))
    assert {a.dtype for a in got.values()} == {jnp.bfloat16.dtype}
    jax.tree.map(lambda ours, theirs: close(ours.astype(np.float32), theirs, 3e-2), got, want)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_devices_that_share_a_sequence_are_one(implementation):
    """Values and gradients; documents begin anywhere, and the last devices have padding only."""
    x = inputs(tokens=160)
    starts, valid = np.pad(STARTS, ((0, 0), (0, 10))), np.arange(160)[None] < np.array([[110], [160]])
    specs, tokens = dict.fromkeys(x, P(None, "context")), P(None, "context")

    def loss(rule, x):
        out, state = rule(x, starts, valid, STATE)
        return (out**2).sum() + (state**2).sum(), (out, state)

    def local(x, starts, valid, state):
        options = {"is_start": starts, "valid": valid, "initial_state": state, "implementation": implementation}
        return ops.gated_delta_rule(**x, **options, axis_name="context")

    mesh, ends = sharding.make_mesh(context=8), {"in_specs": (specs, tokens, tokens, P()), "out_specs": (tokens, P())}
    split = jax.shard_map(local, mesh=mesh, **ends, check_vma=False)
    both = lambda rule: jax.jit(jax.grad(functools.partial(loss, rule), has_aux=True))(x)
    got, want = both(split), both(lambda *args: run(*args, "sequential"))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(ours, theirs, 1e-5)


def test_memory_does_not_grow_with_the_state():
    """For a value four times as wide the op keeps no more for the backward pass than what it was given."""

    def kept(width: int) -> int:
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(tokens=4096).items()}
        x["v"] = jax.ShapeDtypeStruct((B, 4096, N, width), jnp.float32)
        _, backward = jax.eval_shape(lambda x: jax.vjp(lambda x: ops.gated_delta_rule(**x)[0], x), x)
        return sum(a.size for a in jax.tree.leaves(backward))

    narrow, wide = kept(HV), kept(4 * HV)
    tokens = B * 4096 * N
    assert wide - narrow < tokens * 3 * HV * 1.2  # the values themselves; a state is `HK` times as large
    assert narrow < tokens * (2 * HK + 2 * HV + 6)


def test_flops_are_those_of_the_matmuls():
    """By the formula of the op, near what the trace of the chunks has."""
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(tokens=1024).items()}
    counted = forward_flops(lambda x: ops.gated_delta_rule(**x)[0], x)
    C, tokens = 64, 1024 * B
    assert counted == 2 * tokens * (2 * K * C * HK + N * (C * (HK + 2 * HV) + 3 * HK * HV))


def test_bad_input():
    x = jax.tree.map(jnp.asarray, inputs(tokens=3))
    with pytest.raises(ValueError, match="value heads must be a multiple"):
        ops.gated_delta_rule(**x | {"q": x["q"].repeat(3, 2), "k": x["k"].repeat(3, 2)})
    with pytest.raises(ValueError, match="one of mosaic_tpu, chunked, sequential"):
        ops.gated_delta_rule(**x, implementation="fast")
    with pytest.raises(ValueError, match="K=0"):
        ops.gated_delta_rule(**x | {"q": x["q"][:, :, :0], "k": x["k"][:, :, :0]})
