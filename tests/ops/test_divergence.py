"""Divergences of two models against float64 formulas, one device, and their bound on memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.ops import divergence, fused_linear_divergence, fused_linear_gather_log_probs, fused_linear_top_k
from tests.ops.test_cross_entropy import B, T, V, close, inputs, mesh  # noqa: F401

P = jax.sharding.PartitionSpec
E = 5  # the teacher's width


def teacher():
    rng = np.random.default_rng(7)
    return tuple(jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in ((B, T, E), (V, E)))


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def truth(hidden, weight, teacher_hidden, teacher_weight, factors, beta, temperature, softcap):
    """Divergence in float64, and gradients of `sum(factors * divergence)`: `dz = q (g - sum(q g))`, g = dD/dlog q."""
    h, w, g, v = (np.asarray(x, np.float64) for x in (hidden, weight, teacher_hidden, teacher_weight))
    raw = h @ w.T
    capped = raw if softcap is None else softcap * np.tanh(raw / softcap)
    log_q, log_p = log_softmax(capped / temperature), log_softmax(g @ v.T / temperature)
    q, p = np.exp(log_q), np.exp(log_p)
    if beta == 0:
        value, slope = p * (log_p - log_q), -p
    elif beta == 1:
        value, slope = q * (log_q - log_p), q * (log_q - log_p + 1)
    else:
        m = beta * p + (1 - beta) * q
        value = beta * p * (log_p - np.log(m)) + (1 - beta) * q * (log_q - np.log(m))
        slope = (1 - beta) * q * (log_q - np.log(m))  # what M does cancels
    dz = factors[..., None] * (slope - q * slope.sum(-1, keepdims=True)) / temperature
    dz = dz if softcap is None else dz * (1 - np.tanh(raw / softcap) ** 2)
    return value.sum(-1), (dz @ w, np.einsum("btv,btd->vd", dz, h))


@pytest.mark.parametrize(
    ("beta", "temperature", "softcap", "chunk"),
    [
        (0.0, 1.0, None, None),
        (1.0, 0.7, None, 4),
        (0.3, 1.7, 3.0, 5),
        pytest.param(0.5, 1.0, None, 1, marks=pytest.mark.full),
    ],
)
def test_values_and_gradients(beta, temperature, softcap, chunk):
    hidden, weight, targets, _ = inputs()
    mask, factors = targets >= 0, np.random.default_rng(1).normal(size=(B, T))
    poisoned = jnp.where(mask[..., None], hidden, jnp.nan)
    options = {"beta": beta, "temperature": temperature, "softcap": softcap, "chunk": chunk}

    def total(hidden, weight):
        out = fused_linear_divergence(hidden, weight, *teacher(), where=mask, **options)
        return jnp.sum(factors * out), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))(poisoned, weight)
    want, want_grads = truth(hidden, weight, *teacher(), factors * mask, beta, temperature, softcap)
    close(out, want * np.asarray(mask), 1e-5)
    for got, expected in zip(grads, want_grads, strict=True):
        close(got, expected, 1e-5)
    assert (np.asarray(out) >= 0).all()


def test_of_equal_distributions_and_of_impossible_tokens():
    log_p = jnp.log(jnp.array([0.5, 0.5, 0.0]))
    log_q = jnp.log(jnp.array([0.25, 0.25, 0.5]))
    for beta in (0.0, 0.5, 1.0):
        assert divergence(log_p, log_p, beta=beta) == 0
    np.testing.assert_allclose(divergence(log_q, log_p, beta=0.0), np.log(2), rtol=1e-6)
    near = [float(divergence(log_q, log_p, beta=beta)) / beta for beta in (1e-3, 2e-3)]
    np.testing.assert_allclose(near, np.log(2), rtol=1e-2)  # vanishes like beta: no way to the forward divergence


def test_no_gradient_reaches_the_teacher():
    hidden, weight, *_ = inputs()
    total = lambda *args: jnp.sum(fused_linear_divergence(*args, beta=0.3))
    grads = jax.jit(jax.grad(total, (2, 3)))(hidden, weight, *teacher())
    assert all((np.asarray(g) == 0).all() for g in grads)


@pytest.mark.parametrize("check", [True, pytest.param(False, marks=pytest.mark.full)])
def test_split_vocabulary_equals_one_device(mesh, check):  # noqa: F811
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape).astype(np.float32))
    hidden, weight, theirs, table = make(8, T, 8), make(32, 8), make(8, T, E), make(32, E)
    factors = make(8, T)

    def both(hidden, weight, theirs, table, axis_name=None):
        values, ids = fused_linear_top_k(theirs, table, 3, chunk=3, axis_name=axis_name)
        ours = fused_linear_gather_log_probs(hidden, weight, ids, chunk=3, axis_name=axis_name)
        options = {"beta": 0.3, "temperature": 1.3, "chunk": 3, "axis_name": axis_name}
        return fused_linear_divergence(hidden, weight, theirs, table, **options), ours, values, ids

    def split(*args):
        local = lambda *args: both(*args, axis_name="tensor")
        specs = (P("data"), P("tensor"), P("data"), P("tensor"))
        return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=check)(*args)

    def total(run):
        def value(hidden, weight):
            out = run(hidden, weight, theirs, table)
            return jnp.sum(factors * out[0]) + jnp.sum(factors[..., None] * out[1]), out

        return jax.jit(jax.value_and_grad(value, (0, 1), has_aux=True))

    jax.tree.map(lambda a, b: close(a, b, 1e-5), total(split)(hidden, weight), total(both)(hidden, weight))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"beta": 1.1}, r"beta must lie in \[0, 1\]"),
        ({"chunk": 0}, "chunk must be at least 1 token"),
        ({"teacher_weight": jnp.zeros((V + 1, E))}, f"the same vocabulary; the student's has {V} tokens"),
        ({"teacher_hidden": jnp.zeros((B, T + 1, E))}, "must get the same tokens"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    hidden, weight, *_ = inputs()
    theirs = dict(zip(("teacher_hidden", "teacher_weight"), teacher(), strict=True))
    with pytest.raises(ValueError, match=message):
        fused_linear_divergence(hidden, weight, **(theirs | options))
    with pytest.raises(ValueError, match=f"k must be between 1 and the {V} tokens"):
        fused_linear_top_k(hidden, weight, V + 1)
