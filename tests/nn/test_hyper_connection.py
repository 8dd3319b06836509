"""Hyper-connections against the formula in float64, and experts chosen by a table of ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn
from maxlib.nn._streams import sinkhorn

N, D = 3, 8


def test_it_computes_the_formula():
    connection = nn.HyperConnection(D, streams=N, sinkhorn_steps=5, eps=1e-3, rngs=nnx.Rngs(0))
    connection.scale[...] = jnp.array([0.7, 1.3, 2.0])
    connection.bias[...] = jax.random.normal(jax.random.key(1), (2 + N) * N)
    x, h = (np.asarray(jax.random.normal(jax.random.key(i), s)) for i, s in ((2, (2, 4, N, D)), (3, (2, 4, D))))
    w, bias = np.asarray(connection.mix.w[...], np.float64), np.asarray(connection.bias[...], np.float64)

    @jax.jit
    def run(connection, x, h):
        branch, mix = connection.read(x)
        return branch, connection.write(x, h, mix, "mlp")

    got_input, got = run(connection, x, h)
    for place in np.ndindex(2, 4):
        streams = x[place].astype(np.float64)
        flat = streams.reshape(-1) / np.sqrt(np.mean(streams**2) + 1e-6)
        products = w @ flat
        sigmoid = lambda a: 1 / (1 + np.exp(-a))
        pre = sigmoid(0.7 * products[:N] + bias[:N]) + 1e-3
        post = 2 * sigmoid(1.3 * products[N : 2 * N] + bias[N : 2 * N])
        comb = np.exp((2.0 * products[2 * N :] + bias[2 * N :]).reshape(N, N))
        comb = comb / comb.sum(axis=1, keepdims=True) + 1e-3
        comb = comb / (comb.sum(axis=0, keepdims=True) + 1e-3)
        for _ in range(4):
            comb = comb / (comb.sum(axis=1, keepdims=True) + 1e-3)
            comb = comb / (comb.sum(axis=0, keepdims=True) + 1e-3)
        np.testing.assert_allclose(got_input[place], pre @ streams, atol=1e-5)
        want = post[:, None] * h[place] + comb.T @ streams
        np.testing.assert_allclose(got[place], want, atol=1e-5)


def test_sinkhorn_makes_matrices_doubly_stochastic():
    matrix = sinkhorn(jnp.exp(jax.random.normal(jax.random.key(0), (5, 4, 4))), 40)
    np.testing.assert_allclose(matrix.sum(axis=-1), 1, atol=1e-5)
    np.testing.assert_allclose(matrix.sum(axis=-2), 1, atol=1e-5)


def test_a_hash_router_chooses_by_id_and_weighs_by_score():
    options = {"score": nn.router.sqrt_softplus, "scale": 1.5}
    router = nn.HashRouter(D, 6, vocab=12, top_k=2, rngs=nnx.Rngs(0), **options)
    table = np.asarray(router.table[...])
    assert np.array_equal(np.bincount(table.reshape(-1)), [4] * 6) and all(len({*row}) == 2 for row in table)
    x, tokens = jax.random.normal(jax.random.key(1), (1, 5, D)), jnp.array([[3, 3, 0, 11, 7]])
    routing = jax.jit(lambda router, *inputs: router(*inputs))(router, x, tokens)
    assert np.array_equal(routing.experts, table[np.asarray(tokens)])
    scores = np.sqrt(np.log1p(np.exp(np.asarray(x, np.float64) @ np.asarray(router.gate.w[...], np.float64).T)))
    chosen = np.take_along_axis(scores, np.asarray(routing.experts), axis=-1)
    np.testing.assert_allclose(routing.weights, 1.5 * chosen / chosen.sum(axis=-1, keepdims=True), rtol=1e-5)
    moe = nn.MoE(D, 4, router=router, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="layers_take_tokens = True"):
        jax.eval_shape(moe, x)
    y, aux = jax.jit(lambda moe, x: moe(x, nn.make_context(1, 5, tokens=tokens)))(moe, x)
    assert y.shape == x.shape and "moe/load" in aux and "moe/counts" not in aux  # there is no bias to move


def test_scores_far_below_zero_have_a_finite_gradient():
    assert np.isfinite(jax.grad(lambda x: nn.router.sqrt_softplus(x).sum())(jnp.array([-200.0, 0.0]))).all()
