"""Gated DeltaNet as a layer: documents, caches, devices, and errors. Families compare it with transformers."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, plan, sharding
from maxlib.models import qwen3_5
from maxlib.ops import Rope
from maxlib.sharding.strategies import SplitSequence

DIM, SEQ = 16, 80
HEADS = {"num_heads": 4, "num_key_heads": 2, "key_dim": 8, "value_dim": 6}
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [3, 64, 9, 4], axis=1).astype(np.int32)


@functools.cache
def layer() -> nn.GatedDeltaNet:
    """With rates about 0.05, so that a state which is not reset shows."""
    made = jax.jit(lambda: nn.GatedDeltaNet(DIM, **HEADS, rngs=nnx.Rngs(0)))()
    made.a_log[...] = jnp.log(0.05) + 0 * made.a_log[...]
    made.dt_bias[...] = 0 * made.dt_bias[...]
    return made


@jax.jit
def run(layer, x, segment_ids=None):
    return layer(x, nn.context(*x.shape[:2], segment_ids=segment_ids))[0]


@jax.jit
def step(layer, x, valid, length, cache):
    ctx = nn.context(*x.shape[:2], valid=valid, cache=nn.cache.Cache(None, length))
    y, cache = layer(x, ctx, cache)
    return y, cache, length + ctx.num_new


def tiny(**changes) -> qwen3_5.Config:
    sizes = dict(vocab=40, num_layers=4, dim=DIM, mlp_dim=24, num_heads=2, num_kv_heads=1, head_dim=16)
    delta = dict(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=8)
    return qwen3_5.Config(**sizes, **delta, rope=Rope(4, max_length=128), **changes)


def test_packed_documents_are_those_documents_alone():
    packed = np.asarray(run(layer(), X, SEGMENTS))
    alone = np.asarray(run(layer(), X[:, 3:67]))
    np.testing.assert_allclose(packed[:, 3:67], alone, atol=2e-5 * alone.std())
    leaked = np.asarray(run(layer(), X))
    assert np.abs(packed[:, 67:76] - leaked[:, 67:76]).max() > 0.1 * alone.std()  # it does make a difference


def test_pieces_with_a_cache_are_the_whole():
    """Rows of different lengths: many tokens at once, then one by one, and a row that is used again."""
    want, cache, found = np.asarray(run(layer(), X)), layer().init_cache(2, SEQ, jnp.float32), np.zeros_like(X)
    length, done = jnp.zeros(2, jnp.int32), np.zeros(2, int)
    for new in ((66, 5), (1, 1), (1, 0), (0, 66), (1, 1)):
        width = 66 if max(new) > 1 else 1
        at = np.minimum(done[:, None] + np.arange(width), SEQ - 1)
        valid = np.arange(width) < np.array(new)[:, None]
        y, cache, length = step(layer(), np.take_along_axis(X, at[..., None], 1), valid, length, cache)
        for row, n in enumerate(new):
            found[row, done[row] : done[row] + n] = np.asarray(y)[row, :n]
        done += new
    for row, n in enumerate(done):
        np.testing.assert_allclose(found[row, :n], want[row, :n], atol=2e-5 * want.std())
    # Length zero: the state of the row's earlier document is forgotten.
    y, _, _ = step(layer(), X[:, :1], np.ones((2, 1), bool), jnp.zeros(2, jnp.int32), cache)
    np.testing.assert_allclose(y, want[:, :1], atol=2e-5 * want.std())


def devices(rules: str) -> sharding.Layout:
    mesh = sharding.make_mesh(fsdp=2, tensor=2, context=2)
    return sharding.Layout(mesh, functools.reduce(operator.or_, (getattr(sharding, n) for n in rules.split("|"))))


def test_eight_devices_are_one():
    """Rows, heads and tokens over two devices each, and documents over the border."""
    want = run(layer(), X, SEGMENTS)
    with sharding.use(devices("FSDP_TP|CP_RING")):
        got = run(layer(), X, SEGMENTS)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.std(want))


@pytest.mark.full
@pytest.mark.parametrize("rules", ["FSDP_TP|CP_RING", "FSDP|CP_ULYSSES", "FSDP_TP|SP"])
def test_gradients_on_eight_devices_are_those_on_one(rules):
    @jax.jit
    def gradients(layer, x, segments):
        def loss(layer, x):
            y = run(layer, x, segments)
            return jnp.square(y * (segments > 0)[..., None]).sum(), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    want = gradients(layer(), X, SEGMENTS)
    with sharding.use(devices(rules)):
        got = gradients(layer(), X, SEGMENTS)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_what_a_state_cannot_do_is_refused():
    model = jax.eval_shape(lambda: qwen3_5.Qwen35(tiny(), rngs=nnx.Rngs(0)))
    assert not model.layers.is_reorderable  # zigzag order
    with pytest.raises(ValueError, match="GatedDeltaNet cannot store a state in int8"):
        model.init_cache(1, 8, dtype=jnp.int8)
    assert not nn.cache.can_rewind(jax.eval_shape(lambda: layer().init_cache(1, 8)))
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_key_heads"):
        nn.GatedDeltaNet(DIM, **HEADS | {"num_heads": 3}, rngs=nnx.Rngs(0))


def test_one_head_is_a_layer():
    alone = nn.GatedDeltaNet(DIM, num_heads=1, key_dim=8, value_dim=6, rngs=nnx.Rngs(0))
    assert np.isfinite(run(alone, X)).all()


@pytest.mark.full
def test_generation_is_the_argmax_of_the_whole():
    """Prompts of different lengths, past the border of a chunk."""
    model = jax.jit(lambda: qwen3_5.Qwen35(tiny(), rngs=nnx.Rngs(0)))()
    prompts = [np.random.default_rng(i).integers(0, 40, n).tolist() for i, n in enumerate((70, 3))]
    got = inference.generate(model, prompts, max_new_tokens=6, dtype=jnp.float32)
    logits = jax.jit(lambda tokens: model.logits(model(tokens, dtype=jnp.float32).hidden))
    for prompt, new in zip(prompts, got, strict=True):
        tokens = list(prompt)
        for token in new:
            assert int(logits(jnp.asarray([tokens]))[0, -1].argmax()) == token
            tokens.append(token)


def test_a_cache_does_not_grow():
    sizes = {capacity: layer().init_cache(1, capacity) for capacity in (8, 1 << 15)}
    assert jax.tree.map(jnp.shape, sizes[8]) == jax.tree.map(jnp.shape, sizes[1 << 15])
    assert sizes[8].state.dtype == jnp.float32 and sizes[8].q.dtype == jnp.bfloat16


@pytest.mark.full
def test_plans_know_what_travels():
    """With a sequence over four devices: transitions and states in place of tokens."""
    base = {"target": "h100x4", "sequence": 64, "layout": sharding.Layout({"context": 4}, sharding.CP_RING)}
    bytes_of = lambda **changes: sum(
        one.bytes
        for one in plan.estimated(
            plan.Job(model=lambda: qwen3_5.Qwen35(tiny(**changes), rngs=nnx.Rngs(0)), **base)
        ).costs.collectives
        if "context" in one.axes and one.kind == "all-gather"
    )
    linear = bytes_of(layer_types=(qwen3_5.LINEAR,) * 4)
    rows, passes, parts = 4, 3, 4  # a row for each device
    one = (passes - 1) * rows * parts * (4 * 4 * 8 * (8 + 8) + 3 * (2 * 2 * 8 + 4 * 8) * 2)
    assert linear - bytes_of(layer_types=(qwen3_5.FULL,) * 4) == pytest.approx(4 * one)


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device, in float32: N transitions [Hk, Hk] and states [Hk, Hv]; and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    floats, inputs = 4 * (8 * 8 + 8 * 6), 3 * (2 * 8 + 2 * 8 + 4 * 6)  # N = 4; queries and keys of two heads, values
    whole = 3 * 4 * (4 * floats + 2 * inputs) / 2
    assert layer().traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}


def test_rates_are_drawn_from_1_to_16():
    """As the reference: A is uniform in [1, 16), and its log is stored."""
    rates = np.exp(nn.GatedDeltaNet(8, **HEADS | {"num_heads": 512}, rngs=nnx.Rngs(0)).a_log[...])
    assert 1 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16
    np.testing.assert_allclose(rates.mean(), 8.5, atol=0.5)
