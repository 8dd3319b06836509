"""Masked diffusion: its noise, its loss against the formula, and blocks in pairs against blocks one by one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops, sharding, training
from maxlib.models import deepseek, mamba2
from tests.nn.tiny import filled_llama
from tests.training import tiny

MASK, BLOCK = 60, 4
LOSS = training.MaskedDiffusion(MASK)
corrupt = jax.jit(LOSS.corrupt)


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2)


def packed():
    """Two documents and padding in a row, then one that goes on in another row."""
    tokens = np.random.default_rng(0).integers(1, 60, (2, 16)).astype(np.int32)
    segment_ids = np.array([[1] * 7 + [2] * 6 + [0] * 3, [1] * 16])
    targets = np.where(np.roll(segment_ids, -1, 1) == segment_ids, np.roll(tokens, -1, 1), -1)
    targets[1, -1] = 5
    return {"tokens": tokens, "targets": targets * (segment_ids > 0) - (segment_ids == 0), "segment_ids": segment_ids}


def formula(model, batch):
    """The sum of -log p / t over masked targets, in float64."""
    inputs = {name: batch[name] for name in ("segment_ids", "valid") if name in batch}
    logits = jax.jit(lambda model, tokens: model.logits(model(tokens, dtype=jnp.float32, **inputs).hidden))
    logits = np.asarray(logits(model, batch["tokens"]), np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    rows, columns = np.nonzero(np.asarray(batch["targets"]) >= 0)
    learned = np.asarray(batch["targets"])[rows, columns]
    return -np.sum(log_probs[rows, columns, learned] * np.asarray(batch["noise_weights"])[rows, columns])


def test_the_loss_is_its_formula(model):
    model = nn.with_mask(model, ops.Full())
    batch = corrupt(model, packed(), jax.random.key(3))
    value, stats = jax.jit(functools.partial(LOSS, dtype=jnp.float32))(model, packed(), jax.random.key(3))
    assert float(value) == pytest.approx(formula(model, batch), rel=1e-5)
    # Every token but the first of a document and padding counts, masked or not.
    assert float(stats.num_targets) == 6 + 5 + 15
    masked = batch["targets"] >= 0
    assert 0 < float(stats.sums["accuracy"].count) == masked.sum() < 26
    np.testing.assert_array_equal(batch["tokens"], jnp.where(masked, MASK, packed()["tokens"]))
    np.testing.assert_array_equal(batch["targets"], jnp.where(masked, packed()["tokens"], -1))


def test_noise():
    """Documents and blocks have a level each, at which a token is masked with this probability."""
    tokens = np.full((64, 256), 7, np.int32)
    batch = {"tokens": tokens, "targets": tokens, "segment_ids": np.repeat([[1, 2]], 64, 0).repeat(128, 1)}
    network = nn.with_mask(filled_llama(num_layers=1), ops.Full())
    for model, group in ((network, 128), (nn.with_mask(network, ops.BlockCausal(16)), 16)):
        noisy = jax.jit(training.MaskedDiffusion(MASK, levels=(0.25, 0.75)).corrupt)(model, batch, jax.random.key(0))
        weights = np.asarray(noisy["noise_weights"]).reshape(64, -1, group)
        levels = 1 / weights[:, :, -1:]
        np.testing.assert_allclose(weights[:, :, 1:] * levels, 1, rtol=1e-5)
        assert abs(levels.mean() - 0.5) < 0.02 and levels.min() > 0.25 and levels.max() < 0.75
        assert abs(levels.std() - 0.5 / 12**0.5) < 0.015
        masked = np.asarray(noisy["targets"]).reshape(64, -1, group) == 7
        assert abs((masked - levels)[weights > 0].mean()) < 0.01
        assert not masked[:, :: 128 // group, 0].any()  # first tokens are no targets


def test_shifted_targets_are_predicted_one_before(model):
    model, key = nn.with_mask(model, ops.Full()), jax.random.key(3)
    batch = LOSS.corrupt(model, packed(), key)
    shifted = training.MaskedDiffusion(MASK, shifted=True).corrupt(model, packed(), key)
    for name in ("targets", "noise_weights"):
        np.testing.assert_array_equal(shifted[name][:, :-1], batch[name][:, 1:])
    np.testing.assert_array_equal(shifted["tokens"], batch["tokens"])


@functools.partial(jax.jit, static_argnames="mask")
def hidden_states(model, mask, **inputs):
    return nn.with_mask(model, mask)(**inputs, dtype=jnp.float32).hidden


def test_a_noisy_block_sees_the_text_before_it_and_itself(model):
    """Pairs compute in one pass what a cache of the text and one block after the other compute."""
    paired = nn.with_mask(model, ops.BlockCausal(BLOCK, pairs=True))
    batch = {name: x[1:] for name, x in packed().items() if name != "segment_ids"}
    pairs = corrupt(paired, batch, jax.random.key(5))
    text, noisy = pairs["tokens"]
    np.testing.assert_array_equal(text, batch["tokens"][0])
    assert (pairs["targets"][0] == -1).all() and not pairs["noise_weights"][0].any() and (noisy == MASK).sum() > 4
    got = hidden_states(paired, ops.BlockCausal(BLOCK, pairs=True), tokens=pairs["tokens"])
    want = hidden_states(model, ops.BlockCausal(BLOCK), tokens=text[None])
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    for start in range(0, 16, BLOCK):
        tokens = jnp.concatenate([text[:start], noisy[start : start + BLOCK], text[start + BLOCK :]])
        block = hidden_states(model, ops.BlockCausal(BLOCK), tokens=tokens[None])[0, start : start + BLOCK]
        np.testing.assert_allclose(got[1, start : start + BLOCK], block, atol=1e-5)


def test_packed_pairs_equal_pairs_alone(model):
    paired = nn.with_mask(model, ops.BlockCausal(BLOCK, pairs=True))
    batch = corrupt(paired, packed(), jax.random.key(1))
    together = hidden_states(paired, paired.masks[0], tokens=batch["tokens"], segment_ids=batch["segment_ids"])
    tokens, segment_ids = np.zeros((2, 4, 16), np.int32)
    for document, (first, end) in enumerate(((0, 7), (7, 13))):  # in rows of their own, by the same program
        rows = slice(2 * document, 2 * document + 2)
        tokens[rows, : end - first] = batch["tokens"][:2, first:end]
        segment_ids[rows, : end - first] = 1
    alone = hidden_states(paired, paired.masks[0], tokens=tokens, segment_ids=segment_ids)
    np.testing.assert_allclose(together[:2, :7], alone[:2, :7], atol=1e-5)
    np.testing.assert_allclose(together[:2, 7:13], alone[2:, :6], atol=1e-5)
    gradients = jax.jit(jax.grad(lambda model: LOSS(model, packed(), jax.random.key(1), dtype=jnp.float32)[0]))(paired)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mesh", "rules"),
    [
        ({"fsdp": 4, "tensor": 2}, sharding.FSDP_TP | {"vocab": None}),
        ({"fsdp": 4, "context": 2}, sharding.FSDP | sharding.CP_GATHER),
    ],
    ids=["fsdp_tp", "context"],
)
def test_pairs_on_several_devices(model, mesh, rules):
    paired = nn.with_mask(model, ops.BlockCausal(BLOCK, pairs=True))
    batch = {name: jnp.tile(x, (4, 1)) for name, x in packed().items()}
    run = lambda model, batch: jax.value_and_grad(
        lambda model: LOSS(model, batch, jax.random.key(1), dtype=jnp.float32)[0], allow_int=True
    )(model)
    want, gradients = jax.jit(run)(paired, batch)
    layout = sharding.Layout(sharding.make_mesh(**mesh), rules)
    with sharding.use(layout):
        there = jax.device_put(paired, sharding.shardings(paired, layout))
        got, theirs = jax.jit(run, compiler_options=tiny.QUICKLY)(there, batch)
    assert float(got) == pytest.approx(float(want), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(b).max()), theirs, gradients)


def test_bad_input(model):
    paired, key = nn.with_mask(model, ops.BlockCausal(BLOCK, pairs=True)), jax.random.key(0)
    with pytest.raises(ValueError, match="levels must be two probabilities"):
        training.MaskedDiffusion(MASK, levels=(0.0, 1.0))
    with pytest.raises(ValueError, match="give a random key"):
        jax.eval_shape(lambda: LOSS(paired, packed()))
    with pytest.raises(ValueError, match="models without blocks"):
        jax.eval_shape(lambda: training.MaskedDiffusion(MASK, shifted=True)(paired, packed(), key))
    with pytest.raises(ValueError, match="text only, but this batch has images"):
        jax.eval_shape(lambda: LOSS.corrupt(paired, packed() | {"images": jnp.zeros(2)}, key))
    with pytest.raises(ValueError, match=r"give it loss.corrupt\(model, batch, key\)"):
        LOSS.from_hidden(paired, jnp.zeros((2, 16, 32)), packed())
    with pytest.raises(ValueError, match="even number of rows, got 3"):
        jax.eval_shape(lambda: paired(jnp.zeros((3, 8), jnp.int32)))
    with pytest.raises(ValueError, match=r"not for a cache: nn.with_mask\(model, ops.BlockCausal\(4\)\)"):
        jax.eval_shape(lambda: paired(jnp.zeros((2, 8), jnp.int32), cache=paired.init_cache(2, 8)))


def shapes(family, preset):
    return jax.eval_shape(lambda: family.model(family.presets[preset], rngs=nnx.Rngs(0)))


def test_layers_that_do_not_support_pairs_or_masks_are_named():
    latent = nn.with_mask(shapes(deepseek.FAMILY, "deepseek-v2-lite"), ops.BlockCausal(4, pairs=True))
    with pytest.raises(ValueError, match="MLA does not support pairs"):
        jax.eval_shape(lambda model, tokens: model(tokens), latent, jnp.zeros((2, 8), jnp.int32))
    with pytest.raises(ValueError, match="Mamba2 has none to replace"):
        nn.with_mask(shapes(mamba2.FAMILY, next(iter(mamba2.PRESETS))), ops.Full())
