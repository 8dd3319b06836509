"""Recurrent layers: documents, caches, devices, and what a state cannot do. Families compare them with transformers."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding
from maxlib.sharding.strategies import SplitSequence
from tests.nn.recurrences import DELTA, DIM, KIMI, KINDS, MAMBA, SEGMENTS, SEQ, X, layer, run


@jax.jit
def step(layer, x, valid, length, cache):
    ctx = nn.make_context(*x.shape[:2], valid=valid, cache=nn.cache.Cache(None, length))
    y, cache = layer(x, ctx, cache)
    return y, cache, length + ctx.num_new


def devices(rules: str) -> sharding.Layout:
    mesh = sharding.make_mesh(fsdp=2, tensor=2, context=2)
    return sharding.Layout(mesh, functools.reduce(operator.or_, (getattr(sharding, n) for n in rules.split("|"))))


def kinds(*full: str):
    """All kinds of layers; those in `full` are left to the full tests."""
    marked = [pytest.param(kind, marks=pytest.mark.full) if kind in full else kind for kind in KINDS]
    return pytest.mark.parametrize("kind", marked)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_tokens_are_refused(kind):
    mixer = jax.eval_shape(lambda: KINDS[kind](DIM, rngs=nnx.Rngs(0)))
    for shape in ((0, 8, DIM), (2, 0, DIM)):
        with pytest.raises(ValueError, match="x must be rows of tokens"):
            jax.eval_shape(lambda mixer, x: mixer(x), mixer, jax.ShapeDtypeStruct(shape, jnp.float32))


@kinds("groups", "delta", "mamba")
def test_packed_documents_are_those_documents_alone(kind):
    packed = np.asarray(run(layer(kind), X, SEGMENTS))
    alone = np.asarray(run(layer(kind), X[:, 3:67]))
    np.testing.assert_allclose(packed[:, 3:67], alone, atol=2e-5 * alone.std())
    leaked = np.asarray(run(layer(kind), X))
    assert np.abs(packed[:, 67:76] - leaked[:, 67:76]).max() > 0.1 * alone.std()  # it does make a difference


@kinds("mamba", "delta")
def test_pieces_with_a_cache_are_the_whole(kind):
    """Rows of different lengths: many tokens at once, then one by one, and a row that is used again."""
    mixer = layer(kind)
    want, cache, outputs = np.asarray(run(mixer, X)), mixer.init_cache(2, SEQ, jnp.float32), np.zeros_like(X)
    length, done = jnp.zeros(2, jnp.int32), np.zeros(2, int)
    for new in ((66, 5), (1, 1), (1, 0), (0, 66), (1, 1)):
        width = 66 if max(new) > 1 else 1
        at = np.minimum(done[:, None] + np.arange(width), SEQ - 1)
        valid = np.arange(width) < np.array(new)[:, None]
        y, cache, length = step(mixer, np.take_along_axis(X, at[..., None], 1), valid, length, cache)
        for row, n in enumerate(new):
            outputs[row, done[row] : done[row] + n] = np.asarray(y)[row, :n]
        done += new
    for row, n in enumerate(done):
        np.testing.assert_allclose(outputs[row, :n], want[row, :n], atol=2e-5 * want.std())
    # Length zero: the state of the row's earlier document is forgotten.
    y, _, _ = step(mixer, X[:, :1], np.ones((2, 1), bool), jnp.zeros(2, jnp.int32), cache)
    np.testing.assert_allclose(y, want[:, :1], atol=2e-5 * want.std())


@kinds("groups", "convolution", "delta", "mamba")
def test_eight_devices_are_one(kind):
    """Rows, heads and tokens over two devices each, and documents over the border."""
    want = run(layer(kind), X, SEGMENTS)
    with sharding.use(devices("FSDP_TP|CP_RING")):
        got = run(layer(kind), X, SEGMENTS)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.std(want))


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rules", ["FSDP_TP|CP_RING", "FSDP|CP_ULYSSES", "FSDP_TP|SP"])
def test_gradients_on_eight_devices_are_those_on_one(kind, rules):
    @jax.jit
    def gradients(layer, x, segments):
        def loss(layer, x):
            y = run(layer, x, segments)
            return jnp.square(y * (segments > 0)[..., None]).sum(), y

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(layer, x)

    want = gradients(layer(kind), X, SEGMENTS)
    with sharding.use(devices(rules)):
        got = gradients(layer(kind), X, SEGMENTS)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.filterwarnings("ignore:nothing is split over")
@kinds("delta", "kimi", "mamba", "convolution")
def test_parameters_lie_on_eight_devices(kind):
    """A single group of heads is whole on all of them, whatever the rules split."""
    places = sharding.shardings(jax.eval_shape(lambda: KINDS[kind](DIM, rngs=nnx.Rngs(0))), devices("FSDP_TP"))
    split = {axis for place in jax.tree.leaves(places) for axis in jax.tree.leaves(tuple(place.spec))}
    assert {"tensor", "fsdp"} <= split


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_state_cannot_do_is_refused(kind):
    mixer = jax.eval_shape(lambda: KINDS[kind](DIM, rngs=nnx.Rngs(0)))
    assert not mixer.reorderable and not mixer.quantizable_cache
    caches = [jax.eval_shape(lambda capacity=capacity: mixer.init_cache(1, capacity)) for capacity in (8, 1 << 15)]
    assert not nn.cache.can_rewind(caches[0])
    assert jax.tree.map(jnp.shape, caches[0]) == jax.tree.map(jnp.shape, caches[1])  # it does not grow
    if kind in ("delta", "kimi"):
        assert caches[0].state.dtype == jnp.float32 and caches[0].tails[0].dtype == jnp.bfloat16


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_key_heads"):
        nn.GatedDeltaNet(DIM, **DELTA | {"num_heads": 3}, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_groups"):
        nn.Mamba2(DIM, **MAMBA, num_groups=3, rngs=nnx.Rngs(0))
    for make in (functools.partial(nn.KimiDeltaAttention, **KIMI), nn.ShortConvolution):
        with pytest.raises(ValueError, match="conv_width must be at least 2"):
            make(DIM, conv_width=1, rngs=nnx.Rngs(0))


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device, in float32: N transitions [Hk, Hk] and states [Hk, Hv]; and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    floats, inputs = 4 * (8 * 8 + 8 * 6), 3 * (2 * 8 + 2 * 8 + 4 * 6)  # N = 4; queries and keys of two heads, values
    row = 3 * 4 * (4 * floats + 2 * inputs) / 2
    assert layer("delta").traffic(split) == {"all-gather": 2 * row, "reduce-scatter": row}


def test_rates_are_drawn_from_1_to_16():
    """As the reference: A is uniform in [1, 16), and its log is stored."""
    rates = np.exp(nn.GatedDeltaNet(8, **DELTA | {"num_heads": 512}, rngs=nnx.Rngs(0)).a_log[...])
    assert 1 <= rates.min() < 1.2 and 15.8 < rates.max() <= 16
    np.testing.assert_allclose(rates.mean(), 8.5, atol=0.5)


def test_steps_of_mamba_stay_within_their_limits():
    """With a least step the state forgets faster; the greatest one bounds what a token writes."""
    plain = layer("mamba")
    limited = jax.tree.map(lambda a: a, plain)
    limited.dt_limit = (0.5, 0.6)
    dt = limited._step(limited.dt(jnp.asarray(X)))
    assert float(dt.min()) == 0.5 and float(dt.max()) == np.float32(0.6)
    assert np.abs(run(limited, X) - run(plain, X)).max() > 0.1


def test_latent_attention_without_a_rope_has_no_positions():
    """As in Kimi Linear: the same keys in another order give the last query the same result."""
    sizes = dict(num_heads=2, kv_rank=8, nope_dim=6, v_dim=6)
    attn = jax.jit(lambda: nn.MLA(DIM, **sizes, rope=None, shared_dim=4, rngs=nnx.Rngs(0)))()
    turned = np.concatenate([X[:, :-1][:, ::-1], X[:, -1:]], axis=1)
    call = jax.jit(lambda attn, x: attn(x)[0][:, -1])
    want = call(attn, X)
    np.testing.assert_allclose(call(attn, turned), want, atol=2e-5 * np.std(want))
    for wrong in ({"rope": None}, {"rope": ops.Rope(6), "shared_dim": 4}):
        with pytest.raises(ValueError, match="MLA needs rope=, or without one shared_dim="):
            nn.MLA(DIM, **sizes, **wrong, rngs=nnx.Rngs(0))
