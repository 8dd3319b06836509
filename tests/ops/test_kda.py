"""Kimi delta attention against its definition in float64: values, gradients, documents, padding, states, devices."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.observability import forward_flops

B, T, N, HK, HV = 2, 150, 3, 8, 6  # two chunks and a part of a third
SLOW = 0.05  # of the decay: a state that is not reset shows hundreds of tokens later


def inputs(seed: int = 0, tokens: int = T, slow: float = SLOW) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "q": normal(B, tokens, N, HK),
        "k": normal(B, tokens, N, HK),
        "v": normal(B, tokens, N, HV),
        # Channels of a key forget at rates of their own.
        "log_decay": -slow * np.log1p(np.exp(2 * normal(B, tokens, N, HK))),
        "beta": 1 / (1 + np.exp(-normal(B, tokens, N))),
    }


def definition(q, k, v, log_decay, beta, is_start=None, valid=None, state=None):
    """Row by row, head by head and token by token."""
    q, k, v, log_decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, log_decay, beta))
    unit = lambda x: x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)
    q, k, out = unit(q) * q.shape[-1] ** -0.5, unit(k), np.zeros(v.shape)
    last = np.zeros((*v.shape[::2], q.shape[-1], v.shape[-1]))
    for b, n in np.ndindex(last.shape[:2]):
        S = last[b, n] if state is None else np.asarray(state, np.float64)[b, n].copy()
        for t in range(q.shape[1]):
            if valid is not None and not valid[b, t]:
                continue
            S = np.zeros_like(S) if is_start is not None and is_start[b, t] else np.exp(log_decay[b, t, n])[:, None] * S
            S = S + np.outer(k[b, t, n], beta[b, t, n] * (v[b, t, n] - k[b, t, n] @ S))
            out[b, t, n] = q[b, t, n] @ S
        last[b, n] = S
    return out, last


@functools.partial(jax.jit, static_argnames="implementation")
def run(inputs, is_start=None, valid=None, initial_state=None, implementation="chunked"):
    return ops.kimi_delta_attention(
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
    """With documents, padding, and a state before the first token."""
    got = run(inputs(), STARTS, VALID, STATE, implementation)
    want = definition(**inputs(), is_start=STARTS, valid=VALID, state=STATE)
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("slow", [3e-3, 40.0])
def test_fast_and_slow_decays(slow):
    """Fast ones overflow where decays are taken apart; with slow ones errors would add up."""
    x = inputs(slow=slow)
    close(run(x)[0], definition(**x)[0])


def test_a_decay_for_each_head_is_the_gated_delta_rule():
    x = inputs()
    x["log_decay"] = np.broadcast_to(x["log_decay"][..., :1], x["log_decay"].shape)
    want = jax.jit(ops.gated_delta_rule)(**x | {"log_decay": x["log_decay"][..., 0]}, initial_state=STATE)
    for ours, theirs in zip(run(x, None, None, STATE), want, strict=True):
        close(ours, theirs)


def test_documents_in_a_row_are_those_documents_alone():
    x = inputs()
    whole, _ = run(x, STARTS)
    alone, _ = run({name: a[:1, 5:70] for name, a in x.items()})
    close(whole[:1, 5:70], alone)
    leaked, _ = run(x)
    assert np.abs(leaked[0, 130:] - whole[0, 130:]).max() > 0.1 * np.std(whole)  # it does make a difference


@pytest.mark.parametrize("slow", [SLOW, 10.0])
def test_gradients_are_those_of_the_definition(slow):
    x = inputs(slow=slow) | {"initial_state": STATE}
    weights = np.random.default_rng(3).normal(size=(B, T, N, HV)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x):
        def loss(x):
            out, state = ops.kimi_delta_attention(
                **x, is_start=jnp.asarray(STARTS), valid=jnp.asarray(VALID), implementation=implementation
            )
            return jnp.sum(out * weights) + jnp.sum(state**2)

        return jax.grad(loss)(x)

    with jax.enable_x64(True):
        want = jax.device_get(gradients("sequential", jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x)))
    got = gradients("chunked", jax.tree.map(jnp.asarray, x))
    for name in x:
        close(got[name], want[name], 1e-4)


GRADIENTS = """
import sys
import jax, jax.numpy as jnp
from maxlib import ops

def gradients(implementation, x):
    return jax.jit(jax.grad(lambda x: jnp.sum(ops.kimi_delta_attention(**x, implementation=implementation)[0] ** 2)))(x)

q, k, v, decay = jax.random.normal(jax.random.key(0), (4, *map(int, sys.argv[1:])))
x = {"q": q, "k": k, "v": v, "log_decay": -jax.nn.softplus(decay), "beta": jax.nn.sigmoid(v[..., 0])}
got, want = gradients("chunked", x), gradients("sequential", x)
for name in x:
    assert jnp.abs(got[name] - want[name]).max() < 1e-4 * jnp.std(want[name]), name
"""


@pytest.mark.full  # the same axes run by default in the comparisons of gradients
@pytest.mark.parametrize("shape", [(2, 128, 2, 8), (2, 150, 3, 8), (1, 256, 4, 32), (1, 512, 4, 128)])
def test_gradients_do_not_crash_xla(shape):
    """For `B T N H`, in a process of its own without the options of tests/conftest.py.

    XLA for CPUs (jax 0.10.2) crashes in `x y^T` of eight axes, which halves of chunks as axes of their own would have.
    """
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", GRADIENTS, *map(str, shape)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


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


def test_keys_of_length_zero_stay_finite():
    x = inputs(tokens=40)
    out, state = run(x | {name: np.zeros_like(x[name]) for name in "qk"})
    assert not np.asarray(out).any() and np.isfinite(state).all()


def test_the_state_is_float32_for_narrow_inputs():
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs(tokens=70))
    out, state = run(x)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    close(out.astype(np.float32), definition(**x)[0], 2e-2)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_devices_that_share_a_sequence_are_one(implementation):
    """Values, and gradients against float64; documents begin anywhere, and the last devices have padding only."""
    x = inputs(tokens=160)
    starts, valid = np.pad(STARTS, ((0, 0), (0, 10))), np.arange(160)[None] < np.array([[110], [160]])
    specs, tokens = dict.fromkeys(x, P(None, "context")), P(None, "context")

    def loss(rule, x):
        out, state = rule(x, starts, valid, STATE)
        return (out**2).sum() + (state**2).sum(), (out, state)

    def local(x, starts, valid, state):
        options = {"is_start": starts, "valid": valid, "initial_state": state, "implementation": implementation}
        return ops.kimi_delta_attention(**x, **options, axis_name="context")

    mesh, ends = sharding.make_mesh(context=8), {"in_specs": (specs, tokens, tokens, P()), "out_specs": (tokens, P())}
    split = jax.shard_map(local, mesh=mesh, **ends, check_vma=False)
    both = lambda rule, x: jax.jit(jax.grad(functools.partial(loss, rule), has_aux=True))(x)
    one = lambda *args: run(*args, "sequential")
    gradients, (out, state) = both(split, x)
    for ours, theirs in zip((out, state), both(one, x)[1], strict=True):
        close(ours, theirs, 1e-5)
    with jax.enable_x64(True):
        want = jax.device_get(both(one, jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x))[0])
    for name in x:
        close(gradients[name], want[name])


def test_memory_does_not_grow_with_the_state():
    """For a value four times as wide the op keeps no more for the backward pass than what it was given."""

    def kept(width: int) -> int:
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(tokens=4096).items()}
        x["v"] = jax.ShapeDtypeStruct((B, 4096, N, width), jnp.float32)
        _, backward = jax.eval_shape(lambda x: jax.vjp(lambda x: ops.kimi_delta_attention(**x)[0], x), x)
        return sum(a.size for a in jax.tree.leaves(backward))

    narrow, wide = kept(HV), kept(4 * HV)
    assert wide - narrow < B * 4096 * N * 3 * HV * 1.2  # the values themselves; a state is `HK` times as large


def test_flops_are_those_of_the_matmuls():
    """By the formula of the op."""
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(tokens=1024).items()}
    counted = forward_flops(lambda x: ops.kimi_delta_attention(**x)[0], x)
    assert counted == 2 * 1024 * B * N * (2 * 64 * HK + 64 * (HK + 2 * HV) + 3 * HK * HV)


def test_bad_input():
    x = jax.tree.map(jnp.asarray, inputs(tokens=3))
    with pytest.raises(ValueError, match="there must be at least one token"):
        ops.kimi_delta_attention(**{name: a[:, :0] for name, a in x.items()})
    with pytest.raises(ValueError, match="one of chunked, sequential"):
        ops.kimi_delta_attention(**x, implementation="fast")
