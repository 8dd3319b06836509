"""Continuous batching of prompts with images: each text is that of a generator, in which all run at once."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn, ops
from maxlib.inference import Generator, LocalEngine
from maxlib.models import gemma3, gemma4, glm5_next, mistral, qwen3_5, qwen3_vl
from maxlib.weights import HFConfig
from tests.models import parity
from tests.nn.tiny import filled

LIMITS = [9, 5, 12, 7]
FAMILIES = {
    "qwen3_vl": (qwen3_vl, "two_added"),
    "qwen3_5": (qwen3_5, "images"),
    "gemma4": (gemma4, "images_shared_clipped"),
    "mistral": (mistral, "sees"),
    "glm5_next": (glm5_next, "in_turn"),
}


def texts(model, prompts, images, all_images):
    """All prompts at once, and on two slots."""
    together = Generator(model, dtype=jnp.float32)
    engine = LocalEngine(model, slots=2, capacity=48, dtype=jnp.float32)
    want = together.generate(prompts, images=all_images, max_new_tokens=max(LIMITS), capacity=48)
    got = engine.generate(prompts, images=images, max_new_tokens=LIMITS)
    return [text[:n] for text, n in zip(want, LIMITS, strict=True)], [completion for (completion,) in got], engine


@pytest.mark.parametrize(
    "name", [name if name == "mistral" else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES]
)
def test_images_of_any_size(name):
    """Two images, none, one, and the same prompt with another picture, on two slots."""
    family, case = FAMILIES[name]
    case = parity.golden(name)[case]
    cfg = family.FAMILY.fields.read(HFConfig(case["config"]))
    model = filled(lambda: family.FAMILY.model(cfg, rngs=nnx.Rngs(0)))
    patches, ends = parity.images(case), np.cumsum([0, *(np.prod(grid) for grid in case["grids"])])
    picture = lambda *numbers: nn.vision.pad_patches(
        np.concatenate([patches.pixels[ends[i] : ends[i + 1]] for i in numbers]), patches.grids[list(numbers)]
    )
    first, second = case["tokens"].tolist()
    prompts = [first, [3, 8, 8, 1, 30], second[:13], second[:13]]
    other = nn.vision.Patches(picture(2).pixels[::-1].copy(), picture(2).grids)
    pixels = np.concatenate([picture(0, 1, 2).pixels[: ends[3]], other.pixels[: ends[3] - ends[2]]])
    all_images = nn.vision.pad_patches(pixels, np.concatenate([patches.grids[:3], patches.grids[2:3]]))
    want, got, engine = texts(model, prompts, [picture(0, 1), None, picture(2), other], all_images)
    assert [completion.tokens for completion in got] == want
    assert abs(got[2].log_probs[0] - got[3].log_probs[0]) > 1e-3  # of another picture; texts may be alike
    with pytest.raises(ValueError, match="image placeholders, but the given images make 0"):
        engine.generate(prompts, max_new_tokens=2)
    with pytest.raises(ValueError, match="a list with the images of each of the 4 prompts .*, got 1 of them"):
        engine.generate(prompts, images=[picture(0, 1)], max_new_tokens=2)


@pytest.mark.full
def test_images_of_one_size():
    sees = gemma3.Vision(
        dim=24, mlp_dim=32, num_layers=1, num_heads=2, image_size=12, patch_size=3, num_tokens=4, image_token=63
    )
    size = dict(vocab=64, num_layers=6, dim=32, mlp_dim=48, num_heads=2, num_kv_heads=1, head_dim=16, window=8)
    cfg = gemma3.Config(**size, rope=ops.Rope(16, 1e6), local_rope=ops.Rope(16), vision=sees)
    model = filled(lambda: gemma3.Gemma3(cfg, rngs=nnx.Rngs(0)))
    pictures = np.random.RandomState(0).standard_normal((3, 3, 12, 12)).astype(np.float32)
    seen = [63] * 4
    prompts = [[1, *seen, 2, *seen, 3], [5, 9, 2], [*seen, 3, 1], [*seen, 3, 1]]
    split = [pictures[:2], None, pictures[1:2], pictures[2:]]
    want, got, _ = texts(model, prompts, split, np.concatenate(split[:1] + split[2:]))
    assert [completion.tokens for completion in got] == want
    assert abs(got[2].log_probs[0] - got[3].log_probs[0]) > 1e-3  # of another picture; texts may be alike
