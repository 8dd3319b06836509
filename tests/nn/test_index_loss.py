"""The loss of indexers against its formula in float64, what it has a gradient for, and what an indexer learns from it;
and attention to gathered latents, which is that under a mask.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.models import deepseek_v32
from maxlib.nn.attention import _indexer
from maxlib.nn.attention._index_loss import Attended, divergence
from maxlib.nn.attention._indexer import Chosen, Index
from maxlib.training._step import make_gradient
from tests.models.test_combinations import LOSS, assert_same, packed
from tests.nn.test_sparse_mla import DIM, INDEX, SEGMENTS, SEQ, SIZES, TOP, X
from tests.nn.tiny import filled
from tests.training.tiny import QUICKLY

B, T, N, H, I, HI, R = 2, 11, 3, 5, 4, 6, 7
SCALE = 0.4


@functools.cache
def trained_layer() -> nn.SparseMLA:
    options = {"top_k": TOP, "index_loss": nn.IndexLoss()}
    return jax.jit(lambda: nn.SparseMLA(DIM, **SIZES, **INDEX, **options, rngs=nnx.Rngs(0)))()


def layer(loss: nn.IndexLoss | None, gather: bool | None = None) -> nn.SparseMLA:
    """Of the same weights for any loss."""
    copied = jax.tree.map(lambda a: a, trained_layer())
    copied.index_loss, copied.gather = loss, gather
    return copied


def run(layer, x, segment_ids=None):
    y, _, aux = layer.with_loss(x, nn.make_context(*x.shape[:2], segment_ids=segment_ids))
    return y, aux


@jax.jit
def parts(layer, x, segment_ids=None) -> tuple:
    """Queries and keys of attention, what the index scores are made of, these, and the bounds of queries."""
    ctx = nn.make_context(*x.shape[:2], segment_ids=segment_ids)
    index = layer._index(x, layer.indexer.keys(x, ctx), ctx)
    return *layer.queries_and_keys(x, ctx), index, index.scores(), ctx.key_intervals(ops.Causal())


# ---------------------------------------------------------------------------------------------- the formula


def of_one_query(q, keys, index_q, weight, index_keys) -> float:
    """The divergence as the report writes it, for the keys that count: `N K H`, and index keys `K Hi`."""
    scores = SCALE * np.einsum("nh,nkh->nk", q, keys)
    attention = np.exp(scores - scores.max(axis=1, keepdims=True))
    p = (attention / attention.sum(axis=1, keepdims=True)).sum(axis=0)
    p /= p.sum()
    index = sum(weight[j] * np.maximum(index_keys @ index_q[j], 0) for j in range(len(weight)))
    log_softmax = index - index.max() - np.log(np.exp(index - index.max()).sum())
    return float(np.sum(p * (np.log(p) - log_softmax)))


def formula(index, q, keys, chosen) -> float:
    """The sum over queries; `chosen` are the places that each of them, by row and query, compares."""
    index_q, weight, index_keys = index
    each = [
        of_one_query(q[b, t], keys[b][:, places], index_q[b, t], weight[b, t], index_keys[b, places])
        for (b, t), places in chosen.items()
    ]
    return sum(each)


def arrays(gathers: bool):
    rng = np.random.default_rng(0)
    width = R if gathers else H
    keys = rng.normal(size=(B, T, R) if gathers else (B, T, N, H))
    index = rng.normal(size=(B, T, I, HI)), rng.normal(size=(B, T, I)), rng.normal(size=(B, T, HI))
    # The first row has two documents; the second one is padded.
    start = np.array([[0] * 6 + [6] * 5, [0] * 11])
    end = np.array([[*range(1, 12)], [*range(1, 10), 0, 0]])
    best = np.stack([[rng.permutation(T)[:4] for _ in range(T)] for _ in range(B)])
    return index, rng.normal(size=(B, T, N, width)), keys, start, end, best


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("kind", ["all", "chosen"])
def test_the_loss_and_its_gradient_are_the_formula(kind, chunks, monkeypatch):
    index, q, keys, start, end, best = arrays(kind == "chosen")
    columns = best.shape[2] if kind == "chosen" else T
    in_chunks(monkeypatch, -(-B * T * (N + I) * columns // chunks))
    one_by_head = np.stack([keys] * N, axis=2) if kind == "chosen" else keys
    places = {
        (b, t): [s for s in range(start[b, t], end[b, t]) if kind == "all" or s in best[b, t]]
        for b, t in np.ndindex(B, T)
    }
    places = {key: paths for key, paths in places.items() if paths}
    truth = lambda *index: formula(index, q, one_by_head.transpose(0, 2, 1, 3), places)
    single = lambda a: jnp.asarray(a.astype(np.float32))
    chosen = Chosen(jnp.asarray(start), jnp.asarray(end), None if kind == "all" else jnp.asarray(best))
    attended = Attended(single(q), single(keys), chosen, SCALE)
    loss = lambda *index: divergence(Index(*index), attended)
    got, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*map(single, index))
    np.testing.assert_allclose(got, truth(*index), rtol=1e-5)
    rng = np.random.default_rng(1)
    for i, gradient in enumerate(gradients):
        way = rng.normal(size=index[i].shape)
        moved = lambda step, i=i, way=way: truth(*index[:i], index[i] + step * way, *index[i + 1 :])
        slope = (moved(1e-6) - moved(-1e-6)) / 2e-6
        np.testing.assert_allclose(np.sum(np.asarray(gradient) * way), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dense", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_layer_reports_the_mean_over_its_queries(dense):
    """Documents and padding in a row; of the chosen keys, or of all."""
    weight = 0.5
    trained = layer(nn.IndexLoss(weight, dense=dense))
    q, k, index, scores, (start, end) = jax.device_get(parts(trained, X, SEGMENTS))
    double = lambda a: np.asarray(a, np.float64)
    places = {}
    for b, t in np.argwhere(SEGMENTS > 0):
        visible = np.arange(start[b, t], end[b, t])
        best = visible[np.argsort(-scores[b, t, visible], kind="stable")]
        places[b, t] = sorted(best if dense else best[:TOP])
    q, k = double(q) * trained.scale / SCALE, double(k).transpose(0, 2, 1, 3)
    want = formula([double(a) for a in index], q, k, places)
    got = jax.jit(run)(trained, X, SEGMENTS)[1]["loss/indexer"]
    np.testing.assert_allclose(got, weight * want / len(places), rtol=2e-5)


# ---------------------------------------------------------------------------------------------- gradients


def everything(layer, x, segment_ids=None) -> dict:
    """The output and the indexer's loss, with the gradients of both; those of `x` under its name."""
    trained, rest = nn.partition(layer)

    def total(trained, x, output: float, loss: float):
        y, aux = run(nn.combine(trained, rest), x, segment_ids)
        # Of padding too, which has no output.
        weighted = jnp.sum(y * jax.random.normal(jax.random.key(0), y.shape))
        return output * weighted + loss * aux["loss/indexer"], (y, aux["loss/indexer"])

    by_call = {}
    for name, factors in {"output": (1.0, 0.0), "loss": (0.0, 1.0)}.items():
        (d_weights, d_x), results = jax.grad(total, (0, 1), has_aux=True)(trained, x, *factors)
        by_call[name] = d_weights | {"x": d_x}
    return by_call | {"results": results}


def computed(layer, *inputs) -> dict:
    return jax.jit(lambda *arrays: everything(*arrays), compiler_options=QUICKLY)(layer, *inputs)


@functools.cache
def once(dense: bool, gather: bool) -> dict:
    return jax.device_get(computed(layer(nn.IndexLoss(dense=dense), gather), X, SEGMENTS))


@pytest.mark.parametrize(
    ("dense", "gather"),
    [*(pytest.param(dense, False, marks=pytest.mark.full) for dense in (True, False)), (False, True)],
)
def test_the_loss_and_the_output_train_different_weights(dense, gather):
    results = once(dense, gather)
    for path in results["output"]:
        learns, rests = ("loss", "output") if path.startswith("indexer.") else ("output", "loss")
        assert np.abs(results[learns][path]).max() > 1e-6 and not np.any(results[rests][path]), path


def test_gathered_latents_are_those_under_a_mask():
    """Outputs, losses and all gradients; documents and padding in a row. In several chunks: on eight devices, below."""
    jax.tree.map(close, once(False, True), once(False, False))


def in_chunks(monkeypatch, numbers: int) -> None:
    monkeypatch.setitem(_indexer.NUMBERS, "cpu", numbers)


def close(got, want) -> None:
    np.testing.assert_allclose(got, want, atol=1e-5 * max(1e-3, np.abs(want).max()))


MESHES = {
    "experts": ({"fsdp": 2, "tensor": 2, "expert": 2}, sharding.FSDP_TP | sharding.EP),
    "context": ({"fsdp": 2, "tensor": 2, "context": 2}, sharding.FSDP_TP | sharding.CP_GATHER),
}


def spread(model, kind: str, monkeypatch):
    """A model over eight devices, and their layout; in several chunks."""
    degrees, rules = MESHES[kind]
    layout = sharding.Layout(sharding.make_mesh(**degrees), rules)
    in_chunks(monkeypatch, 1000)
    return jax.device_put(jax.device_get(model), sharding.shardings(model, layout)), layout


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("kind", "gather"),
    [
        ("experts", True),
        *(pytest.param(*x, marks=FULL) for x in [("experts", False), ("context", True), ("context", False)]),
    ],
)
def test_a_layer_on_eight_devices_is_that_on_one(kind, gather, monkeypatch):
    want, placed = once(False, False), spread(layer(nn.IndexLoss(), gather), kind, monkeypatch)
    # Each row twice, as the mesh splits rows in four: the loss is the same mean, and output's gradients are other ones.
    x, segments = np.tile(X, (2, 1, 1)), np.tile(SEGMENTS, (2, 1))
    with sharding.use(placed[1]):
        got = jax.device_get(computed(placed[0], x, segments))
    jax.tree.map(close, (got["results"][0][:2], got["results"][1]), want["results"])
    for path, gradient in want["loss"].items():
        close(got["loss"][path], gradient if path != "x" else np.zeros_like(x))


# ---------------------------------------------------------------------------------------------- learning


@pytest.mark.full
def test_an_indexer_learns_what_attention_looks_at():
    """In the warm-up the loss falls, and the chosen keys get more of attention, of what the best choice would get."""
    mixer = layer(nn.IndexLoss(dense=True))
    mixer.q_up.w.set_value(3 * mixer.q_up.w.get_value())  # sharper
    trained, rest = nn.partition(mixer, training.trainable_only("indexer.*"))
    rng, optimizer = np.random.default_rng(0), optax.adam(1e-2)
    texts = jnp.asarray(rng.normal(size=(101, 4, SEQ, DIM)), jnp.float32)

    @jax.jit
    def learn(trained):
        def step(carry, x):
            loss, grads = jax.value_and_grad(lambda w: run(nn.combine(w, rest), x)[1]["loss/indexer"])(carry[0])
            updates, state = optimizer.update(grads, carry[1])
            return (optax.apply_updates(carry[0], updates), state), loss

        return jax.lax.scan(step, (trained, optimizer.init(trained)), texts[:-1])

    (after, _), losses = learn(trained)
    losses = np.asarray(losses)
    assert losses[-5:].mean() < 0.75 * losses[:5].mean()
    before, after = (recall(nn.combine(w, rest), texts[-1]) for w in (trained, after))
    assert after > before + 0.15


@jax.jit
def recall(layer, x):
    """The share of attention that chosen keys get, of what as many keys can get."""
    q, k, index, _, bounds = parts(layer, x)
    every = Chosen(*bounds)
    p = Attended(q, k, every, layer.scale).probabilities(k, every.among_all(SEQ)).mean(axis=1)
    best = layer.indexer.choose(index, bounds).among_all(SEQ)
    most = jax.lax.top_k(p, TOP)[0].sum(axis=-1)
    return jnp.mean((jnp.sum(jnp.where(best, p, 0), axis=-1) / most)[:, TOP:])


# ---------------------------------------------------------------------------------------------- a model

CFG = deepseek_v32.Config(
    vocab=32, num_layers=4, num_dense=1, dim=16, mlp_dim=24, expert_dim=12, num_heads=4, q_rank=12, kv_rank=8,
    nope_dim=6, v_dim=6, rope=ops.Rope(4, interleaved=True), index_heads=8, index_dim=10, index_top=6, num_experts=8,
    num_shared=1, top_k=2, num_groups=4, top_groups=2, losses=(nn.router.SequenceBalance(0.01),),
    index_loss=nn.IndexLoss(0.5),
)  # fmt: skip


@functools.cache
def model(gather: bool) -> deepseek_v32.DeepSeekV32:
    network = filled(lambda: deepseek_v32.DeepSeekV32(CFG, rngs=nnx.Rngs(0)))
    for mixer in nn.mixer.mixers(network):
        mixer.gather = gather
    return network


def trained(model, batch, **options) -> tuple:
    """The gradients and the loss of a batch."""
    gradient = make_gradient(LOSS, **options)
    run = jax.jit(lambda *arguments: gradient(*arguments)[:2], compiler_options=QUICKLY)
    return run(*nn.partition(model), batch, jax.random.key(0))


@functools.cache
def on_one_device() -> tuple:
    return jax.device_get(trained(model(False), packed(CFG.vocab)))


def test_a_scanned_model_reports_each_layer():
    report = jax.eval_shape(LOSS, model(False), packed(CFG.vocab))[1].sums["loss/indexer"]
    assert report.shape == (CFG.num_layers,)
    assert "loss/indexer" not in jax.eval_shape(run, layer(None), X)[1]


@pytest.mark.full
def test_a_model_adds_the_losses_of_its_layers():
    loss, stats = jax.jit(LOSS, compiler_options=QUICKLY)(model(False), packed(CFG.vocab))
    nll, each = stats.sums["nll"], stats.sums["loss/indexer"]
    assert each.shape == (4,) and np.all(each > 0)
    np.testing.assert_allclose(loss, nll + each.sum() + stats.sums["loss/moe_sequence_balance"].sum(), rtol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("options", [{"remat": "full"}, {"microbatches": 2, "remat": ("chosen", "q")}], ids=str)
@pytest.mark.parametrize("gather", [False, True])
def test_remat_and_microbatches_change_nothing(gather, options):
    same(trained(model(gather), packed(CFG.vocab), **options), on_one_device())


@pytest.mark.full
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("kind", MESHES)
def test_a_model_on_eight_devices_is_that_on_one(kind, gather, monkeypatch):
    placed, layout = spread(model(gather), kind, monkeypatch)
    with sharding.use(layout):
        got = trained(placed, training.shard_batch(packed(CFG.vocab), layout), remat="full")
    same(got, on_one_device())


def same(got, want) -> None:
    """Losses and gradients of indexers to 1e-5; those of all else as families are compared."""
    assert_same(got, want)
    for path, gradient in want[0].items():
        if ".indexer." in path:
            np.testing.assert_allclose(got[0][path], gradient, atol=1e-5 * np.abs(gradient).max(), err_msg=path)
