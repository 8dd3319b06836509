"""Latent attention to chosen keys: the choice, its cache, devices, and what it refuses. Its family compares it with
transformers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding

DIM, SEQ, TOP = 16, 24, 6
SIZES = dict(num_heads=4, q_rank=12, kv_rank=8, nope_dim=6, v_dim=6, rope=ops.Rope(4, interleaved=True))
INDEX = dict(index_heads=8, index_dim=10, index_rope=ops.Rope(4))
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)
SEGMENTS = np.repeat([[1, 2, 0], [1, 2, 3]], [9, 12, 3], axis=1).astype(np.int32)


@functools.cache
def layer() -> nn.SparseMLA:
    return jax.jit(lambda: nn.SparseMLA(DIM, **SIZES, **INDEX, top_k=TOP, rngs=nnx.Rngs(0)))()


@jax.jit
def run(layer, x, segment_ids=None):
    return layer(x, nn.make_context(*x.shape[:2], segment_ids=segment_ids))[0]


def test_the_best_keys_of_each_document_are_chosen():
    """Against scores of the definition, query by query."""
    indexer = layer().indexer
    latent = np.random.default_rng(1).normal(size=(2, SEQ, 12)).astype(np.float32)

    @jax.jit
    def choice(x, latent, segment_ids):
        ctx = nn.make_context(2, SEQ, segment_ids=segment_ids)
        keys = indexer.keys(x, ctx)
        chosen = indexer.choose(indexer.index(x, latent, keys, ctx), ctx.key_intervals(ops.Causal()))
        return chosen.among_all(SEQ), indexer._rotate(indexer.q(latent), ctx), keys

    got, q, keys = jax.device_get(choice(X, latent, SEGMENTS))
    q, keys = q.astype(np.float64), keys.astype(np.float64)
    weight = X.astype(np.float64) @ np.asarray(indexer.weight.w[...], np.float64).T
    for b, t in np.ndindex(2, SEQ):
        visible = [s for s in range(t + 1) if SEGMENTS[b, s] == SEGMENTS[b, t] > 0]
        score = lambda s, b=b, t=t: weight[b, t] @ np.maximum(q[b, t] @ keys[b, s], 0)
        best = sorted(visible, key=score, reverse=True)[:TOP]
        assert sorted(best) == np.flatnonzero(got[b, t]).tolist()


def test_few_keys_are_all_attended_to():
    """With no more keys than are chosen it is plain latent attention of the same weights, else it is another one."""
    plain, all_chosen = (
        jax.eval_shape(lambda: nn.MLA(DIM, **SIZES, rngs=nnx.Rngs(0))),
        jax.tree.map(lambda a: a, layer()),
    )
    all_chosen.top_k = all_chosen.indexer.top_k = SEQ
    for path, variable in nn.variables(plain).items():
        variable.set_value(nn.variables(layer())[path].get_value())
    want, sparse = np.asarray(run(plain, X)), np.asarray(run(layer(), X))
    np.testing.assert_array_equal(run(all_chosen, X), want)
    np.testing.assert_allclose(sparse[:, :TOP], want[:, :TOP], atol=1e-5 * want.std())
    assert np.abs(sparse[:, TOP:] - want[:, TOP:]).max() > 0.1 * want.std()


def test_packed_documents_are_those_documents_alone():
    packed, alone = np.asarray(run(layer(), X, SEGMENTS)), np.asarray(run(layer(), X[:, 9:21]))
    np.testing.assert_allclose(packed[:, 9:21], alone, atol=1e-5 * alone.std())


def test_pieces_with_a_cache_are_the_whole():
    want, cache, outputs = np.asarray(run(layer(), X)), layer().init_cache(2, SEQ, jnp.float32), []
    step = jax.jit(
        lambda layer, x, cache, length: layer(
            x, nn.make_context(*x.shape[:2], cache=nn.cache.Cache(None, length)), cache
        )
    )
    for begin, end in ((0, 11), (11, 22), (22, 23), (23, 24)):
        y, cache = step(layer(), X[:, begin:end], cache, jnp.full(2, begin, jnp.int32))
        outputs.append(np.asarray(y))
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), want, atol=1e-5 * want.std())


def test_indexers_are_stored_and_not_trained():
    trained, _ = nn.partition(layer())
    assert trained and not any("indexer" in path for path in trained)
    assert {path for path in nn.variables(layer()) if "indexer" in path} == {
        f"indexer.{name}" for name in ("q.w", "k.w", "k_norm.scale", "k_norm.bias", "weight.w")
    }


@pytest.mark.parametrize("rules", ["FSDP_TP|CP_GATHER", pytest.param("FSDP|CP_ULYSSES", marks=pytest.mark.full)])
def test_eight_devices_are_one(rules):
    mesh, want = sharding.make_mesh(fsdp=2, tensor=2, context=2), run(layer(), X, SEGMENTS)
    first, second = (getattr(sharding, name) for name in rules.split("|"))
    with sharding.use(sharding.Layout(mesh, first | second)):
        got = run(layer(), X, SEGMENTS)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.std(want))


def test_what_it_cannot_do_is_refused():
    ring = sharding.Layout(sharding.make_mesh(context=8), sharding.CP_RING)
    with sharding.use(ring), pytest.raises(ValueError, match="cannot travel around a ring: .* CP_GATHER or CP_ULYSSES"):
        jax.eval_shape(run, layer(), X)
    stack = nn.Stack(lambda _, rngs: Holder(rngs), 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="SparseMLA cannot store a state in int8"):
        stack.init_cache(1, 8, jnp.int8)


class Holder(nn.Layer):
    """A layer of nothing else."""

    def __init__(self, rngs: nnx.Rngs):
        self.attn = nn.SparseMLA(DIM, **SIZES, **INDEX, top_k=TOP, rngs=rngs)
