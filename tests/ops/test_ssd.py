"""State-space duality against its definition in float64: values, gradients, documents, padding, states, devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding
from maxlib.observability import forward_flops
from maxlib.ops._ssd.chunked import SSDTiles

B, T, G, N, WIDTH, SIZE = 2, 150, 2, 6, 5, 7  # chunks and a part of one; three heads to a group
SLOW = 0.05  # rates: a state that is not reset shows hundreds of tokens later


def inputs(seed: int = 0, tokens: int = T, slow: float = SLOW) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
    return {
        "x": normal(B, tokens, N, WIDTH),
        "dt": np.log1p(np.exp(normal(B, tokens, N))),
        "a": -slow * np.exp(0.3 * normal(N)),
        "b": normal(B, tokens, G, SIZE),
        "c": normal(B, tokens, G, SIZE),
        "d": normal(N),
    }


def cut(x: dict[str, np.ndarray], rows, tokens) -> dict[str, np.ndarray]:
    return {name: part if part.ndim == 1 else part[rows, tokens] for name, part in x.items()}


def definition(x, dt, a, b, c, d, is_start=None, valid=None, state=None):
    """Row by row, head by head and token by token."""
    x, dt, a, b, c, d = (np.asarray(part, np.float64) for part in (x, dt, a, b, c, d))
    out, last = np.zeros(x.shape), np.zeros((*x.shape[::2], x.shape[-1], b.shape[-1]))
    for row, n in np.ndindex(last.shape[:2]):
        group = n // (x.shape[2] // b.shape[2])
        S = last[row, n] if state is None else np.asarray(state, np.float64)[row, n].copy()
        for t in range(x.shape[1]):
            if valid is not None and not valid[row, t]:
                continue
            step = dt[row, t, n]
            S = np.zeros_like(S) if is_start is not None and is_start[row, t] else np.exp(step * a[n]) * S
            S = S + step * np.outer(x[row, t, n], b[row, t, group])
            out[row, t, n] = S @ c[row, t, group] + d[n] * x[row, t, n]
        last[row, n] = S
    return out, last


@functools.partial(jax.jit, static_argnames="implementation")
def run(inputs, is_start=None, valid=None, initial_state=None, implementation="chunked"):
    return ops.ssd(**inputs, is_start=is_start, valid=valid, initial_state=initial_state, implementation=implementation)


def close(got, want, atol=1e-5):
    np.testing.assert_allclose(got, want, rtol=0, atol=atol * np.std(want))


STATE = np.random.default_rng(9).normal(size=(B, N, WIDTH, SIZE)).astype(np.float32)
STARTS = np.zeros((B, T), bool)
STARTS[0, [0, 5, 70, 71, 128]] = STARTS[1, [64, 100]] = True  # within a chunk, at its border, two in a chunk
VALID = np.ones((B, T), bool)
VALID[0, 90:128] = VALID[1, 140:] = False  # before a document, and at the end


@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_it_is_its_definition(implementation):
    """With documents, padding, a state before the first token, and heads that share groups."""
    got = run(inputs(), STARTS, VALID, STATE, implementation)
    want = definition(**inputs(), is_start=STARTS, valid=VALID, state=STATE)
    for ours, theirs in zip(got, want, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("slow", [3e-3, pytest.param(40.0, marks=pytest.mark.full)])
def test_fast_and_slow_decays(slow):
    """Fast ones would overflow above the diagonal; with slow ones errors would add up."""
    x = inputs(slow=slow)
    close(run(x)[0], definition(**x)[0], 2e-5)


def test_documents_in_a_row_are_those_documents_alone():
    x = inputs()
    whole, _ = run(x, STARTS)
    alone, _ = run(cut(x, slice(1), slice(5, 70)))
    close(whole[:1, 5:70], alone)
    leaked, _ = run(x)
    assert np.abs(leaked[0, 130:] - whole[0, 130:]).max() > 0.1 * np.std(whole)  # it does make a difference


def test_gradients_are_those_of_the_definition():
    x = inputs() | {"initial_state": STATE}
    weights = np.random.default_rng(3).normal(size=(B, T, N, WIDTH)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(implementation, x):
        def loss(x):
            masks = {"is_start": jnp.asarray(STARTS), "valid": jnp.asarray(VALID)}
            out, state = ops.ssd(**x, **masks, implementation=implementation)
            return jnp.sum(out * weights) + jnp.sum(state**2)

        return jax.grad(loss)(x)

    with jax.enable_x64(True):
        want = jax.device_get(gradients("sequential", jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), x)))
    got = gradients("chunked", jax.tree.map(jnp.asarray, x))
    for name in x:
        close(got[name], want[name], 1e-4)


def test_a_state_carries_a_sequence_over():
    """In pieces, of many tokens and of one, each beginning with the state that the one before left."""
    x, state, found = inputs(), jnp.zeros((B, N, WIDTH, SIZE)), []
    for begin, end in ((0, 100), (100, 101), (101, 105), (105, T)):
        out, state = run(cut(x, slice(None), slice(begin, end)), None, None, state, None)
        found.append(out)
    want, last = definition(**x)
    close(np.concatenate(found, axis=1), want)
    close(state, last)


def test_padding_leaves_the_state_as_it_is():
    x, valid = inputs(tokens=40), np.arange(40)[None] < np.array([[23], [0]])
    out, state = run(x, None, valid, STATE)
    assert not np.asarray(out)[~valid].any()
    np.testing.assert_array_equal(state[1], STATE[1])
    close(state[:1], run(cut(x, slice(1), slice(23)), None, None, STATE[:1])[1])


def test_the_state_is_float32_for_narrow_inputs():
    x = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), inputs(tokens=70))
    out, state = run(x)
    assert (out.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    close(out.astype(np.float32), definition(**x)[0], 2e-2)


@pytest.mark.full
@pytest.mark.parametrize("implementation", ["chunked", "sequential"])
def test_devices_that_share_a_sequence_are_one(implementation):
    """Values and gradients; documents begin anywhere, and the last devices have padding only."""
    x = inputs(tokens=160)
    starts, valid = np.pad(STARTS, ((0, 0), (0, 10))), np.arange(160)[None] < np.array([[110], [160]])
    tokens = P(None, "context")
    specs = {name: P() if part.ndim == 1 else tokens for name, part in x.items()}

    def loss(rule, x):
        out, state = rule(x, starts, valid, STATE)
        return (out**2).sum() + (state**2).sum(), (out, state)

    def local(x, starts, valid, state):
        options = {"is_start": starts, "valid": valid, "initial_state": state, "implementation": implementation}
        return ops.ssd(**x, **options, axis_name="context")

    mesh, ends = sharding.make_mesh(context=8), {"in_specs": (specs, tokens, tokens, P()), "out_specs": (tokens, P())}
    split = jax.shard_map(local, mesh=mesh, **ends, check_vma=False)
    both = lambda rule: jax.jit(jax.grad(functools.partial(loss, rule), has_aux=True))(x)
    got, want = both(split), both(lambda *args: run(*args, "sequential"))
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        close(ours, theirs, 1e-5)


def test_memory_does_not_grow_with_the_state():
    """For a state four times as wide the op keeps no more for the backward pass than what it was given, and one state
    for each block.
    """
    tokens = 4096

    def kept(size: int) -> int:
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(tokens=tokens).items()}
        x |= dict.fromkeys("bc", jax.ShapeDtypeStruct((B, tokens, G, size), jnp.float32))
        _, backward = jax.eval_shape(lambda x: jax.vjp(lambda x: ops.ssd(**x)[0], x), x)
        return sum(a.size for a in jax.tree.leaves(backward))

    narrow, wide = kept(SIZE), kept(4 * SIZE)
    # b and c, and a state for each of four blocks; a state for each token would be 1024 times as much.
    assert wide - narrow <= 3 * SIZE * B * (2 * tokens * G + 8 * N * WIDTH) * 1.2


def test_flops_are_those_of_the_matmuls():
    """By the formula of the op."""
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in inputs(tokens=1024).items()}
    counted = forward_flops(lambda x: ops.ssd(**x)[0], x)
    chunk = SSDTiles().chunk
    assert counted == 2 * 1024 * B * (G * chunk * SIZE + N * (chunk * WIDTH + 2 * WIDTH * SIZE))


def test_bad_input():
    x = jax.tree.map(jnp.asarray, inputs(tokens=3))
    with pytest.raises(ValueError, match="heads must be a multiple of the G groups"):
        ops.ssd(**x | {"b": x["b"].repeat(2, 2), "c": x["c"].repeat(2, 2)})
    with pytest.raises(ValueError, match="one of chunked, sequential"):
        ops.ssd(**x, implementation="fast")
