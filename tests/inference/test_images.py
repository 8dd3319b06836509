"""Prompts with images: the text equals that of transformers, and bad inputs raise before anything is compiled."""

import jax.numpy as jnp
import numpy as np
import pytest

import maxlib
from maxlib.inference import Generator
from tests.models import parity
from tests.models.test_gemma3_images import IMAGE, PER_IMAGE, config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.full  # by default tests/models compare logits, and test_engine_images.py texts of one family

# Two images in the first prompt, one at the start of the second, none in the third.
SEEN = [IMAGE] * PER_IMAGE
PROMPTS = [[5, *SEEN, 9, 2, *SEEN, 7], [*SEEN, 3, 1, 4], [8, 8, 1, 30, 2, 6]]
IMAGES = np.random.RandomState(2).standard_normal((3, 3, 12, 12)).astype(np.float32)
SPLIT = [IMAGES[:2], IMAGES[2:], None]


@pytest.fixture(scope="module")
def theirs():
    model = transformers.Gemma3ForConditionalGeneration(config()).eval()
    values = parity.tensors({name: list(p.shape) for name, p in model.named_parameters()})
    for name, p in model.named_parameters():
        # Small next to what the layers add, or every token would only repeat itself.
        p.data.copy_(torch.from_numpy(values[name] * np.float32(0.02 if "embed_tokens" in name else 1)))
    return model


@pytest.fixture(scope="module")
def generator(theirs, tmp_path_factory):
    directory = tmp_path_factory.mktemp("gemma3")
    theirs.save_pretrained(directory)
    return Generator(maxlib.from_pretrained(directory), dtype=jnp.float32)


def test_greedy_continuation_is_that_of_transformers(theirs, generator):
    want = []
    for prompt, images in zip(PROMPTS, SPLIT, strict=True):
        ids = torch.tensor([prompt])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": (ids == IMAGE).long()}
        if images is not None:
            inputs["pixel_values"] = torch.from_numpy(images)
        out = theirs.generate(**inputs, max_new_tokens=16, do_sample=False, eos_token_id=None)
        want.append(out[0, len(prompt) :].tolist())
    assert generator.generate(PROMPTS, images=IMAGES, max_new_tokens=16) == want
    assert all(len(set(text)) > 2 for text in want)
    blurred = generator.generate(PROMPTS, images=IMAGES * 0.1, max_new_tokens=16)
    assert blurred[2] == want[2] and blurred[:2] != want[:2]


def test_images_and_placeholders_have_to_match(generator):
    with pytest.raises(ValueError, match="have 12 image placeholders, but the given images make 8 vectors"):
        generator.generate(PROMPTS, images=IMAGES[:2], max_new_tokens=2)
    with pytest.raises(ValueError, match="have 12 image placeholders, but the given images make 0 vectors"):
        generator.generate(PROMPTS, max_new_tokens=2)
