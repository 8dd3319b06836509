"""Generation of masked diffusion models against the algorithms of LLaDA and SDAR, written out in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn, ops
from maxlib.inference import Generator, LocalEngine, Sampler, denoise
from tests.nn.tiny import filled_llama

VOCAB, MASK = 61, 60
PROMPTS = [[1, 4, 2, 3, 0], [5], [3, 1, 4, 1, 5, 2, 2, 5]]


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2)


@pytest.fixture(scope="module")
def two_way(model):
    return Generator(nn.with_mask(model, ops.Full()), dtype=jnp.float32)


@pytest.fixture(scope="module")
def blocks(model):
    """Trained in pairs, which generation has not."""
    return Generator(nn.with_mask(model, ops.BlockCausal(4, pairs=True)), dtype=jnp.float32)


@jax.jit
def logits(model, tokens):
    return model.logits(model(tokens, dtype=jnp.float32).hidden)


def scores(model, length=0):
    """Function from tokens to logits, one row at a time, without a cache; rows are filled up to a length."""

    def compute(text):
        padded = jnp.asarray([[*text, *[MASK] * (length - len(text))]], jnp.int32)
        return np.array(logits(model, padded)[0, : len(text)], np.float64)

    return compute


def unmasked(logits_of, text, columns, steps, threshold=np.inf, shift=0):
    """Replaces the masks of a block: in each step those of highest probability."""
    text = np.array(text)
    total = int((text[columns] == MASK).sum())
    counts = [total // steps + (i < total % steps) for i in range(steps)]
    for count in counts:
        masked = [c for c in columns if text[c] == MASK]
        if not masked:
            break
        odds = np.exp(logits_of(text))
        odds[:, MASK] = 0
        probs = odds / odds.sum(-1, keepdims=True)
        best = {c: int(probs[c - shift].argmax()) for c in masked}
        confidence = {c: probs[c - shift, best[c]] for c in masked}
        ranked = sorted(masked, key=lambda c: -confidence[c])
        for c in masked:
            if c in ranked[:count] or confidence[c] > threshold:
                text[c] = best[c]
    return text


def by_llada(logits_of, prompt, length, block, steps, **options):
    """All masks are there from the start; blocks count from the end of the prompt."""
    text = [*prompt, *[MASK] * length]
    for start in range(len(prompt), len(text), block):
        text = unmasked(logits_of, text, list(range(start, min(start + block, len(text)))), steps, **options)
    return list(map(int, text[len(prompt) :]))


def by_sdar(logits_of, prompt, length, block, steps, **options):
    """Blocks count from the start, and a block never sees later ones."""
    text, start = list(prompt), len(prompt) // block * block
    while len(text) < len(prompt) + length:
        text += [MASK] * (start + block - len(text))
        text, start = (
            list(unmasked(logits_of, text, list(range(start, start + block)), steps, **options)),
            start + block,
        )
    return list(map(int, text[len(prompt) :][:length]))


@pytest.mark.parametrize(
    "options", [{"steps": 3}, {"threshold": 0.05}, {"steps": 4, "shifted": True}], ids=["steps", "threshold", "shifted"]
)
def test_text_of_a_model_that_sees_all_is_that_of_llada(two_way, options):
    got = denoise(two_way, PROMPTS, mask_token=MASK, max_new_tokens=10, block=5, **options)
    logits_of, reference = scores(two_way.model), {"steps": 5} | options
    shift = int(reference.pop("shifted", False))
    assert got.texts == [by_llada(logits_of, p, 10, 5, shift=shift, **reference) for p in PROMPTS]
    assert got.steps == 2 * options["steps"] if "steps" in options else got.steps < 10


@pytest.mark.parametrize(
    "options", [{"steps": 2}, pytest.param({"threshold": 0.05}, marks=pytest.mark.full)], ids=["steps", "threshold"]
)
def test_cached_blocks_equal_uncached_ones(blocks, options):
    """In rows of any length, also of less than a block."""
    got = denoise(blocks, PROMPTS, mask_token=MASK, max_new_tokens=9, **options)
    logits_of = scores(nn.with_mask(blocks.model, ops.BlockCausal(4)), length=20)
    assert got.texts == [by_sdar(logits_of, p, 9, 4, **{"steps": 4} | options) for p in PROMPTS]


def test_texts_end_with_their_stop_token(blocks):
    prompts = [PROMPTS[2]] * 3
    text, *_ = denoise(blocks, prompts, mask_token=MASK, max_new_tokens=9, steps=2).texts
    stopped = denoise(blocks, prompts, mask_token=MASK, max_new_tokens=9, steps=2, stop_token_ids=[text[1]])
    assert stopped.texts == [text[: text.index(text[1]) + 1]] * 3
    assert stopped.steps == 2  # one block


def test_rows_are_drawn_alone(blocks):
    """With a key of its own, whatever is beside it, and never a mask."""
    options = {"mask_token": MASK, "max_new_tokens": 6, "sampler": Sampler(), "key": jax.random.key(2)}
    both = denoise(blocks, [PROMPTS[0], PROMPTS[1]], **options, remasking="random").texts
    assert both == denoise(blocks, [PROMPTS[0], PROMPTS[2]], **options, remasking="random").texts[:1] + both[1:]
    assert both != denoise(blocks, [PROMPTS[0], PROMPTS[1]], **options).texts
    assert MASK not in np.concatenate(both)


def test_bad_input(model, blocks, two_way):
    options = {"mask_token": MASK, "max_new_tokens": 4}
    with pytest.raises(ValueError, match="needs a model whose tokens attend to later ones"):
        denoise(Generator(model), PROMPTS, **options)
    with pytest.raises(ValueError, match="block must be that of the model's mask, 4, got 8"):
        denoise(blocks, PROMPTS, block=8, **options)
    with pytest.raises(ValueError, match="models without blocks"):
        denoise(blocks, PROMPTS, shifted=True, **options)
    with pytest.raises(ValueError, match="mask_token must be below the vocabulary of 61 tokens, got 61"):
        denoise(two_way, PROMPTS, **options | {"mask_token": VOCAB})
    for generate in (blocks.generate, LocalEngine(blocks.model, slots=1, capacity=32).generate):
        with pytest.raises(ValueError, match="use inference.denoise"):
            generate(PROMPTS, max_new_tokens=4)
