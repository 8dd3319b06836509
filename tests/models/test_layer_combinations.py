"""One model of this year's kinds of layers, under what a run may combine them with.

By default only results, as gradients take long to compile; `test_combinations.py` does the same for families.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import adapters, nn, ops, quantization, sharding, training
from maxlib.checkpoint import Checkpointer
from maxlib.sharding import constrain
from tests.models.test_combinations import LOSS, ROWS, T, assert_same, gradients, packed, step
from tests.nn.recurrences import DELTA, DIM, KIMI, MAMBA
from tests.nn.test_sparse_mla import INDEX, SIZES
from tests.nn.tiny import filled
from tests.training.tiny import QUICKLY

VOCAB, VECTOR = 32, 4
MASK = ops.Causal() & ops.SlidingWindow(5)
# Documents are longer and shorter than the length at which this rope begins to stretch.
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": ops.Rope(8, scaling=ops.DynamicNTKScaling(4.0, 6))}
MIXERS = (
    functools.partial(nn.GatedDeltaNet, **DELTA),
    functools.partial(nn.KimiDeltaAttention, **KIMI),
    functools.partial(nn.Mamba2, **MAMBA),
    nn.ShortConvolution,
    functools.partial(nn.SparseMLA, **SIZES, **INDEX, top_k=4),
    functools.partial(nn.Attention, **HEADS, mask=MASK, keys_as_values=True),
)


class Block(nn.Layer):
    """A mixer, an MLP and, if the model has them, a vector of each token for this layer."""

    def __init__(self, mixer: Any, vectors: bool, *, rngs: nnx.Rngs):
        self.attn_norm, self.mlp_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.attn = mixer(DIM, rngs=rngs)
        self.mlp = nn.GatedMLP(DIM, 24, rngs=rngs)
        self.per_layer = nn.per_layer.PerLayerGate(DIM, VECTOR, rngs=rngs) if vectors else None

    def __call__(self, x, ctx, cache=None, vector=None):
        y, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + y, "batch", "seq", "act_embed")
        x = x + self.mlp(self.mlp_norm(x))
        x = x if self.per_layer is None else x + self.per_layer(x, vector)
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Mixed(nn.Decoder):
    """Each kind of layer twice, scanned."""

    layers_take_tokens = True

    def __init__(self, vectors: bool = True, *, rngs: nnx.Rngs):
        count = 2 * len(MIXERS)
        self.embed = nn.Embed(VOCAB, DIM, rngs=rngs)
        self.per_layer = nn.per_layer.PerLayerEmbed(VOCAB, DIM, count, VECTOR, rngs=rngs) if vectors else None
        self.layers = nn.Stack(lambda mixer, rngs: Block(mixer, vectors, rngs=rngs), 2 * MIXERS, rngs=rngs)
        self.norm = nn.RMSNorm(DIM)

    def layer_inputs(self, x, ctx):
        return None if self.per_layer is None else self.per_layer(x, ctx.tokens)


@functools.cache
def mixed(vectors: bool = True) -> Mixed:
    """With slow decay, so that a state which is not reset shows, and small updates, so that twelve layers do not
    amplify rounding.
    """
    model, rng = filled(lambda: Mixed(vectors, rngs=nnx.Rngs(0))), np.random.default_rng(3)
    for path, variable in nn.variables(model).items():
        value = np.asarray(variable.get_value())
        if path.endswith(("a_log", "dt_bias")):
            variable.set_value(np.full_like(value, np.log(0.05) * path.endswith("a_log")))
        elif path.endswith(("attn.o.w", "mlp.down.w", "per_layer.norm.scale")):
            variable.set_value(0.3 * value)
        elif ".indexer." in path:  # stored, but not trained
            variable.set_value(rng.normal(size=value.shape).astype(np.float32))
        elif path == "embed.w":
            variable.set_value(7 * value)
    return model


jitted = functools.partial(jax.jit, compiler_options=QUICKLY)
ONE = np.ones((ROWS, T), np.int32)  # one document in each row


@jitted
def run(model, tokens, segment_ids):
    return model.logits(model(tokens, segment_ids=segment_ids, dtype=jnp.float32).hidden)


def logits(model, tokens, segment_ids=ONE) -> np.ndarray:
    return np.asarray(run(model, tokens, segment_ids))


def layout(strategy, **degrees: int) -> sharding.Layout:
    return sharding.Layout(sharding.make_mesh(**degrees), strategy)


def place(model, layout: sharding.Layout):
    return jax.device_put(jax.device_get(model), sharding.shardings(model, layout))


SPREAD = sharding.FSDP_TP | sharding.CP_GATHER, {"fsdp": 2, "tensor": 2, "context": 2}


@pytest.mark.full
def test_packed_documents_are_those_documents_alone():
    batch = packed(VOCAB)
    got = logits(mixed(), batch["tokens"], batch["segment_ids"])
    for document in (1, 2):
        inside = batch["segment_ids"] == document
        order = np.argsort(~inside, axis=1, kind="stable")  # its tokens first, and padding behind them
        tokens, segments = (np.take_along_axis(x, order, axis=1) for x in (batch["tokens"], inside.astype(np.int32)))
        alone = logits(mixed(), tokens, segments)
        np.testing.assert_allclose(got[inside], alone[segments > 0], atol=2e-5 * got.std())


def test_eight_devices_are_one():
    """Rows, heads and tokens over two devices each; documents and padding in a row."""
    batch, spread = packed(VOCAB), layout(SPREAD[0], **SPREAD[1])
    want = logits(mixed(), batch["tokens"], batch["segment_ids"])
    with sharding.use(spread):
        placed = training.shard_batch(batch, spread)
        got = logits(place(mixed(), spread), placed["tokens"], placed["segment_ids"])
    inside = batch["segment_ids"] > 0
    np.testing.assert_allclose(got[inside], want[inside], atol=2e-5 * want.std())


@pytest.mark.full
def test_gradients_on_eight_devices_with_remat_are_those_on_one_without():
    batch, spread = packed(VOCAB), layout(SPREAD[0], **SPREAD[1])
    want = jax.device_get(gradients(*nn.partition(mixed()), batch))
    with sharding.use(spread):
        parts = nn.partition(place(mixed(), spread))
        assert_same(gradients(*parts, training.shard_batch(batch, spread), remat="full"), want)


@pytest.mark.full
def test_a_pipeline_computes_the_same():
    """Without vectors, which it refuses."""
    model, stages = mixed(vectors=False), layout(PIPELINE, stage=2, data=4)
    batch = {name: np.tile(x, (2, 1)) for name, x in packed(VOCAB).items()}
    loss = lambda: jitted(lambda model, batch: LOSS(model, batch)[0])  # traced anew for each layout
    want = loss()(model, batch)
    with sharding.use(stages):
        got = loss()(place(model, stages), training.shard_batch(batch, stages))
    np.testing.assert_allclose(got, want, rtol=1e-5)


PIPELINE = sharding.DP | sharding.Pipeline("stage", microbatches=2)


def test_a_pipeline_refuses_vectors_of_layers():
    with (
        sharding.use(layout(PIPELINE, stage=2, data=4)),
        pytest.raises(ValueError, match="layer_inputs are not supported in a pipeline"),
    ):
        jax.eval_shape(LOSS, mixed(), packed(VOCAB))


@functools.cache
def adapted() -> Mixed:
    """Stored in int8, with adapters that are not zero."""
    add = lambda low: adapters.add(low, adapters.LoRA(2, 4), rngs=nnx.Rngs(1))
    model = jitted(lambda model: add(quantization.for_inference(model, "int8")))(mixed())
    rng = np.random.default_rng(2)
    for path, variable in nn.variables(model).items():
        if adapters.trainable(path, variable):
            variable.set_value(jnp.asarray(0.2 * rng.normal(size=variable.get_value().shape), jnp.float32))
    return model


@pytest.mark.full
def test_padded_prompts_then_tokens_one_by_one_are_the_whole():
    """With adapters beside an int8 base, and merged. Rows of different lengths: many tokens at once, twice, then one by
    one.
    """
    tokens = packed(VOCAB)["tokens"]
    want, plain = (logits(model, tokens) for model in (jitted(adapters.merge)(adapted()), mixed()))
    assert np.abs(want - plain).max() > 0.1 * want.std()
    cache, done = adapted().init_cache(ROWS, T, dtype=jnp.float32, rope_length=T), np.zeros(ROWS, int)
    for new in ([9, 7, 1, 4], [3, 9, 9, 0], *3 * [[1, 1, 1, 1]]):
        width = 9 if max(new) > 1 else 1
        at = np.minimum(done[:, None] + np.arange(width), T - 1)
        valid = np.arange(width) < np.array(new)[:, None]
        got, cache = step(adapted(), np.take_along_axis(tokens, at, 1), cache, valid)
        for row, n in enumerate(new):
            there = want[row, done[row] : done[row] + n]
            np.testing.assert_allclose(np.asarray(got)[row, :n], there, atol=1e-4 * want.std())
        done += new


@pytest.mark.full
def test_a_checkpoint_is_restored_on_other_devices(tmp_path):
    with Checkpointer(tmp_path) as saver:
        saver.save(1, {"params": nn.partition(place(mixed(), layout(sharding.FSDP, fsdp=4, data=2)))[0]})
    other = place(filled(lambda: Mixed(rngs=nnx.Rngs(0)), seed=1), layout(sharding.FSDP_TP, fsdp=4, tensor=2))
    fresh, want = nn.partition(other)[0], nn.partition(mixed())[0]
    with Checkpointer(tmp_path) as reader:
        restored = reader.restore(like={"params": fresh})["params"]
    assert {path: x.sharding for path, x in restored.items()} == {path: x.sharding for path, x in fresh.items()}
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(restored), want)
