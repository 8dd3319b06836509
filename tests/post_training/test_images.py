"""Pairs of answers to questions about images: each answer is scored as it is alone, with its own images."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import data, nn, training
from maxlib import post_training as pt
from maxlib.models import qwen3_vl
from maxlib.tokenization import ChatTemplate
from maxlib.training._gradients import gradients_of
from tests.data.test_images import SIZES, TEMPLATE, processor, rgb, tokenizer  # noqa: F401
from tests.nn.tiny import filled

LENGTH, PATCHES = 32, 40


def question(*images):
    parts = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]


def answer(text: str):
    return [{"role": "assistant", "content": text}]


def records() -> list[dict]:
    """Four pairs with one, two, no and one images of different sizes."""
    images = [rgb(*SIZES[i % 3], seed=i) for i in range(4)]
    asked = [question(images[0]), question(*images[1:3]), question(), question(images[3])]
    return [
        {"prompt": prompt, "chosen": answer("A" * (1 + i)), "rejected": answer("cat")} for i, prompt in enumerate(asked)
    ]


@pytest.fixture(scope="module")
def documents(tokenizer, processor):  # noqa: F811
    return data.pairs(records(), tokenizer, ChatTemplate(TEMPLATE), images=processor)


def rows_of(documents, processor, **options):  # noqa: F811
    return data.pad(documents, length=LENGTH, images=processor.blank(PATCHES), **options)


def test_both_answers_have_the_images_of_their_prompt(documents, processor):  # noqa: F811
    rows = rows_of(documents, processor)
    for document, row in zip(documents, rows, strict=True):
        for half in ("chosen", "rejected"):
            found, size = document[half]["images"], len(document[half]["tokens"])
            assert row[half].keys() == {"tokens", "targets", "segment_ids", "images"}
            assert row[half]["images"].pixels.shape == (PATCHES, 48)
            np.testing.assert_array_equal(row[half]["images"].pixels[: len(found.pixels)], found.pixels)
            np.testing.assert_array_equal(row[half]["images"].grids[: len(found.grids)], found.grids)
            assert not row[half]["images"].pixels[len(found.pixels) :].any()
            np.testing.assert_array_equal(row[half]["tokens"][:size], document[half]["tokens"])
        np.testing.assert_array_equal(document["chosen"]["images"].pixels, document["rejected"]["images"].pixels)
    assert [len(document["chosen"]["images"].grids) for document in documents] == [1, 2, 0, 1]


def test_what_does_not_fit_is_an_error_or_left_out(documents, processor, tokenizer):  # noqa: F811
    with pytest.raises(ValueError, match="a document has images: pad it with images="):
        data.pad(documents, length=LENGTH)[0]
    with pytest.raises(ValueError, match="must fit 8 patches and 2 images of a row, got 24 and 2"):
        data.pad(documents, length=LENGTH, images=processor.blank(8))[1]
    with pytest.raises(ValueError, match="does not fit a row of 8"):  # placeholders are never cut
        data.pad(documents, length=8, images=processor.blank(PATCHES), overlong="truncate")[1]
    kept = data.pad(documents, length=LENGTH, images=processor.blank(8), overlong="drop")
    assert len(list(kept.to_iter_dataset())) == 3
    with pytest.raises(ValueError, match="the chat has 1 images: pass images="):
        data.pairs(records(), tokenizer, ChatTemplate(TEMPLATE))[0]


def test_labelled_answers_have_images_too(tokenizer, processor):  # noqa: F811
    labelled = [{"messages": one["prompt"] + one["chosen"], "desirable": i % 2 == 0} for i, one in enumerate(records())]
    examples = data.kto_examples(labelled, tokenizer, ChatTemplate(TEMPLATE), images=processor)
    row = rows_of(examples, processor)[0]
    np.testing.assert_array_equal(row["images"].pixels, row["mismatched"]["images"].pixels)
    assert row["images"].grids.any() and (row["mismatched"]["targets"] != row["targets"]).any()


def seeing(processor):  # noqa: F811
    vision = qwen3_vl.Vision(
        dim=16, mlp_dim=16, num_layers=1, num_heads=2, patch_size=4, frames=1, num_positions=16,
        image_token=processor.image_token, video_token=277, start_token=278, end_token=279,
    )  # fmt: skip
    cfg = qwen3_vl.Config(
        vocab=280, num_layers=1, dim=32, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=16,
        rope=qwen3_vl.Rope(16, 10_000.0, max_length=64), sections=(4, 2, 2), vision=vision,
    )  # fmt: skip
    return filled(lambda: qwen3_vl.Qwen3VL(cfg, rngs=nnx.Rngs(0)))


@jax.jit
def log_probs(model, tokens, images):
    """Log-probabilities `B T V` of a model in float32."""
    return jax.nn.log_softmax(model.logits(model(tokens, images=images, dtype=jnp.float32).hidden))


def alone(model, document) -> float:
    """The log-probability of an answer, in a row without padding."""
    images = document["images"] if len(document["images"].grids) else None
    scores, targets = np.asarray(log_probs(model, document["tokens"][None], images))[0], document["targets"]
    return float(sum(scores[i, t] for i, t in enumerate(targets) if t >= 0))


def test_dpo_is_that_of_answers_one_by_one(documents, processor):  # noqa: F811
    policy, reference = seeing(processor), seeing(processor)
    reference = jax.tree.map(lambda w: 0.8 * w, reference)
    found = [
        [alone(model, document[half]) for model in (policy, reference) for half in ("chosen", "rejected")]
        for document in documents
    ]
    beta = 0.3
    want = sum(np.log1p(np.exp(-beta * ((c - rc) - (r - rr)))) for c, r, rc, rr in found)
    rows = rows_of(documents, processor)
    batch = next(data.Loader(lambda part: rows[part].to_iter_dataset(), batch_size=4, num_shards=1))
    loss = functools.partial(pt.preference_loss, kind=pt.DPO(beta), dtype=jnp.float32)
    both = pt.WithFrozen(policy, reference)
    got, stats = jax.jit(loss)(both, batch)
    assert float(got) == pytest.approx(want, rel=1e-5) and float(stats.num_targets) == 4
    np.testing.assert_allclose(stats.sums["logps/chosen"], sum(c for c, *_ in found), rtol=1e-5)
    blind = {half: {**rows, "images": jax.tree.map(lambda x: 0 * x, rows["images"])} for half, rows in batch.items()}
    for half in ("chosen", "rejected"):
        blind[half]["images"].grids[:] = batch[half]["images"].grids
    assert abs(float(jax.jit(loss)(both, blind)[0]) - want) > 1e-4 * want


@pytest.mark.full
def test_gradients_are_those_of_microbatches(documents, processor):  # noqa: F811
    model = pt.WithFrozen(seeing(processor), seeing(processor))
    rows = rows_of(documents, processor)
    batch = next(data.Loader(lambda part: rows[part].to_iter_dataset(), batch_size=4, num_shards=1))
    loss = functools.partial(pt.preference_loss, dtype=jnp.float32)
    arguments = *nn.partition(model, nn.tree.default_filter(model)), jax.tree.map(jnp.asarray, batch)
    whole, parts = (
        jax.jit(gradients_of(one))(*arguments, jax.random.key(0))[0] for one in (loss, training.accumulate(loss, 2))
    )
    for path, gradient in whole.items():
        np.testing.assert_allclose(parts[path], gradient, atol=1e-5 * np.abs(gradient).max() + 1e-8, err_msg=path)
