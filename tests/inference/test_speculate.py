"""Speculative decoding yields the same text as plain decoding, however good the drafts are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import ops
from maxlib.inference import Generator, LocalEngine, Sampler
from maxlib.models import deepseek
from tests.nn.tiny import filled, filled_llama

PROMPTS = [[1, 4, 2, 3, 0], [5], [3, 1, 4, 1, 5, 2, 2, 5, 3, 5, 0]]
# A vocabulary so small that an untrained module is right now and then.
CFG = dataclasses.replace(
    deepseek.PRESETS["deepseek-v3"],
    **dict(vocab=6, num_layers=2, num_dense=1, dim=32, mlp_dim=48, expert_dim=16, num_heads=2, q_rank=None),
    **dict(kv_rank=16, nope_dim=8, v_dim=8, rope=ops.Rope(8, interleaved=True)),
    **dict(num_experts=4, top_k=2, num_groups=1, top_groups=1, num_mtp=1),
)


@pytest.fixture(scope="module")
def generator():
    model = filled(lambda: deepseek.DeepSeek(CFG, rngs=nnx.Rngs(1)))
    return Generator(model, dtype=jnp.float32)


@pytest.fixture(scope="module")
def plain(generator):
    return generator.generate(PROMPTS, max_new_tokens=20)


def drafting(model, **options):
    return LocalEngine(model, slots=3, num_drafts=1, drafter="mtp", dtype=jnp.float32, **options)


def texts_of(engine, **options):
    return [completion.tokens for (completion,) in engine.generate(PROMPTS, **options)]


def test_text_is_that_of_plain_decoding(generator, plain):
    """The module sees the same tokens one by one as over the whole text, so acceptance is what training measures."""
    engine = drafting(generator.model)
    assert texts_of(engine, max_new_tokens=20) == plain
    num_drafted, num_accepted, num_steps = engine.num_drafted, engine.num_accepted, engine.num_steps
    stop = [plain[0][3]]
    want = [row[: row.index(stop[0]) + 1] if stop[0] in row else row for row in plain]
    assert texts_of(engine, max_new_tokens=20, stop_token_ids=stop) == want

    @jax.jit
    def drafts(model, ids):
        (first,) = model.predict_ahead(model(ids, dtype=jnp.float32).hidden, ids)
        return jnp.argmax(model.logits(first.hidden), axis=-1)

    texts = [prompt + new for prompt, new in zip(PROMPTS, plain, strict=True)]
    guesses = drafts(generator.model, jnp.asarray([text + [0] * (32 - len(text)) for text in texts], jnp.int32))
    passes, taken = [0] * len(texts), 0
    for row, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        place = len(prompt) - 1
        while place + 2 < len(text):
            right = bool(guesses[row, place] == text[place + 2])
            passes[row], taken, place = passes[row] + 1, taken + right, place + 1 + right
    assert (num_steps, num_drafted, num_accepted) == (max(passes), sum(passes), taken) and 0 < taken < num_drafted


@pytest.mark.full
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16])
def test_caches_are_those_of_the_generator(generator, monkeypatch, dtype):
    """Others take more memory, and round otherwise than `generate` does."""
    made, model = [], type(generator.model)
    for name in ("init_cache", "init_draft_cache"):
        init = getattr(model, name)
        record = lambda *a, init=init, **options: made.append(options.get("dtype")) or init(*a, **options)
        monkeypatch.setattr(model, name, record)
    rounded = Generator(generator.model, dtype=jnp.float32, cache_dtype=dtype)
    got = texts_of(drafting(generator.model, cache_dtype=dtype), max_new_tokens=6)
    assert dtype in made and set(made) <= {dtype, None}  # None: only the layout is looked at
    assert got == rounded.generate(PROMPTS, max_new_tokens=6)


def as_long_as(length: int) -> Generator:
    cfg = dataclasses.replace(CFG, rope=ops.Rope(8, interleaved=True, max_length=length))
    return Generator(filled(lambda: deepseek.DeepSeek(cfg, rngs=nnx.Rngs(1))), dtype=jnp.float32)


def test_texts_beyond_the_length_of_the_model_are_refused():
    limited = as_long_as(max(map(len, PROMPTS)) + 6)
    for generate in (limited.generate, drafting(limited.model).generate):
        with pytest.raises(ValueError, match="must fit the .* positions of the model"):
            generate(PROMPTS, max_new_tokens=7)


@pytest.mark.full
def test_texts_of_the_length_of_the_model_are_written():
    limited = as_long_as(max(map(len, PROMPTS)) + 6)
    assert texts_of(drafting(limited.model), max_new_tokens=6) == limited.generate(PROMPTS, max_new_tokens=6)


def test_models_that_cannot_are_refused(generator):
    with pytest.raises(ValueError, match="Llama does not draft"):
        drafting(filled_llama(num_layers=1))
    without = jax.tree.map(lambda x: x, generator.model)
    without.mtp = nnx.List([])
    with pytest.raises(ValueError, match="load it with num_mtp=1"):
        drafting(without)


@pytest.mark.full
def test_sampled_texts_are_those_without_drafts(generator):
    """Conversations of two turns, in chunks, whose beginnings are reused in the cache of the module, too."""
    texts = []
    for options in ({}, {"num_drafts": 1, "drafter": "mtp", "chunk": 16}):
        engine = LocalEngine(generator.model, slots=2, capacity=96, dtype=jnp.float32, **options)
        conversation = PROMPTS[2] * 3
        for turn in range(2):
            request = engine.submit(conversation, max_new_tokens=12, sampler=Sampler(), key=jax.random.key(turn))
            conversation = [*conversation, *request.result().tokens, 1, 2]
        texts.append(conversation)
        assert request.cached >= 44 - (engine.num_drafts > 0)
    assert texts[0] == texts[1] and 0 < engine.num_accepted < engine.num_drafted


@pytest.mark.full
@pytest.mark.parametrize("drafts", [{"num_drafts": 1, "drafter": "mtp"}, {"num_drafts": 2}])
def test_draws_with_drafts_follow_the_distribution(generator, drafts):
    """Chi-squared test of 50,000 draws: each at a uniform place of its token's share of the cumulative probability
    under a forward pass, the places are uniform.
    """
    model, prompt, rows, count, sampler = generator.model, PROMPTS[2], 2500, 20, Sampler(0.7, top_k=5)
    engine = LocalEngine(model, slots=500, capacity=32, dtype=jnp.float32, **drafts)
    (group,) = engine.generate([prompt], num_samples=rows, max_new_tokens=count, sampler=sampler, key=jax.random.key(5))
    tokens = np.array([completion.tokens for completion in group])
    texts = np.concatenate([np.tile(prompt, (rows, 1)), tokens], axis=1).astype(np.int32)
    scores = jax.jit(lambda texts: model.logits(model(texts, dtype=jnp.float32).hidden))(texts)[:, len(prompt) - 1 : -1]
    filtered = np.asarray(sampler.filtered(scores.reshape(-1, CFG.vocab) / 0.7), np.float64)
    probs = np.exp(filtered - filtered.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    chosen = np.take_along_axis(probs, tokens.reshape(-1, 1), axis=-1)[:, 0]
    below = np.take_along_axis(np.cumsum(probs, axis=-1), tokens.reshape(-1, 1), axis=-1)[:, 0] - chosen
    place = below + chosen * np.random.default_rng(0).random(len(chosen))
    observed = np.histogram(place, bins=50, range=(0, 1))[0]
    assert observed.sum() == rows * count and chosen.min() > 0 and engine.num_accepted > 1000
    stats = pytest.importorskip("scipy.stats")  # here: it takes a second to import
    assert stats.chisquare(observed).pvalue > 1e-3
