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


def test_gathered_keys_equal_masked_ones(attn, x, monkeypatch):
    def both(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(attn(x)[0])))(x)

    monkeypatch.setattr(_entries, "GATHER_FROM", 1)
    gathered = both(x)
    monkeypatch.setattr(_entries, "GATHER_FROM", T)
    for got, want in zip(gathered, both(x), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_documents_are_alone_and_see_complete_keys_only(attn, x):
    """Of 3 tokens, fewer than a key has, of 18 and of 17, with padding between; no later token has an effect."""
    segments = jnp.asarray(np.repeat([1, 2, 0, 3], [3, 18, 2, 17]))[None]
    got = attn(x, nn.make_context(1, T, segment_ids=segments))[0]
    for start, stop in ((0, 3), (3, 21), (23, 40)):
        want = attn(x[:, start:stop])[0]
        np.testing.assert_allclose(got[:, start:stop], want, atol=1e-5)
    changed = attn(x.at[:, 30:].set(0.0))[0]
    np.testing.assert_allclose(changed[:, :30], attn(x)[0][:, :30], atol=1e-5)


def test_wrong_sizes_are_errors():
    with pytest.raises(ValueError, match="groups must divide num_heads; got 3 and 4"):
        nn.CompressedAttention(32, **SIZES | {"groups": 3}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="pass rate and overlap=True"):
        nn.CompressedAttention(32, **SIZES, rate=4, index=INDEX, rngs=nnx.Rngs(0))
