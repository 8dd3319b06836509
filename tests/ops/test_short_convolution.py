"""The short convolution against its definition in numpy: documents, padding, tails, devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import ops, sharding

B, T, C, W = 2, 24, 5, 4
RNG = np.random.default_rng(0)
X, WEIGHT, BIAS = (RNG.normal(size=shape).astype(np.float32) for shape in ((B, T, C), (C, W), (C,)))
STARTS = np.zeros((B, T), bool)
STARTS[0, [0, 7, 8, 20]] = STARTS[1, 3] = True


def definition(x, tail, starts):
    """Tap by tap; a tap ends where its document begins."""
    y = np.zeros(x.shape, np.float64)
    for b, t in np.ndindex(x.shape[:2]):
        for back in range(W):
            if t - back >= 0:
                y[b, t] += WEIGHT[:, W - 1 - back] * x[b, t - back]
            else:
                y[b, t] += WEIGHT[:, W - 1 - back] * tail[b, W - 1 + t - back]
            if t - back >= 0 and starts[b, t - back]:
                break
    return y + BIAS


TAIL = RNG.normal(size=(B, W - 1, C)).astype(np.float32)
run = jax.jit(lambda x, tail, starts, valid: ops.short_convolution(
    x, jnp.asarray(WEIGHT), bias=jnp.asarray(BIAS), tail=tail, is_start=starts, valid=valid
))  # fmt: skip


def test_it_is_its_definition():
    np.testing.assert_allclose(run(X, TAIL, STARTS, None)[0], definition(X, TAIL, STARTS), atol=1e-5)


def test_a_tail_carries_a_sequence_over():
    """One by one and several at once, rows of different lengths, in the end a row that begins anew."""
    tail, outputs, done = np.zeros((B, W - 1, C), np.float32), np.zeros((B, T, C)), np.zeros(B, int)
    for new in ((4, 2), (1, 1), (2, 0), (0, 2), (1, 1), (8, 5), (2, 2)):
        at = done[:, None] + np.arange(8)
        valid = np.arange(8) < np.array(new)[:, None]
        part = np.where(valid[..., None], np.take_along_axis(X, np.minimum(at, T - 1)[..., None], 1), 99.0)
        y, tail = run(part.astype(np.float32), tail, np.zeros((B, 8), bool), valid)
        for b, n in enumerate(new):
            outputs[b, done[b] : done[b] + n] = y[b, :n]
        done += new
    want = definition(X, np.zeros((B, W - 1, C)), np.zeros((B, T), bool))
    for b, n in enumerate(done):
        np.testing.assert_allclose(outputs[b, :n], want[b, :n], atol=1e-5)
    first = np.zeros((B, 8), bool)
    first[:, 0] = True
    _, tail = run(X[:, :8], tail, first, np.arange(8)[None] < np.ones((B, 1)))
    np.testing.assert_array_equal(tail[:, :-1], 0)  # nothing is left of what was there before
    np.testing.assert_array_equal(tail[:, -1], X[:, 0])


@pytest.mark.parametrize("lengths", [(24, 24), (5, 1)])
def test_devices_that_share_a_sequence_are_one(lengths):
    """With three tokens to a device, documents that begin anywhere, and devices that have padding only."""
    valid, tokens = np.arange(T)[None] < np.array(lengths)[:, None], P(None, "context")

    def local(x, starts, valid):
        return ops.short_convolution(
            x,
            jnp.asarray(WEIGHT),
            bias=jnp.asarray(BIAS),
            tail=jnp.asarray(TAIL),
            is_start=starts,
            valid=valid,
            axis_name="context",
        )

    mesh = sharding.make_mesh(context=8)
    split = jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=(tokens, P()), check_vma=False)
    for starts in (STARTS, np.zeros_like(STARTS)):
        got, want = jax.jit(split)(X, starts, valid), run(X, TAIL, starts, valid)
        np.testing.assert_allclose(np.asarray(got[0])[valid], np.asarray(want[0])[valid], atol=1e-6)
        np.testing.assert_array_equal(got[1], want[1])


def test_channels_may_have_several_axes():
    plain = jax.jit(lambda x, weight: ops.short_convolution(x, weight)[0])
    heads = plain(X.reshape(B, T, 5, 1), WEIGHT.reshape(5, 1, W))
    np.testing.assert_array_equal(np.reshape(heads, (B, T, C)), plain(X, WEIGHT))


def test_gradients_are_those_of_sums():
    """Against numpy in float64; the last tap first, documents and the tail included."""
    weights = RNG.normal(size=X.shape).astype(np.float32)
    loss = lambda x, taps, bias, tail: jnp.sum(
        weights * ops.short_convolution(x, taps, bias=bias, tail=tail, is_start=jnp.asarray(STARTS))[0]
    )
    got = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(X, WEIGHT, BIAS, TAIL)
    of_x, of_taps, of_tail = (np.zeros(a.shape) for a in (X, WEIGHT, TAIL))
    for b, t, back in np.ndindex(B, T, W):
        if STARTS[b, max(0, t - back + 1) : t + 1].any():
            continue  # its input is of another document
        source, gradient, at = (X, of_x, t - back) if t >= back else (TAIL, of_tail, W - 1 + t - back)
        gradient[b, at] += WEIGHT[:, W - 1 - back] * weights[b, t]
        of_taps[:, W - 1 - back] += source[b, at] * weights[b, t].astype(np.float64)
    for ours, theirs in zip(got, (of_x, of_taps, weights.sum((0, 1)), of_tail), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_an_activation_keeps_only_the_inputs_for_the_backward_pass():
    x, weight = jnp.asarray(X), jnp.asarray(WEIGHT)
    inside = lambda x: ops.short_convolution(x, weight, act=jax.nn.silu)[0]
    outside = lambda x: jax.nn.silu(ops.short_convolution(x, weight)[0])
    for got, want in zip(
        *(jax.jit(lambda x, run=run: jax.vjp(run, x)[1](x)[0])(x) for run in (inside, outside)), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)
    np.testing.assert_array_equal(jax.jit(inside)(x), jax.jit(outside)(x))
    kept = jax.tree.leaves(jax.eval_shape(lambda x: jax.vjp(inside, x)[1], x))
    assert sum(a.size for a in kept) <= X.size + WEIGHT.size + B * (W - 1) * C
