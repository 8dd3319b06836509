"""The specification itself, against a numpy formula, against jax.nn, and its gradients against finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from maxlib.ops._attention.split_kv import split_kv
from tests.ops.attention import cases
from tests.ops.attention.kernels import by_name, reference

CASE = cases.Case(heads=(4, 2), widths=(6, 4), lengths=(9, 14), softcap=2.0, sinks=True, bias=(True, True))


def formula(q, k, v, start, end, scale, softcap=None, sinks=None, bias=None):
    """Row by row, as a textbook has it."""
    B, T, N, _ = q.shape
    out, lse = np.zeros((B, T, N, v.shape[-1])), np.full((B, T, N), -np.inf)
    for b, t, n in np.ndindex(B, T, N):
        seen, head = slice(start[b, t], max(start[b, t], end[b, t])), n // (N // k.shape[2])
        logits = scale * (k[b, seen, head] @ q[b, t, n])
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        logits = logits if bias is None else logits + np.broadcast_to(bias, (B, N, *bias.shape[2:]))[b, n, t, seen]
        total = np.exp(logits).sum() + (0 if sinks is None else np.exp(sinks[n]))
        if total > 0:
            out[b, t, n], lse[b, t, n] = np.exp(logits) @ v[b, seen, head] / total, np.log(total)
    return out, lse


@pytest.mark.parametrize("case", [CASE, cases.Case((3, 3), (4, 4), (9, 9), None, False, None)], ids=str)
@pytest.mark.parametrize("documents", cases.DOCUMENTS)
def test_equals_the_textbook(case, documents, float64):
    inputs = cases.arrays(case)
    start, end = cases.bounds("window", documents, case.lengths)
    options = {"scale": 0.7, "softcap": case.softcap, "sinks": inputs["sinks"], "bias": inputs["bias"]}
    run = jax.jit(functools.partial(reference, scale=options.pop("scale"), softcap=options.pop("softcap")))
    got = run(inputs["q"], inputs["k"], inputs["v"], k_start=start, k_end=end, **options)
    options |= {"scale": 0.7, "softcap": case.softcap}
    options = jax.tree.map(np.asarray, options)
    want = formula(*(np.asarray(x) for x in (inputs["q"], inputs["k"], inputs["v"], start, end)), **options)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("window", [None, 5])
def test_equals_jax_nn(window, float64):
    case = cases.Case((4, 2), (8, 8), (21, 21), None, False, (True, True))
    inputs = cases.arrays(case)
    start, end = cases.bounds("causal" if window is None else "window", "one", case.lengths)
    start = start if window is None else jnp.maximum(end - window, 0)
    ours = lambda q, k, v, bias: reference(q, k, v, k_start=start, k_end=end, scale=8**-0.5, bias=bias)[0]
    theirs = lambda q, k, v, bias: jax.nn.dot_product_attention(
        q, k, v, bias, is_causal=True, local_window_size=None if window is None else (window - 1, 0)
    )
    x = [inputs[name] for name in ("q", "k", "v", "bias")]

    @jax.jit
    def results(d_out, *x):
        (got, got_vjp), (want, want_vjp) = jax.vjp(ours, *x), jax.vjp(theirs, *x)
        return got, want, got_vjp(d_out), want_vjp(d_out)

    got, want, got_gradients, want_gradients = results(inputs["d_out"], *x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)  # theirs has a softmax in float32
    for a, b in zip(got_gradients, want_gradients, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("documents", ["one", "padded"])
def test_gradients_equal_finite_differences(sinks, documents, float64):
    inputs = cases.arrays(CASE)
    start, end = cases.bounds("window", documents, CASE.lengths)
    names = ["q", "k", "v", "bias"] + ["sinks"] * sinks

    @jax.jit
    def results(*x):
        inputs = dict(zip(names, map(jnp.asarray, x), strict=True))
        out, lse = reference(**inputs, k_start=start, k_end=end, scale=0.7, softcap=2.0)
        return out, jnp.where(jnp.isfinite(lse), lse, 0.0)

    check_grads(results, [inputs[name] for name in names], order=1, modes=["rev"], atol=1e-6, rtol=1e-6)


def test_split_keys_of_an_empty_interval_weigh_nothing():
    """Their logits sum to nothing, so that a merge with other keys leaves those alone."""
    q, k, v = (np.ones((1, n, 2, 4), np.float32) for n in (2, 8, 8))
    start, end = np.array([[0, 3]]), np.array([[5, 3]])
    run = jax.jit(functools.partial(by_name(split_kv), scale=0.5))
    out, total = map(np.asarray, run(q, k, v, k_start=start, k_end=end))
    assert np.isfinite(total[0, 0]).all() and (total[0, 1] == -np.inf).all() and (out[0, 1] == 0).all()
