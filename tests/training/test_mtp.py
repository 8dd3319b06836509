"""Multi-token prediction on packed documents, against loops over the documents one by one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.models import deepseek
from maxlib.training import MTP, NextToken
from maxlib.training._gradients import parameters_outside
from maxlib.training._step import means
from tests.nn.tiny import filled
from tests.training import tiny

CFG = dataclasses.replace(
    deepseek.PRESETS["deepseek-v3"],
    vocab=29,
    num_layers=2,
    num_dense=1,
    num_mtp=2,
    dim=16,
    mlp_dim=20,
    expert_dim=8,
    num_heads=2,
    q_rank=None,
    kv_rank=8,
    nope_dim=6,
    v_dim=6,
    rope=ops.Rope(4, interleaved=True),
    num_experts=4,
    top_k=2,
    num_groups=1,
    top_groups=1,
    losses=(nn.router.SwitchBalance(0.01),),
)
LENGTHS = ((7, 1, 5), (2, 9))  # documents of each row; what is left is padding
SEQ = 14


@pytest.fixture(scope="module")
def model():
    return filled(lambda: deepseek.DeepSeek(CFG, rngs=nnx.Rngs(0)))


@pytest.fixture(scope="module")
def batch():
    random, rows = np.random.default_rng(0), np.zeros((3, len(LENGTHS), SEQ), np.int32)
    tokens, targets, segments = rows
    targets[:] = -1
    for row, lengths in enumerate(LENGTHS):
        for number, (start, length) in enumerate(zip(np.cumsum((0, *lengths[:-1])), lengths, strict=True), start=1):
            document = random.integers(1, CFG.vocab, length + 1)
            tokens[row, start : start + length] = document[:-1]
            targets[row, start : start + length] = document[1:]
            segments[row, start : start + length] = number
    targets[0, 2] = -1  # not asked for
    return {"tokens": jnp.asarray(tokens), "targets": jnp.asarray(targets), "segment_ids": jnp.asarray(segments)}


def documents():
    """Row and range of each."""
    for row, lengths in enumerate(LENGTHS):
        for start, length in zip(np.cumsum((0, *lengths[:-1])), lengths, strict=True):
            yield row, int(start), int(start + length)


@jax.jit
def run(model, tokens, segment_ids):
    out = model(tokens, segment_ids=segment_ids, dtype=jnp.float32)
    modules = model.predict_ahead(out.hidden, tokens, segment_ids=segment_ids)
    return out, modules, [model.logits(h) for h in (out.hidden, *(m.hidden for m in modules))]


@pytest.fixture(scope="module")
def packed(model, batch):
    return jax.tree.map(np.asarray, run(model, batch["tokens"], batch["segment_ids"]))


def test_no_module_looks_beyond_its_document(model, batch, packed):
    """Each document alone, a row each, gives the same; and where the next token is unknown nothing is valid."""
    places = list(documents())
    # As many rows at a time as `packed` has: one program for both.
    alone, segments = np.zeros((2, -(-len(places) // len(LENGTHS)) * len(LENGTHS), SEQ), np.int32)
    for i, (row, start, stop) in enumerate(places):
        alone[i, : stop - start] = batch["tokens"][row, start:stop]
        segments[i, : stop - start] = 1
    cut = lambda x: jnp.asarray(x).reshape(-1, len(LENGTHS), SEQ)
    runs = [jax.device_get(run(model, *inputs)) for inputs in zip(cut(alone), cut(segments), strict=True)]
    alone = [np.concatenate([modules[depth].hidden for _, modules, _ in runs]) for depth in range(CFG.num_mtp)]
    for depth, (module, want) in enumerate(zip(packed[1], alone, strict=True), start=1):
        expected = np.zeros((len(LENGTHS), SEQ), bool)
        for i, (row, start, stop) in enumerate(places):
            expected[row, start : max(stop - depth, start)] = True
            n = max(stop - start - depth, 0)
            np.testing.assert_allclose(module.hidden[row, start : start + n], want[i, :n], atol=2e-5)
        np.testing.assert_array_equal(module.valid, expected)


def test_a_module_is_what_the_paper_says(model, batch, packed):
    """Without padding: norms, the next token's embedding first, projection, block, norm."""
    module, hidden, tokens = model.mtp[0], packed[0].hidden[:1, :7], np.asarray(batch["tokens"])[:1, :7]
    rms = lambda x: np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + CFG.norm_eps)
    norm = lambda layer, x: x / rms(x) * np.asarray(layer.scale[...])
    embedded = np.asarray(model.embed.w[...])[tokens[:, 1:]]
    x = np.concatenate([norm(module.embed_norm, embedded), norm(module.hidden_norm, hidden[:, :-1])], axis=-1)
    block = jax.jit(lambda block, x: block(x, nn.make_context(1, 6), None)[0])
    want = block(module.block, jnp.asarray(x @ np.asarray(module.project.w[...]).T))
    np.testing.assert_allclose(packed[1][0].hidden[:1, :6], norm(module.norm, np.asarray(want)), atol=2e-5)


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@functools.cache
def losses():
    loss = functools.partial(NextToken(), dtype=jnp.float32)
    both = functools.partial(MTP(weight=0.5), dtype=jnp.float32)
    return jax.jit(loss), jax.jit(both)


def test_weights_are_those_of_the_modules_targets_too(model, batch):
    _, both = losses()
    weights = jnp.asarray(np.random.default_rng(2).uniform(0, 2, (len(LENGTHS), SEQ)), jnp.float32)
    plain = [both(model, batch | {"loss_weights": w})[0] for w in (weights, 2 * weights, jnp.ones_like(weights))]
    balance = 2 * plain[0] - plain[1]  # layers' own losses, times the sum of the weights, are linear in them too
    assert abs(float(balance)) < 1e-3 * abs(float(plain[0]))
    assert float(plain[2]) == pytest.approx(float(both(model, batch)[0]), rel=1e-6)
    # A weight on one token alone: its own target, and the modules' that are shifted onto it.
    single = jnp.zeros_like(weights).at[0, 5].set(1)
    total, stats = both(model, batch | {"loss_weights": single})
    assert float(stats.num_targets) == 1 and float(total) > 0


def test_the_loss_is_the_sum_over_what_documents_can_tell(model, batch, packed):
    plain, both = (f(model, batch) for f in losses())
    targets = np.asarray(batch["targets"])
    _, modules, (_, *logits) = packed
    count, total = (targets >= 0).sum(), 0.0
    for depth, scores in enumerate(logits, start=1):
        nll, hits = [], []
        for row, start, stop in documents():
            for i in range(start, stop - depth):
                target = targets[row, i + depth]
                if target >= 0:
                    nll.append(-log_softmax(scores[row, i])[target])
                    hits.append(scores[row, i].argmax() == target)
        total += 0.25 * np.sum(nll) + count * modules[depth - 1].aux["loss/moe_balance"]
        metrics = means(both[1])
        assert metrics[f"mtp{depth}/nll"] == pytest.approx(np.mean(nll), rel=1e-5)
        assert metrics[f"mtp{depth}/accuracy"] == pytest.approx(np.mean(hits), abs=1e-6)
    assert both[0] - plain[0] == pytest.approx(total, rel=1e-5)
    assert plain[1].num_targets == both[1].num_targets == count
    assert both[1].sums["nll"] == plain[1].sums["nll"]


def test_metrics_of_modules_are_added_over_batches(model, batch):
    """Of targets in two batches, as a module has another share of the targets in each."""
    run = losses()[1]
    rows = [np.where(np.arange(2)[:, None] == row, batch["targets"], -1) for row in range(2)]
    halves = [run(model, batch | {"targets": jnp.asarray(targets)})[1] for targets in rows]
    got, want = means(jax.tree.map(jnp.add, *halves)), means(run(model, batch)[1])
    for name in ("mtp1/nll", "mtp2/nll", "mtp2/accuracy"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, err_msg=name)


def test_the_balance_of_experts_covers_the_modules(model, batch):
    """Their loads come behind those of the model's layers, as `update_router_bias` wants them."""
    _, stats = losses()[1](model, batch)
    load = stats.sums["moe/load"] / stats.num_targets
    assert load.shape == (1 + 2, CFG.num_experts)
    np.testing.assert_allclose(load.sum(axis=1), 1, rtol=1e-5)
    moved = nn.router.update_router_bias(model, load, rate=0.1)
    np.testing.assert_allclose(
        moved.mtp[1].block.moe.router.expert_bias[...], 0.1 * np.sign(0.25 - np.asarray(load[2])), atol=1e-6
    )


@pytest.mark.parametrize("remat", [None, pytest.param("full", marks=pytest.mark.full)])
def test_gradients_reach_the_modules_and_the_trunk(batch, remat):
    """Of one layer without experts and one module, which compile in a third of the time."""
    cfg = dataclasses.replace(CFG, num_layers=1, num_mtp=1)
    params, rest = nn.partition(filled(lambda: deepseek.DeepSeek(cfg, rngs=nnx.Rngs(0))))

    def value(params):
        model = nn.combine(params, rest)
        both, _ = MTP(remat_modules=remat)(model, batch, dtype=jnp.float32, remat=remat)
        return both - NextToken()(model, batch, dtype=jnp.float32)[0]

    gradients = jax.jit(jax.grad(value), compiler_options=tiny.QUICKLY)(params)
    for path in ("mtp.0.project.w", "mtp.0.block.moe.up.w", "layers.groups.0.0.attn.o.w", "embed.w", "head.w"):
        assert np.abs(gradients[path]).max() > 1e-4, path


def test_modules_that_a_loss_leaves_out_are_found(model, batch):
    """Their gradients are zeros, so that AdamW would shrink them in silence: a Trainer says so."""
    parts = *nn.partition(model), batch, jax.random.key(0)
    outside = parameters_outside(NextToken(), *parts)
    assert outside and outside == [path for path in sorted(parts[0]) if path.startswith("mtp.")]
    assert parameters_outside(MTP(), *parts) == []
