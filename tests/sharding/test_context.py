"""The sequence split over devices, by gathered keys, around a ring or over heads: results equal one device's
(`test_covering` compares whole models).
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlib import nn, sharding, training
from tests.nn.tiny import filled_llama

SCHEMES = {"gather": sharding.CP_GATHER, "ring": sharding.CP_RING, "heads": sharding.CP_ULYSSES}
SEQ = 32


def batch(seq=SEQ):
    """Packed documents, one of them longer than any window, and padding."""
    tokens = np.random.RandomState(0).randint(0, 64, (2, seq)).astype(np.int32)
    segments = np.array([[1] * 21 + [2] * (seq - 21), [1] * 5 + [2] * 7 + [3] * (seq - 15) + [0] * 3], np.int32)
    targets = np.where(segments > 0, np.roll(tokens, -1, axis=1), -1)
    return {"tokens": tokens, "targets": targets, "segment_ids": segments}


@jax.jit
def loss(model, data):
    return training.NextToken()(model, data, dtype=jnp.float32)[0]


@pytest.mark.parametrize(
    "seq", [33, pytest.param(36, marks=pytest.mark.full)]
)  # not one chunk for each device; not two
def test_lengths_that_do_not_divide(seq):
    model, data = filled_llama(vocab=64, num_layers=1), batch(seq)
    want = loss(model, data)
    with sharding.use(sharding.Layout(sharding.make_mesh(data=2, context=4), sharding.DP | sharding.CP_RING)):
        np.testing.assert_allclose(loss(model, data), want, rtol=1e-5)


def test_double_precision_stays_around_the_ring():
    with jax.enable_x64(True):
        q, k, v = np.random.default_rng(0).normal(size=(3, 1, 16, 2, 8))
        end = jnp.arange(1, 17, dtype=jnp.int32)[None]
        gradient = jax.jit(
            jax.grad(lambda *x: jnp.sum(nn.attend(*x, jnp.zeros_like(end), end) ** 2), argnums=(0, 1, 2))
        )
        want, mesh = gradient(q, k, v), sharding.make_mesh(context=2, devices=jax.devices()[:2])
        with sharding.use(sharding.Layout(mesh, sharding.DP | sharding.CP_RING)):
            for a, b in zip(gradient(q, k, v), want, strict=True):
                np.testing.assert_allclose(a, b, atol=1e-12)


def test_each_scheme_talks_as_it_should():
    """Keys are gathered, or passed on, or heads and sequence are exchanged; queries and results never gather."""
    mesh = sharding.make_mesh(context=8)
    place = jax.NamedSharding(mesh, P(None, "context"))
    shape = jax.ShapeDtypeStruct((1, 64, 8, 16), jnp.float32, sharding=place)
    bound = jax.ShapeDtypeStruct((1, 64), jnp.int32, sharding=place)
    collectives = {}
    for name, rules in SCHEMES.items():
        with sharding.use(sharding.Layout(mesh, rules)):
            run = lambda *args: sharding.constrain(nn.attend(*args), "batch", "seq", None, None)
            text = jax.jit(run).lower(shape, shape, shape, bound, bound).compile().as_text()
        kinds = re.findall(r" (all-gather|all-to-all|collective-permute|all-reduce)(?:-start)?\(", text)
        collectives[name] = {kind: kinds.count(kind) for kind in kinds}
    assert collectives["gather"].keys() == {"all-gather"}
    assert collectives["gather"]["all-gather"] <= 2
    assert collectives["ring"].keys() == {"collective-permute"}
    assert "all-to-all" in collectives["heads"]
    assert "collective-permute" not in collectives["heads"]


def attended(rules, query_heads, key_heads, queries=16, **mesh):
    """The traced result of attention to 16 keys."""
    q, k = (jnp.zeros((1, *sizes, 8)) for sizes in ((queries, query_heads), (16, key_heads)))
    bound = jnp.zeros((1, queries), jnp.int32)
    with sharding.use(sharding.Layout(sharding.make_mesh(**mesh), rules)):
        return jax.eval_shape(nn.attend, q, k, k, bound, bound)


@pytest.mark.parametrize(
    "heads", [(12, 4), *(pytest.param(pair, marks=pytest.mark.full) for pair in ((4, 4), (24, 3)))]
)
def test_tokens_are_exchanged_for_heads_only_where_these_divide(heads):
    with pytest.raises(
        ValueError, match=rf"8 devices. needs query heads divisible by 8.* got {heads[0]} and {heads[1]}. Use .*CP_RING"
    ):
        attended(sharding.CP_ULYSSES, *heads, context=8)
    with pytest.raises(ValueError, match=r"Ulysses attention over mesh axes \('tensor', 'context'\) \(8 devices\)"):
        attended(sharding.TP | sharding.CP_ULYSSES, *heads, context=4, tensor=2)
    attended(sharding.CP_RING, *heads, context=8)
    attended(sharding.CP_ULYSSES, *heads, queries=1, context=8)  # decoding: nothing is split that could be exchanged
    attended(sharding.TP | sharding.SP, *heads, tensor=8)
    attended(sharding.CP_ULYSSES, 8, 2, context=8)


@pytest.mark.parametrize("parts", [2, 4])
def test_zigzag_gives_each_device_an_early_and_a_late_chunk(parts):
    mesh = sharding.make_mesh(context=parts, devices=jax.devices()[:parts])
    x = jnp.arange(8 * parts)[None]
    with sharding.use(sharding.Layout(mesh, sharding.CP_RING)):
        assert sharding.layers.can_zigzag(8 * parts)
        assert not sharding.layers.can_zigzag(7 * parts)
        turned = jax.jit(lambda x: sharding.layers.zigzag(x, "batch", "seq"))(x)
        back = jax.jit(lambda x: sharding.layers.unzigzag(x, "batch", "seq"))(turned)
    chunks = np.asarray(turned).reshape(2 * parts, 4)[:, 0] // 4
    assert list(chunks) == [c for i in range(parts) for c in (i, 2 * parts - 1 - i)]
    np.testing.assert_array_equal(back, x)
    np.testing.assert_array_equal(sharding.layers.natural_order(jnp.asarray(np.asarray(turned)), parts), x)
    assert not sharding.layers.can_zigzag(8 * parts)
