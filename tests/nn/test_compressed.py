"""Attention to a window and compressed keys: documents that begin anywhere, caches, and chosen keys that are gathered.

Families compare it with transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.nn.attention import _entries

SIZES = {"num_heads": 4, "head_dim": 16, "q_rank": 24, "groups": 2, "group_rank": 20, "window": 6, "rope": ops.Rope(8)}
INDEX = {"num_heads": 16, "head_dim": 8, "top_k": 3}
T = 40


@pytest.fixture(scope="module")
def attn():
    return nn.CompressedAttention(32, **SIZES, rate=4, overlap=True, index=INDEX, rngs=nnx.Rngs(1))


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(0), (1, T, 32))


@jax.jit
def run(attn, x, segments):
    return attn(x, nn.make_context(*segments.shape, segment_ids=segments))[0]


def test_gathered_keys_equal_masked_ones(attn, x, monkeypatch):
    def both(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(attn(x)[0])))(x)

    monkeypatch.setattr(_entries, "GATHER_FROM", 1)
    gathered = jax.jit(both)(x)
    monkeypatch.setattr(_entries, "GATHER_FROM", T)
    for got, want in zip(gathered, jax.jit(lambda x: both(x))(x), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_documents_are_alone_and_see_complete_keys_only(attn, x):
    """Of 3 tokens, fewer than a key has, of 18 and of 17, with padding between; no later token has an effect."""
    lengths = (3, 18, 2, 17)
    got = run(attn, x, jnp.asarray(np.repeat([1, 2, 0, 3], lengths))[None])
    for start, stop in ((0, 3), (3, 21), (23, 40)):
        alone = jnp.roll(x, -start, axis=1)
        want = run(attn, alone, jnp.asarray(np.arange(T) < stop - start, jnp.int32)[None])
        np.testing.assert_allclose(got[:, start:stop], want[:, : stop - start], atol=1e-5)
    one = jnp.ones((1, T), jnp.int32)
    changed = run(attn, x.at[:, 30:].set(0.0), one)
    np.testing.assert_allclose(changed[:, :30], run(attn, x, one)[:, :30], atol=1e-5)


def test_a_row_of_fewer_tokens_than_a_key_has(attn, x):
    want = run(attn, x, jnp.asarray(np.arange(T) < 3, jnp.int32)[None])[:, :3]
    got = jax.jit(lambda attn, x: attn(x)[0])(attn, x[:, :3])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_wrong_sizes_are_errors():
    with pytest.raises(ValueError, match="groups must divide num_heads; got 3 and 4"):
        nn.CompressedAttention(32, **SIZES | {"groups": 3}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="pass rate and overlap=True"):
        nn.CompressedAttention(32, **SIZES, rate=4, index=INDEX, rngs=nnx.Rngs(0))
