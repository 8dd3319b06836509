"""Attention to an earlier layer's keys: equal to that layer where its queries are the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops

X = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32)
MASKS = {"causal": ops.Causal(), "window": ops.Causal() & ops.SlidingWindow(5)}


def pair(mask, **options) -> tuple[nn.Attention, nn.SharedKVAttention]:
    heads = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mask": mask, "rope": ops.Rope(8), "scale": 0.7}
    norms = {"k_norm": nn.norm.UnitRMSNorm(), "v_norm": nn.norm.UnitRMSNorm()}
    first = nn.Attention(16, **heads, **norms, **options, rngs=nnx.Rngs(0))
    second = nn.SharedKVAttention(16, **heads, rngs=nnx.Rngs(1))
    second.q, second.o = first.q, first.o
    return first, second


@pytest.mark.parametrize("mask", [pytest.param("causal", marks=pytest.mark.full), "window"])
def test_equal_queries_get_equal_results_with_and_without_a_cache(mask):
    first, second = pair(MASKS[mask])

    @jax.jit
    def step(x, valid, cache):
        masks = () if cache is None else (first.mask,)
        ctx = nn.make_context(*x.shape[:2], valid=valid, cache=cache, masks=masks)
        y, layer, kv = first.with_kv(x, ctx, cache and cache.layers)
        return y, second(x, ctx, kv)[0], cache and cache.advanced(layer, ctx)

    want, got, _ = step(X, None, None)
    np.testing.assert_array_equal(got, want)
    cache = nn.cache.Cache(first.init_cache(2, 12, jnp.float32), jnp.zeros(2, jnp.int32))
    for start, stop in ((0, 7), (7, 8), (8, 12)):  # longer than the window, one token, several
        first_result, second_result, cache = step(X[:, start:stop], None, cache)
        np.testing.assert_array_equal(second_result, first_result)
        np.testing.assert_allclose(second_result, want[:, start:stop], atol=1e-6)


def test_int8_keys_are_shared_as_they_are_read():
    first, second = pair(ops.Causal())

    @jax.jit
    def run(x):
        cache = nn.cache.Cache(first.init_cache(1, 8, jnp.int8), jnp.zeros(1, jnp.int32))
        ctx = nn.make_context(1, 6, cache=cache)
        y, _, kv = first.with_kv(x, ctx, cache.layers)
        return second(x, ctx, kv)[0], y

    np.testing.assert_array_equal(*run(X[:1, :6]))
    assert second.init_cache(1, 8, jnp.int8) is None


def test_keys_as_values_are_the_projection_before_its_norm_and_rotation():
    attn, _ = pair(ops.Causal(), keys_as_values=True)
    x = X[:1, :6]
    _, _, v = jax.jit(lambda x: attn.project(x, nn.make_context(1, 6)))(x)
    raw = np.einsum("btd,khd->btkh", np.float64(x), np.float64(attn.k.w[...]))
    np.testing.assert_allclose(v, raw / np.sqrt((raw**2).mean(-1, keepdims=True) + 1e-6), atol=1e-6)
    assert attn.v is None and "keys as values" in attn.features


def test_keys_of_another_shape_are_refused():
    _, second = pair(ops.Causal())
    x = jnp.zeros((1, 3, 16))
    with pytest.raises(ValueError, match="2 heads of width 8; got None"):
        second(x)
    ends = jnp.zeros((1, 3), jnp.int32)
    kv = nn.cache.SharedKV(jnp.zeros((1, 3, 2, 4)), jnp.zeros((1, 3, 2, 4)), ends, ends)
    with pytest.raises(ValueError, match=r"2 heads of width 8; got \(1, 3, 2, 4\)"):
        second(x, None, kv)


def test_a_vector_for_each_layer_in_float64():
    """`(table[id] sqrt(P) + norm(proj(x) / sqrt(D))) / sqrt(2)`, and `norm(proj(gelu(gate(x)) vector))`."""
    embed = nn.per_layer.PerLayerEmbed(11, 6, 3, 4, rngs=nnx.Rngs(0))
    gate = nn.per_layer.PerLayerGate(6, 4, rngs=nnx.Rngs(1))
    x, ids = X[:, :5, :6], np.arange(10).reshape(2, 5)
    norm = lambda y: y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)
    f64 = lambda p: np.asarray(p.w[...], np.float64)
    x64 = np.asarray(x, np.float64)
    seen = norm((x64 @ f64(embed.proj).T / np.sqrt(6)).reshape(2, 5, 3, 4))
    want = (2 * f64(embed.embed)[ids].reshape(2, 5, 3, 4) + seen) / np.sqrt(2)
    got = jax.jit(embed)(x, ids)
    np.testing.assert_allclose(got, np.moveaxis(want, 2, 0), atol=1e-5)
    g = x64 @ f64(gate.gate).T
    gelu = 0.5 * g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3)))
    np.testing.assert_allclose(jax.jit(gate)(x, got[1]), norm((gelu * want[:, :, 1]) @ f64(gate.proj).T), atol=1e-5)
