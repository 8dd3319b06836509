"""Images in pipelines: losses and gradients are those of one device, the encoder's among them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, sharding, training
from maxlib.models import gemma4, mistral, qwen3_5, qwen3_vl
from maxlib.training._pipelined_gradient import pipelined_gradient
from maxlib.weights import HFConfig
from tests.models import parity
from tests.nn.tiny import filled

LOSS = functools.partial(training.NextToken(), dtype=jnp.float32)
pipelined = functools.partial(pipelined_gradient, training.NextToken(), dtype=jnp.float32)
LAYOUT = {"stage": 2, "data": 2}, sharding.DP | sharding.Pipeline("stage", microbatches=2)
# Family, case of the golden files, and what makes its layers repeat.
CASES = {
    "qwen3_vl": (qwen3_vl, "two_added", {}),
    "qwen3_5": (qwen3_5, "images", {"num_layers": 4, "layer_types": ("linear_attention", "full_attention") * 2}),
    "gemma4": (gemma4, "images_experts_standardized", {}),
    "mistral": (mistral, "sees", {}),
}
# Of the largest number in a gradient. A hybrid's chunks round more in float32, as in its parity with transformers.
CLOSE = {"qwen3_5": 4e-4}
SCHEDULES = ("1f1b", "gpipe")


@functools.cache
def model_and_batch(name: str):
    """A model, and four rows of tokens, each with a row of patches; the first has two images."""
    family, case, changes = CASES[name]
    case = parity.golden(name)[case]
    cfg = dataclasses.replace(family.FAMILY.fields.read(HFConfig(case["config"])), **changes)
    model = filled(lambda: family.FAMILY.model(cfg, rngs=nnx.Rngs(0)))
    patches, ends = parity.images(case), np.cumsum([0, *(np.prod(grid) for grid in case["grids"])])
    order = [0, 1, 2] * 2
    pixels = np.concatenate([patches.pixels[ends[i] : ends[i + 1]] for i in order])
    images = nn.vision.pad_patches(pixels, patches.grids[order], counts=[2, 1, 2, 1])
    tokens = np.tile(case["tokens"], (2, 1)).astype(np.int32)
    targets = np.roll(tokens, -1, axis=1)
    targets = np.where(np.asarray(model.inputs["images"].is_placeholder(targets)), -1, targets).astype(np.int32)
    return model, {"tokens": tokens, "targets": targets, "images": images}


@jax.jit
def gradients(trainable, rest, batch):
    """The gradient of the mean loss by autodiff, which in a pipeline is GPipe, and that mean."""

    def mean(trainable):
        total, stats = LOSS(nn.combine(trainable, rest), batch)
        return total / stats.num_targets

    loss, grads = jax.value_and_grad(mean)(trainable)
    return grads, loss


@pytest.mark.full
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_device(name, schedule):
    model, batch = model_and_batch(name)
    want, mean = gradients(*nn.partition(model), batch)
    degrees, rules = LAYOUT
    layout = sharding.Layout(sharding.make_mesh(**degrees, devices=jax.devices()[:4]), rules)
    spread = nn.partition(jax.device_put(model, sharding.shardings(model, layout)))
    with sharding.use(layout):
        placed = training.shard_batch(batch, layout)
        if schedule == "gpipe":
            got, loss = gradients(*spread, placed)
        else:
            got, loss, _ = jax.jit(pipelined)(*spread, placed, jax.random.key(0))
    np.testing.assert_allclose(loss, mean, rtol=1e-5)
    close = CLOSE.get(name, 2e-4)
    for path, gradient in want.items():
        assert np.abs(gradient).max() > 0 or "k_bias" in path or path.endswith("attn.k.b"), path
        np.testing.assert_allclose(
            got[path], gradient, rtol=0, atol=close * np.abs(gradient).max() + 1e-7, err_msg=path
        )


def abstract_gradients(model, batch, loss=training.NextToken(), degrees=LAYOUT[0]):
    layout = sharding.Layout(sharding.make_mesh(**degrees, devices=jax.devices()[:4]), LAYOUT[1])
    with sharding.use(layout):
        jax.eval_shape(functools.partial(pipelined_gradient, loss), *nn.partition(model), batch, jax.random.key(0))


def test_what_a_pipeline_cannot_do_with_images_is_an_error():
    model, batch = model_and_batch("mistral")
    unsplit = nn.vision.Patches(batch["images"].pixels[0], batch["images"].grids[0])
    with pytest.raises(
        ValueError, match="a batch of 1 rows cannot be split into 2 microbatches.* Images need a row of patches"
    ):
        abstract_gradients(model, batch | {"images": unsplit})
    model, batch = model_and_batch("qwen3_vl")
    cfg = dataclasses.replace(model.cfg, num_layers=2)
    every = jax.eval_shape(lambda: qwen3_vl.Qwen3VL(cfg, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="layer_inputs are not supported in a pipeline"):
        abstract_gradients(every, batch)


def test_losses_that_read_no_images_still_refuse_them():
    model, batch = model_and_batch("qwen3_vl")
    with pytest.raises(ValueError, match="this batch has images"):
        abstract_gradients(model, batch, training.MTP())
