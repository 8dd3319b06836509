"""Latent attention against a float64 formula; decoding on latents against the full pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding

X = np.random.default_rng(0).normal(size=(2, 7, 16)).astype(np.float32)


@jax.jit
def run(layer, x):
    return layer(x)[0]


@jax.jit
def extend(layer, x, cache, length):
    """Results and the new cache, of which `length` tokens of each row are there before."""
    return layer(x, nn.make_context(*x.shape[:2], cache=nn.cache.Cache([cache], jnp.full(2, length, jnp.int32))), cache)


@jax.jit
def decoded(layer, x):
    """The result of one token behind five."""
    _, cache = extend.__wrapped__(layer, x[:, :5], layer.init_cache(2, 12, jnp.float32), 0)
    return extend.__wrapped__(layer, x[:, 5:6], cache, 5)[0]


SHARPER = nn.TemperatureTuning(2, 0.7, offset=0)  # in steps of two tokens


def build(q_rank, temperature=None, num_heads=3):
    rope = ops.Rope(4, interleaved=True)
    sizes = {"num_heads": num_heads, "kv_rank": 10, "nope_dim": 6, "v_dim": 5, "q_rank": q_rank}
    return nn.MLA(16, **sizes, rope=rope, temperature=temperature, rngs=nnx.Rngs(1))


def norm(x):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)


def turn(x):
    angle = np.arange(x.shape[1])[:, None] * 10_000.0 ** (-np.arange(2) / 2)
    pairs = x.reshape(*x.shape[:-1], 2, 2)
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * np.exp(1j * angle)[None, :, None]
    return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)


@pytest.mark.parametrize(("q_rank", "temperature"), [(None, None), (8, None), (8, SHARPER)])
def test_against_formula(q_rank, temperature):
    layer, x, w = build(q_rank, temperature), np.asarray(X, np.float64), lambda m: np.asarray(m.w[...], np.float64)
    rows = x if q_rank is None else norm(x @ w(layer.q_down).T)
    q = np.einsum("BTR,NHR->BTNH", rows, w(layer.q_up))
    down = x @ w(layer.kv_down).T
    latent, key = norm(down[..., :10]), turn(down[..., None, 10:])
    k = np.einsum("BTR,NHR->BTNH", latent, w(layer.k_up))
    q, k = np.concatenate([q[..., :6], turn(q[..., 6:])], -1), np.concatenate([k, np.repeat(key, 3, 2)], -1)
    s = np.einsum("BTNH,BSNH->BNTS", q, k) * 10**-0.5
    if temperature is not None:
        s *= 1 + 0.7 * np.log(1 + np.arange(7)[:, None] // 2)
    e = np.exp(s) * np.tri(7)
    out = np.einsum("BNTS,BSNH->BTNH", e / e.sum(-1, keepdims=True), np.einsum("BTR,NHR->BTNH", latent, w(layer.v_up)))
    np.testing.assert_allclose(run(layer, X), np.einsum("BTNH,DNH->BTD", out, w(layer.o)), atol=2e-6)


@pytest.mark.parametrize("temperature", [None, SHARPER])
def test_decoding_on_latents_equals_the_full_pass(temperature):
    layer = build(8, temperature)
    want = run(layer, X)
    for chunks in ([3, 1, 3], [1] * 7):
        cache, length, got = layer.init_cache(2, 12, jnp.float32), 0, []
        assert cache.latent.shape == (2, 12, 14)
        for size in chunks:
            y, cache = extend(layer, X[:, length : length + size], cache, length)
            got, length = [*got, y], length + size
        np.testing.assert_allclose(np.concatenate(got, axis=1), want, atol=2e-6, err_msg=str(chunks))


def test_an_implementation_is_asked_for_by_name_but_not_for_latents():
    layer = nn.with_attention(build(8), "splash")
    with pytest.raises(ValueError, match="splash was requested, but it runs on tpu, not on cpu"):
        run(layer, X)
    got, _ = extend(layer, X[:, :1], layer.init_cache(2, 12, jnp.float32), 0)
    np.testing.assert_allclose(got, run(build(8), X)[:, :1], atol=2e-6)


@pytest.mark.parametrize(
    ("axes", "rules"),
    [({"fsdp": 2, "tensor": 4}, sharding.FSDP_TP), ({"context": 8}, sharding.CP_RING)],
    ids=["heads", "ring"],
)
def test_decoding_on_latents_equals_one_device_where_heads_or_keys_are_split(axes, rules):
    layer = build(8, num_heads=4)
    want = decoded(layer, X)
    with sharding.use(sharding.Layout(sharding.make_mesh(**axes), rules)):
        np.testing.assert_allclose(decoded(layer, X), want, atol=2e-6)


@pytest.mark.parametrize(
    "dtype", [jnp.int8, pytest.param(jnp.float8_e4m3fn, marks=pytest.mark.full)], ids=["int8", "fp8"]
)
def test_a_quantized_latent_cache_is_near_the_exact_one(dtype):
    layer = build(8)
    exact, low = layer.init_cache(2, 12, jnp.float32), layer.init_cache(2, 12, dtype)
    norm = np.linalg.norm
    for start, size in ((0, 3), (3, 1)):
        x = X[:, start : start + size]
        (want, exact), (got, low) = jax.device_get([extend(layer, x, cache, start) for cache in (exact, low)])
        assert 0 < norm(got - want) < 0.05 * norm(want)
    assert isinstance(low, nn.cache.QuantizedLatentCache) and low.values.dtype == dtype and low.capacity == 12
    held, full = (np.asarray(cache.latent)[:, :6] for cache in (low, exact))
    for part in (slice(0, 10), slice(10, 14)):  # each has a scale of its own
        assert norm(held[..., part] - full[..., part]) < 0.03 * norm(full[..., part])
