"""QK-clip: the largest logits of the step's forward pass, the factors of the paper, and runs at a high rate."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.sharding import constrain
from maxlib.training import _qk_clip
from tests.nn.tiny import filled
from tests.training import optimizer_goldens as goldens
from tests.training import tiny

LOSS = functools.partial(training.NextToken(), dtype=jnp.float32)


def gqa(rngs):
    return nn.Attention(16, num_heads=4, num_kv_heads=2, head_dim=8, rope=ops.Rope(8), bias=True, rngs=rngs)


def mla(rngs):
    return nn.MLA(16, num_heads=4, kv_rank=8, q_rank=8, nope_dim=6, v_dim=8, rope=ops.Rope(4), rngs=rngs)


class Layer(nnx.Module):
    def __init__(self, attention, rngs):
        self.norm, self.attn = nn.RMSNorm(16), attention(rngs)

    def __call__(self, x, ctx, cache):
        out, cache = self.attn(self.norm(x), ctx, cache)
        return constrain(x + out, "batch", "seq", "act_embed"), cache, {}


class Model(nnx.Module):
    softcap = None

    def __init__(self, attention, rngs):
        self.embed, self.head = nn.Embed(tiny.VOCAB, 16, rngs=rngs), nn.Embed(tiny.VOCAB, 16, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Layer(attention, rngs), "abb", rngs=rngs)

    def __call__(self, tokens, *, segment_ids=None, positions=None, valid=None, cache=None, dtype=None, remat=None):
        ctx = nn.make_context(*tokens.shape, positions=positions, segment_ids=segment_ids, valid=valid)
        x, _, aux = self.layers(self.embed(tokens, dtype=dtype), ctx, remat=remat)
        return nn.Output(x, None, aux)

    def head_weight(self):
        return self.head.w[...]


@functools.cache
def model(attention):
    return filled(lambda: Model(attention, nnx.Rngs(0)))


def batch():
    return tiny.batch() | {"segment_ids": np.where(np.arange(12) < 5, 1, 2) * np.ones((8, 1), np.int32)}


@functools.cache
def stepping(limit, **options):
    return jax.jit(training.make_train_step(LOSS, optax.sgd(0.0), qk_clip=limit, **options))


@functools.cache
def median_limit(attention):
    return float(np.median(logits_by_layer(attention)))


def begun(attention):
    return training.make_state(model(attention), optax.sgd(0.0))


def logits_by_layer(attention):
    """The largest logit of each head, `L N`, in float64 from the queries and keys of each layer."""
    net = model(attention)
    _, values = jax.jit(nn.capture(net, ["q", "k"]))(
        jnp.asarray(batch()["tokens"]), segment_ids=jnp.asarray(batch()["segment_ids"])
    )
    q, k = (np.asarray(values[name], np.float64) for name in ("q", "k"))
    scores = np.einsum("LBTNH,LBSNH->LNBTS", q, np.repeat(k, q.shape[3] // k.shape[3], axis=3)) * q.shape[-1] ** -0.5
    segments = batch()["segment_ids"]
    seen = np.tril(np.ones((12, 12), bool)) & (segments[:, :, None] == segments[:, None, :])
    return np.where(seen, scores, -np.inf).max(axis=(2, 3, 4))


def factor(attention, largest, limit):
    eta = np.minimum(1, limit / np.maximum(largest, 1e-30))
    return eta if attention is mla else np.repeat(eta.reshape(-1, 2, 2).min(-1), 2, axis=-1)


@pytest.mark.parametrize(
    ("attention", "options"),
    [
        (gqa, {"microbatches": 2, "remat": "full"}),
        (mla, {}),
        pytest.param(gqa, {}, marks=pytest.mark.full),
        pytest.param(mla, {"microbatches": 2, "remat": "full"}, marks=pytest.mark.full),
    ],
)
def test_heads_over_the_limit_are_scaled_by_the_formula(attention, options):
    largest = logits_by_layer(attention)
    limit = median_limit(attention)
    old, step = begun(attention).trainable, stepping(limit, **options)
    state, metrics = step(begun(attention), batch())
    assert float(metrics["max_logit"]) == pytest.approx(largest.max(), rel=1e-5)
    eta = factor(attention, largest, limit)
    assert (eta < 1).any() and (eta == 1).any()
    for path, before in old.items():
        want = np.asarray(before, np.float64)
        slot, _, name = path.partition(".attn.")
        rows = {"layers.groups.0.0": eta[0], "layers.groups.1.0": eta[1:]}.get(slot)
        if name in ("q.w", "q.b"):
            want = want * np.sqrt(rows).reshape(*rows.shape, *[1] * (want.ndim - rows.ndim))
        if name in ("k.w", "k.b"):
            heads = np.sqrt(rows[..., ::2])
            want = want * heads.reshape(*heads.shape, *[1] * (want.ndim - heads.ndim))
        if name == "q_up.w":
            want[..., :6, :] *= np.sqrt(rows)[..., None, None]
            want[..., 6:, :] *= rows[..., None, None]
        if name == "k_up.w":
            want *= np.sqrt(rows)[..., None, None]
        np.testing.assert_allclose(state.trainable[path], want, rtol=1e-5, atol=1e-7, err_msg=path)
    _, again = step(state, batch())
    assert float(again["max_logit"]) < float(metrics["max_logit"])


def test_weights_of_mla_are_those_of_maxtext():
    weights, want = goldens.mla_weights(), np.load(goldens.FILE)
    layer = jax.eval_shape(lambda: {"attn": mla(nnx.Rngs(0))})
    params = {f"attn.{name}.w": jnp.asarray(x) for name, x in weights.items() if name != "max_logits"}
    largest = {"attn.max_logits": jnp.asarray(weights["max_logits"].max(axis=0))}
    got = _qk_clip.clip_queries_and_keys(params, layer, largest, limit=100.0)
    for name in ("q_up", "k_up", "v_up"):
        np.testing.assert_allclose(got[f"attn.{name}.w"], want[f"clipped_{name}"], rtol=1e-6)
    assert (np.asarray(got["attn.q_up.w"]) != weights["q_up"]).any()


@pytest.mark.full
def test_on_a_mesh_as_on_one_device():
    limit, options = median_limit(gqa), {"microbatches": 2, "remat": "full"}  # a step that is compiled already
    want, metrics = stepping(limit, **options)(begun(gqa), batch())
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2))
    with sharding.use(layout):
        state = training.make_state(training.copy_model(model(gqa), layout), optax.sgd(0.0))
        step = jax.jit(training.make_train_step(functools.partial(LOSS), optax.sgd(0.0), qk_clip=limit, **options))
        got, split = step(state, training.shard_batch(batch(), layout))
    assert float(split["max_logit"]) == pytest.approx(float(metrics["max_logit"]), rel=1e-5)
    for path, value in want.trainable.items():
        np.testing.assert_allclose(got.trainable[path], value, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_run_at_a_high_rate_stays_under_the_limit_and_the_plain_one_grows():
    """At ten times the usual rate. A step may exceed the limit by what it adds itself."""
    optimizer, limit = training.adamw(0.1, mask=None, weight_decay=0.0), 6.0
    seen = {}
    for clip in (limit, 1e9):
        step = training.jit_step(training.make_train_step(LOSS, optimizer, qk_clip=clip))
        state = training.make_state(lambda: Model(gqa, nnx.Rngs(0)), optimizer)
        seen[clip] = []
        for i in range(12):
            state, metrics = step(state, tiny.batch(seed=i))
            seen[clip].append(float(metrics["max_logit"]))
    assert max(seen[1e9]) > 1.7 * limit and max(seen[limit]) < 1.4 * limit
    assert max(seen[limit][6:]) < 1.1 * limit < min(seen[1e9][6:10])


def test_what_cannot_be_clipped_is_refused():
    norms = lambda rngs: nn.Attention(
        16, num_heads=2, head_dim=8, q_norm=nn.RMSNorm(8), k_norm=nn.RMSNorm(8), rngs=rngs
    )
    with pytest.raises(ValueError, match=r"layers\.groups\.0\.0\.attn, whose queries or keys are normalized"):
        jax.eval_shape(stepping(1.0), jax.eval_shape(lambda: begun(norms)), batch())
    with pytest.raises(ValueError, match="needs a model with layers of nn.Attention or nn.MLA"):
        step = jax.jit(training.make_train_step(LOSS, optax.sgd(0.1), qk_clip=1.0))
        jax.eval_shape(step, training.make_state(tiny.model(), optax.sgd(0.1)), tiny.batch())
    with pytest.raises(ValueError, match="qk_clip must be the largest attention logit"):
        training.make_train_step(LOSS, optax.sgd(0.1), qk_clip=0.0)
