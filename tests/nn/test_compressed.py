"""Attention to a window and compressed keys: documents that begin anywhere, caches, and chosen keys that are gathered.

Families compare it with transformers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.nn.attention import _joint_attention
from maxlib.nn.attention._compressed import rotate_last

SIZES = {"num_heads": 4, "head_dim": 16, "q_rank": 24, "groups": 2, "group_rank": 20, "window": 6, "rope": ops.Rope(8)}
INDEX = {"num_heads": 16, "head_dim": 8, "top_k": 3}
T = 40


@pytest.fixture(scope="module")
def attn():
    return jax.jit(lambda: nn.CompressedAttention(32, **SIZES, rate=4, overlap=True, index=INDEX, rngs=nnx.Rngs(1)))()


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(1, T, 32)).astype(np.float32)


@jax.jit
def run(attn, x, segments):
    return attn(x, nn.make_context(*segments.shape, segment_ids=segments))[0]


def test_gathered_keys_equal_masked_ones(attn, x, monkeypatch):
    def both(x):
        return jax.value_and_grad(lambda x: jnp.sum(jnp.sin(attn(x)[0])))(x)

    monkeypatch.setattr(_joint_attention, "GATHER_FROM", 1)
    gathered = jax.jit(both)(x)
    monkeypatch.setattr(_joint_attention, "GATHER_FROM", T)
    for got, want in zip(gathered, jax.jit(lambda x: both(x))(x), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_documents_are_alone_and_see_complete_keys_only(attn, x):
    """Of 3 tokens, fewer than a key has, of 18 and of 17, with padding between; no later token has an effect."""
    lengths = (3, 18, 2, 17)
    got = run(attn, x, jnp.asarray(np.repeat([1, 2, 0, 3], lengths))[None])
    for start, stop in ((0, 3), (3, 21), (23, 40)):
        alone = np.roll(x, -start, axis=1)
        want = run(attn, alone, jnp.asarray(np.arange(T) < stop - start, jnp.int32)[None])
        np.testing.assert_allclose(got[:, start:stop], want[:, : stop - start], atol=1e-5)
    document = jnp.ones((1, T), jnp.int32)
    changed = run(attn, np.where(np.arange(T)[:, None] < 30, x, 0), document)
    np.testing.assert_allclose(changed[:, :30], run(attn, x, document)[:, :30], atol=1e-5)


def test_a_row_of_fewer_tokens_than_a_key_has(attn, x):
    want = run(attn, x, jnp.asarray(np.arange(T) < 3, jnp.int32)[None])[:, :3]
    got = jax.jit(lambda attn, x: attn(x)[0])(attn, x[:, :3])
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_wrong_sizes_are_errors():
    with pytest.raises(ValueError, match="groups must divide num_heads; got 3 and 4"):
        nn.CompressedAttention(32, **SIZES | {"groups": 3}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="pass rate and overlap=True"):
        nn.CompressedAttention(32, **SIZES, rate=4, index=INDEX, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.full)])
def test_the_loss_of_an_indexer_is_its_formula(x, dense):
    """What entries get of one softmax with the window and the sink, summed over heads; only the indexer learns."""
    loss = nn.IndexLoss(0.5, dense=dense)
    options = {"rate": 4, "overlap": True, "index": INDEX, "index_loss": loss}
    attn = jax.jit(lambda: nn.CompressedAttention(32, **SIZES, **options, rngs=nnx.Rngs(1)))()
    attn.sinks.set_value(jnp.arange(4.0))
    trained, rest = nn.partition(attn)

    def run(trained, x):
        return nn.combine(trained, rest).with_loss(x)[2]["loss/indexer"]

    got, (d_trained, d_x) = jax.jit(jax.value_and_grad(run, (0, 1)))(trained, x)
    q, keys, entries, end, scores = jax.device_get(jax.jit(_parts)(attn, x))
    each = []
    for t in range(T):
        best = np.argsort(-scores[0, t, : end[0, t]], kind="stable")
        if not len(best):
            continue
        best = best if dense else best[: INDEX["top_k"]]
        near = q[0, t] @ keys[0, max(t - 5, 0) : t + 1].T
        far = q[0, t] @ entries[0, best].T
        all_scores = np.concatenate([far, near, 4 * np.arange(4.0)[:, None]], axis=1) / 4
        p = np.exp(all_scores - all_scores.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True))[:, : len(best)].sum(axis=0)
        p, index = p / p.sum(), scores[0, t, best]
        log_index = index - index.max() - np.log(np.exp(index - index.max()).sum())
        each.append(np.sum(p * (np.log(p) - log_index)))
    np.testing.assert_allclose(got, 0.5 * np.mean(each), rtol=2e-5)
    assert not np.any(d_x)
    for path, gradient in d_trained.items():
        assert np.any(gradient) == path.startswith("indexer."), path


def _parts(attn, x):
    """Queries, keys and entries of attention, the entries that exist at each token, and the scores of the indexer."""
    ctx = nn.make_context(1, T)
    latent, tables = attn.q_norm(attn.q_down(x)), ctx.rotary(attn.rope)
    q = rotate_last(attn.head_norm(attn.q_up(latent)), *tables, interleaved=False)
    keys = rotate_last(attn.kv_norm(attn.kv(x))[:, :, None], *tables, interleaved=False)[:, :, 0]
    index = attn.indexer.index(x, latent, attn.indexer.compressor(x, ctx)[0], ctx)
    return q, keys, attn.compressor(x, ctx)[0], attn.compressor.seen(ctx)[1], index.scores()
