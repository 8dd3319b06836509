"""Mamba-2 and gated short convolutions as layers: documents, caches, devices, and errors. Families compare
them with transformers.
"""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding
from maxlib.sharding.strategies import SplitSequence

DIM, SEQ = 16, 80
SIZES = {"num_heads": 4, "head_dim": 6, "state_dim": 8}
X = np.random.default_rng(0).normal(size=(2, SEQ, DIM)).astype(np.float32)
SEGMENTS = np.repeat([[1, 2, 3, 0], [1, 2, 3, 4]], [3, 64, 9, 4], axis=1).astype(np.int32)
# One group for all heads, and two with another order of gate and norm.
KINDS = {
    "mamba": functools.partial(nn.Mamba2, **SIZES),
    "groups": functools.partial(nn.Mamba2, **SIZES, num_groups=2, norm="norm_first", bias=True),
    "convolution": nn.ShortConvolution,
}
others = lambda *kinds: [pytest.param(kind, marks=pytest.mark.full) for kind in kinds]


@functools.cache
def layer(kind: str) -> nn.SequenceMixer:
    """With rates about 0.05, so that a state which is not reset shows, and biases that are not zero."""
    made = jax.jit(lambda: KINDS[kind](DIM, rngs=nnx.Rngs(0)))()
    if isinstance(made, nn.Mamba2):
        made.a_log[...] = jnp.log(0.05) + 0 * made.a_log[...]
        made.dt_bias[...] = 0 * made.dt_bias[...]
        made.x_conv_bias[...] += 0.3
    return made


@jax.jit
def run(layer, x, segment_ids=None):
    return layer(x, nn.context(*x.shape[:2], segment_ids=segment_ids))[0]


@jax.jit
def step(layer, x, valid, length, cache):
    ctx = nn.context(*x.shape[:2], valid=valid, cache=nn.cache.Cache(None, length))
    y, cache = layer(x, ctx, cache)
    return y, cache, length + ctx.num_new


@pytest.mark.parametrize("kind", ["mamba", "convolution", *others("groups")])
def test_packed_documents_are_those_documents_alone(kind):
    packed = np.asarray(run(layer(kind), X, SEGMENTS))
    alone = np.asarray(run(layer(kind), X[:, 3:67]))
    np.testing.assert_allclose(packed[:, 3:67], alone, atol=2e-5 * alone.std())
    leaked = np.asarray(run(layer(kind), X))
    assert np.abs(packed[:, 67:76] - leaked[:, 67:76]).max() > 0.1 * alone.std()  # it does make a difference


@pytest.mark.parametrize("kind", ["groups", "convolution", *others("mamba")])
def test_pieces_with_a_cache_are_the_whole(kind):
    """Rows of different lengths: many tokens at once, then one by one, and a row that is used again."""
    one = layer(kind)
    want, cache, found = np.asarray(run(one, X)), one.init_cache(2, SEQ, jnp.float32), np.zeros_like(X)
    length, done = jnp.zeros(2, jnp.int32), np.zeros(2, int)
    for new in ((66, 5), (1, 1), (1, 0), (0, 66), (1, 1)):
        width = 66 if max(new) > 1 else 1
        at = np.minimum(done[:, None] + np.arange(width), SEQ - 1)
        valid = np.arange(width) < np.array(new)[:, None]
        y, cache, length = step(one, np.take_along_axis(X, at[..., None], 1), valid, length, cache)
        for row, n in enumerate(new):
            found[row, done[row] : done[row] + n] = np.asarray(y)[row, :n]
        done += new
    for row, n in enumerate(done):
        np.testing.assert_allclose(found[row, :n], want[row, :n], atol=2e-5 * want.std())
    # Length zero: the state of the row's earlier document is forgotten.
    y, _, _ = step(one, X[:, :1], np.ones((2, 1), bool), jnp.zeros(2, jnp.int32), cache)
    np.testing.assert_allclose(y, want[:, :1], atol=2e-5 * want.std())


def devices(rules: str) -> sharding.Layout:
    mesh = sharding.make_mesh(fsdp=2, tensor=2, context=2)
    return sharding.Layout(mesh, functools.reduce(operator.or_, (getattr(sharding, n) for n in rules.split("|"))))


@pytest.mark.parametrize("kind", ["mamba", *others("groups", "convolution")])
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
@pytest.mark.parametrize("kind", ["groups", *others("mamba", "convolution")])
def test_parameters_lie_on_eight_devices(kind):
    """A single group of heads is whole on all of them, whatever the rules split."""
    made = sharding.create(lambda: KINDS[kind](DIM, rngs=nnx.Rngs(0)), devices("FSDP_TP"))
    split = {axis for w in jax.tree.leaves(made) for axis in jax.tree.leaves(tuple(w.sharding.spec))}
    assert {"tensor", "fsdp"} <= split


def test_what_a_state_cannot_do_is_refused():
    made = {kind: jax.eval_shape(lambda kind=kind: layer(kind)) for kind in KINDS}
    for one in made.values():
        assert not one.reorderable and not one.quantizable_cache
        assert not nn.cache.can_rewind(jax.eval_shape(lambda one=one: one.init_cache(1, 8)))
        assert {a.shape for a in jax.tree.leaves(jax.eval_shape(lambda one=one: one.init_cache(1, 8)))} == {
            a.shape for a in jax.tree.leaves(jax.eval_shape(lambda one=one: one.init_cache(1, 1 << 15)))
        }
    with pytest.raises(ValueError, match="num_heads must be a multiple of num_groups"):
        nn.Mamba2(DIM, **SIZES, num_groups=3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="conv_width must be at least 2"):
        nn.ShortConvolution(DIM, conv_width=1, rngs=nnx.Rngs(0))


def test_steps_stay_within_their_limits():
    """With a least step the state forgets faster; the greatest one bounds what a token writes."""
    plain = layer("mamba")
    limited = jax.tree.map(lambda a: a, plain)
    limited.dt_limit = (0.5, 0.6)
    dt = limited._step(limited.dt(jnp.asarray(X)))
    assert float(dt.min()) == 0.5 and float(dt.max()) == np.float32(0.6)
    assert np.abs(run(limited, X) - run(plain, X)).max() > 0.1


def test_traffic_is_that_of_transitions_states_and_the_last_inputs():
    """Of each device: N transitions and states [P, S] in float32, and three inputs of the convolution."""
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    inputs = 3 * (4 * 6 + 2 * 2 * 8)  # x of N heads; b and c of two groups
    whole = 3 * 4 * (4 * 4 * (1 + 6 * 8) + 2 * inputs) / 2
    assert layer("groups").traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}


def test_a_convolution_sends_its_last_inputs():
    split = SplitSequence(sharding.CP_RING, {"context": 4}, parts=4, heads=2, rows=3, tokens=20, width=2, passes=3)
    width = layer("convolution").conv_width
    whole = 3 * 4 * (width - 1) * DIM * 2
    assert width > 2 and layer("convolution").traffic(split) == {"all-gather": 2 * whole, "reduce-scatter": whole}
