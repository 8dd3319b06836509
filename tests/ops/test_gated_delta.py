"""What only the gated delta rule has: mixed decays, its gradient by hand, a triangle's inverse, FLOPs and errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import ops
from maxlib.observability import forward_flops
from maxlib.ops._gated_delta.inverse import unit_lower_inverse
from tests.ops.recurrences import GATED_DELTA, B, T, close, in_float64

K, N, HK, HV = 2, 4, 8, 6


def test_slow_decays_between_fast_ones():
    """Values and gradients: running sums of hundreds must leave no error in the small differences of a chunk."""
    x = GATED_DELTA.inputs()
    x["log_decay"] = np.where(np.random.default_rng(4).random((B, T, N)) < 0.5, 600 * x["log_decay"], x["log_decay"])

    @functools.partial(jax.jit, static_argnums=0)
    def both(implementation, x):
        rule = lambda x: ops.gated_delta_rule(**x, implementation=implementation)[0]
        return rule(x), jax.grad(lambda x: jnp.sum(rule(x) ** 2))(x)

    with jax.enable_x64(True):
        want = jax.device_get(both("sequential", in_float64(x)))
    jax.tree.map(lambda got, want: close(got, want, 2e-5), both("chunked", jax.tree.map(jnp.asarray, x)), want)


def test_gradients_without_documents_and_with_long_steps():
    """Of the outputs and the last state, in float32 and in bfloat16; steps up to 2."""
    x = GATED_DELTA.inputs() | {"initial_state": GATED_DELTA.initial_state()}
    x["beta"] = 2 * x["beta"]
    weights = np.random.default_rng(3).normal(size=(B, T, N, HV)).astype(np.float32)

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
    narrow = jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), GATED_DELTA.inputs(tokens=70))
    rule = lambda implementation: lambda x: jnp.sum(GATED_DELTA(x, implementation=implementation)[0] ** 2)
    got = jax.jit(jax.grad(rule("chunked")))(narrow)
    want = jax.jit(jax.grad(rule("sequential")))(jax.tree.map(lambda a: a.astype(jnp.float32), narrow))
    assert {a.dtype for a in got.values()} == {jnp.bfloat16.dtype}
    jax.tree.map(lambda got, want: close(got.astype(np.float32), want, 3e-2), got, want)


def test_gradients_within_other_transforms():
    """Row by row under vmap, in a rematerialised loop, and of gradients."""
    x = jax.tree.map(jnp.asarray, GATED_DELTA.inputs(tokens=70))
    rule = lambda x: jnp.sum(GATED_DELTA(x, implementation="chunked")[0] ** 2)
    one_row = lambda x: rule(jax.tree.map(lambda a: a[None], x))
    step = jax.checkpoint(lambda total, x: (total + one_row(x), None))
    want = jax.jit(jax.grad(rule))(x)
    for loss in (lambda x: jax.vmap(one_row)(x).sum(), lambda x: jax.lax.scan(step, 0.0, x)[0]):
        jax.tree.map(lambda got, want: close(got, want, 1e-5), jax.jit(jax.grad(loss))(x), want)

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


def test_flops_are_those_of_the_matmuls():
    """By the formula of the op, near what the trace of the chunks has."""
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in GATED_DELTA.inputs(tokens=1024).items()}
    counted = forward_flops(lambda x: ops.gated_delta_rule(**x)[0], x)
    C, tokens = 64, 1024 * B
    assert counted == 2 * tokens * (2 * K * C * HK + N * (C * (HK + 2 * HV) + 3 * HK * HV))


def test_bad_input():
    x = jax.tree.map(jnp.asarray, GATED_DELTA.inputs(tokens=3))
    with pytest.raises(ValueError, match="value heads must be a multiple"):
        ops.gated_delta_rule(**x | {"q": x["q"].repeat(3, 2), "k": x["k"].repeat(3, 2)})
    with pytest.raises(ValueError, match="one of mosaic_tpu, jax_linear_attention, fla, chunked, sequential"):
        ops.gated_delta_rule(**x, implementation="fast")
    with pytest.raises(ValueError, match="K=0"):
        ops.gated_delta_rule(**x | {"q": x["q"][:, :, :0], "k": x["k"][:, :, :0]})
