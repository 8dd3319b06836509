"""Pairs of answers to questions about images: each answer is scored as it is alone, with its own images."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import data, inference, nn
from maxlib import post_training as pt
from maxlib.models import qwen3_vl
from maxlib.tokenization import ChatTemplate
from maxlib.training._batch_checks import check_first_batch
from maxlib.training._step import make_gradient
from tests.data.test_images import SIZES, TEMPLATE, processor, rgb, tiny_config, tokenizer  # noqa: F401
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
            images, size = document[half]["images"], len(document[half]["tokens"])
            assert row[half].keys() == {"tokens", "targets", "segment_ids", "images"}
            assert row[half]["images"].pixels.shape == (PATCHES, 48)
            np.testing.assert_array_equal(row[half]["images"].pixels[: len(images.pixels)], images.pixels)
            np.testing.assert_array_equal(row[half]["images"].grids[: len(images.grids)], images.grids)
            assert not row[half]["images"].pixels[len(images.pixels) :].any()
            np.testing.assert_array_equal(row[half]["tokens"][:size], document[half]["tokens"])
        np.testing.assert_array_equal(document["chosen"]["images"].pixels, document["rejected"]["images"].pixels)
    assert [len(document["chosen"]["images"].grids) for document in documents] == [1, 2, 0, 1]


def test_what_does_not_fit_is_an_error_or_left_out(documents, processor, tokenizer):  # noqa: F811
    with pytest.raises(ValueError, match="A document has images: pad it with images="):
        data.pad(documents, length=LENGTH)[0]
    with pytest.raises(ValueError, match="must fit a row of 8 patches and 2 images, got 24 and 2"):
        data.pad(documents, length=LENGTH, images=processor.blank(8))[1]
    with pytest.raises(ValueError, match="does not fit a row of 8"):  # placeholders are never cut
        data.pad(documents, length=8, images=processor.blank(PATCHES), overlong="truncate")[1]
    kept = data.pad(documents, length=LENGTH, images=processor.blank(8), overlong="drop")
    assert len(list(kept.to_iter_dataset())) == 3
    with pytest.raises(ValueError, match="the chat has 1 images: pass images="):
        data.pairs(records(), tokenizer, ChatTemplate(TEMPLATE))[0]


def test_labelled_answers_have_images_too(tokenizer, processor):  # noqa: F811
    labelled = [
        {"messages": record["prompt"] + record["chosen"], "desirable": i % 2 == 0} for i, record in enumerate(records())
    ]
    examples = data.kto_examples(labelled, tokenizer, ChatTemplate(TEMPLATE), images=processor)
    row = rows_of(examples, processor)[0]
    np.testing.assert_array_equal(row["images"].pixels, row["mismatched"]["images"].pixels)
    assert row["images"].grids.any() and (row["mismatched"]["targets"] != row["targets"]).any()


@pytest.fixture(scope="module")
def model(processor):  # noqa: F811
    return filled(lambda: qwen3_vl.Qwen3VL(tiny_config(processor), rngs=nnx.Rngs(0)))


@jax.jit
def log_probs(model, tokens, images):
    """Log-probabilities `B T V` in float32."""
    return jax.nn.log_softmax(model.logits(model(tokens, images=images, dtype=jnp.float32).hidden))


def alone(model, document) -> float:
    """The log-probability of an answer, in a row with no other images; the tokens behind it change nothing."""
    size = len(document["tokens"])
    images = document["images"] if len(document["images"].grids) else None
    scores = jax.device_get(log_probs(model, np.pad(document["tokens"], (0, LENGTH - size))[None], images))
    return float(sum(scores[0, i, t] for i, t in enumerate(document["targets"]) if t >= 0))


@pytest.mark.full
def test_dpo_is_that_of_answers_one_by_one(documents, processor, model):  # noqa: F811
    policy, reference = model, jax.tree.map(lambda w: np.float32(0.8) * np.asarray(w), model)
    losses = [
        [alone(model, document[half]) for model in (policy, reference) for half in ("chosen", "rejected")]
        for document in documents
    ]
    beta = 0.3
    want = sum(np.log1p(np.exp(-beta * ((c - rc) - (r - rr)))) for c, r, rc, rr in losses)
    rows = rows_of(documents, processor)
    batch = next(data.Loader(lambda part: rows[part].to_iter_dataset(), batch_size=4, num_shards=1))
    loss = jax.jit(functools.partial(pt.DPO(beta), dtype=jnp.float32))
    both = pt.WithFrozen(policy, reference)
    got, stats = loss(both, batch)
    assert float(got) == pytest.approx(want, rel=1e-5) and float(stats.num_targets) == 4
    np.testing.assert_allclose(stats.sums["logps/chosen"], sum(c for c, *_ in losses), rtol=1e-5)
    blind = {half: {**rows, "images": jax.tree.map(lambda x: 0 * x, rows["images"])} for half, rows in batch.items()}
    for half in ("chosen", "rejected"):
        blind[half]["images"].grids[:] = batch[half]["images"].grids
    assert abs(float(loss(both, blind)[0]) - want) > 1e-4 * want


@pytest.mark.full
def test_gradients_are_those_of_microbatches(documents, processor, model):  # noqa: F811
    model = pt.WithFrozen(model, model)
    rows = rows_of(documents, processor)
    batch = next(data.Loader(lambda part: rows[part].to_iter_dataset(), batch_size=4, num_shards=1))
    arguments = *nn.partition(model, nn.tree.default_filter(model)), jax.tree.map(jnp.asarray, batch)
    at_once, parts = (
        jax.jit(make_gradient(pt.DPO(), dtype=jnp.float32, microbatches=count))(*arguments, jax.random.key(0))[0]
        for count in (1, 2)
    )
    for path, gradient in at_once.items():
        np.testing.assert_allclose(parts[path], gradient, atol=1e-5 * np.abs(gradient).max() + 1e-8, err_msg=path)


@pytest.mark.full
def test_a_policy_scores_answers_as_their_sampler_did(documents, processor, model):  # noqa: F811
    """Log-probabilities of a batch with images are those of the engine."""
    sampler = inference.Sampler(temperature=0.7)
    chosen = [answer["chosen"] for answer in documents]
    prompts = [answer["tokens"][: np.argmax(answer["targets"] >= 0) + 1].tolist() for answer in chosen]
    images = [answer["images"] if len(answer["images"].grids) else None for answer in chosen]
    engine = inference.LocalEngine(model, slots=3, dtype=jnp.float32)
    groups = engine.generate(prompts, images=images, num_samples=2, max_new_tokens=4, sampler=sampler)
    rows = [
        (prompt, patches, answer)
        for prompt, patches, group in zip(prompts, images, groups, strict=True)
        for answer in group
    ]
    prompts, images, completions = zip(*rows, strict=True)
    advantages = np.linspace(-1, 1, 8)
    options = {"length": LENGTH, "images": images, "blank": processor.blank(PATCHES)}
    batch = pt.completion_batch(prompts, completions, advantages, **options)
    assert batch["images"].pixels.shape == (8, PATCHES, 48) and batch["images"].grids.any(axis=(1, 2)).sum() == 6
    scored = jax.jit(functools.partial(pt.log_probs, temperature=0.7, dtype=jnp.float32))
    scores = scored(model, batch)
    np.testing.assert_allclose(scores.log_prob, batch["sampler_log_probs"], atol=1e-4)
    assert (batch["sampler_log_probs"] < -0.1).sum() == 32  # of 8 answers with 4 tokens
    blind = batch | {"images": type(batch["images"])(0 * batch["images"].pixels, batch["images"].grids)}
    assert np.abs(scored(model, blind).log_prob - scores.log_prob).max() > 1e-2
    loss = functools.partial(pt.GRPO(temperature=0.7), dtype=jnp.float32)
    _, stats = jax.jit(loss)(model, batch | {"old_log_probs": batch["sampler_log_probs"]})
    assert float(stats.sums["ratio"]) == pytest.approx(8, abs=1e-3)  # 1 in each of the 8 answers


def test_answers_need_images_that_can_be_rows(processor):  # noqa: F811
    blank, prompts = processor.blank(PATCHES), [[1, 2]]
    make = functools.partial(pt.completion_batch, prompts, [[3]], [1.0], length=LENGTH)
    with pytest.raises(ValueError, match="those of the prompt of each of the 1 completions, together with blank="):
        make(images=[None])
    with pytest.raises(ValueError, match="got 2 of them"):
        make(images=[None, None], blank=blank)
    with pytest.raises(ValueError, match="must be nn.vision.Patches, .*, got ndarray"):
        make(images=[np.zeros((1, 3, 8, 8))], blank=blank)
    with pytest.raises(ValueError, match="must fit a row of 40 patches and 10 images, got 48 and 1"):
        make(images=[nn.vision.Patches(np.zeros((48, 48), np.float32), np.array([[1, 6, 8]]))], blank=blank)
    assert not make(images=[None], blank=blank)["images"].grids.any()


def test_placeholders_without_images_are_an_error_of_the_first_batch(documents, processor, model):  # noqa: F811
    """Inside jit ids are not known; a Trainer looks at them before."""
    rows = [row["chosen"] for row in rows_of(documents, processor)]
    batch = jax.tree.map(lambda *x: np.stack(x), *rows)
    check_first_batch(batch, model)
    blind = {name: x for name, x in batch.items() if name != "images"}
    for policy in (model, pt.WithFrozen(model, model)):
        with pytest.raises(ValueError, match="image placeholders, but the given images make 0 vectors"):
            check_first_batch(blind, policy)
    with pytest.raises(ValueError, match="placeholders by rows of patches"):
        check_first_batch(batch | {"images": jax.tree.map(np.zeros_like, batch["images"])}, model)
    hidden = jax.jit(lambda model, tokens: model.embed_inputs(tokens, dtype=jnp.float32)[0])
    seen = np.isfinite(hidden(model, jnp.asarray(blind["tokens"]))).all(axis=2)
    np.testing.assert_array_equal(seen, ~np.asarray(model.inputs["images"].is_placeholder(blind["tokens"])))
    assert not seen.all() and seen.any()
