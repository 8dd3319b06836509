"""Kimi delta attention as a layer: documents, caches, devices, and what it refuses. Its family compares it with
transformers.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, ops, sharding
from maxlib.models import kimi_linear
from maxlib.sharding.strategies import SplitSequence

DIM, SEQ = 16, 80
HEADS = {"num_heads": 4, "head_dim": 8}
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [3, 64, 9, 4], axis=1).astype(np.int32)


@functools.cache
def layer() -> nn.KimiDeltaAttention:
    """With rates about 0.05, so that a state which is not reset shows."""
    made = jax.jit(lambda: nn.KimiDeltaAttention(DIM, **HEADS, rngs=nnx.Rngs(0)))()
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


def tiny() -> kimi_linear.Config:
    latent = dict(kv_rank=8, nope_dim=6, shared_dim=4, v_dim=6)
    sizes = dict(vocab=40, num_layers=4, dim=DIM, mlp_dim=24, num_heads=2, **latent)
    experts = dict(num_dense=1, expert_dim=8, num_experts=4, num_shared=1, top_k=2, routed_scale=1.5)
    return kimi_linear.Config(**sizes, **experts, delta_heads=2, delta_dim=8, conv_width=4)


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
    model = jax.eval_shape(lambda: kimi_linear.KimiLinear(tiny(), rngs=nnx.Rngs(0)))
    assert not model.layers.is_reorderable  # zigzag order
    with pytest.raises(ValueError, match="KimiDeltaAttention cannot store a state in int8"):
        model.init_cache(1, 8, dtype=jnp.int8)
    assert not nn.cache.can_rewind(jax.eval_shape(lambda: layer().init_cache(1, 8)))
    with pytest.raises(ValueError, match="conv_width must be at least 2"):
        nn.KimiDeltaAttention(DIM, **HEADS, conv_width=1, rngs=nnx.Rngs(0))


@pytest.mark.full
def test_generation_is_the_argmax_of_the_whole():
    """Prompts of different lengths, past the border of a chunk, at once and on the slots of an engine."""
    model = jax.jit(lambda: kimi_linear.KimiLinear(tiny(), rngs=nnx.Rngs(0)))()
    prompts = [np.random.default_rng(i).integers(0, 40, n).tolist() for i, n in enumerate((70, 3, 12))]
    got = inference.generate(model, prompts, max_new_tokens=6, dtype=jnp.float32)
    logits = jax.jit(lambda tokens: model.logits(model(tokens, dtype=jnp.float32).hidden))
    for prompt, new in zip(prompts, got, strict=True):
        tokens = list(prompt)
        for token in new:
            assert int(logits(jnp.asarray([tokens]))[0, -1].argmax()) == token
            tokens.append(token)
    engine = inference.LocalEngine(model, slots=2, dtype=jnp.float32)
    assert [one.tokens for (one,) in engine.generate(prompts, max_new_tokens=6)] == got


def test_a_cache_does_not_grow():
    sizes = {capacity: layer().init_cache(1, capacity) for capacity in (8, 1 << 15)}
    assert jax.tree.map(jnp.shape, sizes[8]) == jax.tree.map(jnp.shape, sizes[1 << 15])
    assert sizes[8].state.dtype == jnp.float32 and sizes[8].q.dtype == jnp.bfloat16


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device, in float32: N transitions and states [H, H]; and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    whole = 3 * 4 * (4 * 4 * (8 * 8 + 8 * 8) + 2 * 3 * 3 * 4 * 8) / 2
    assert layer().traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}


def test_latent_attention_without_a_rope_has_no_positions():
    """The same keys in another order give the last query the same result; a rope must have the shared part's size."""
    sizes = dict(num_heads=2, kv_rank=8, nope_dim=6, v_dim=6)
    attn = jax.jit(lambda: nn.MLA(DIM, **sizes, rope=None, shared_dim=4, rngs=nnx.Rngs(0)))()
    turned = np.concatenate([X[:, :-1][:, ::-1], X[:, -1:]], axis=1)
    call = jax.jit(lambda attn, x: attn(x)[0][:, -1])
    want = call(attn, X)
    np.testing.assert_allclose(call(attn, turned), want, atol=2e-5 * np.std(want))
    for wrong in ({"rope": None}, {"rope": ops.Rope(6), "shared_dim": 4}):
        with pytest.raises(ValueError, match="shared_dim must be positive, and the rope's dim"):
            nn.MLA(DIM, **sizes, **wrong, rngs=nnx.Rngs(0))
