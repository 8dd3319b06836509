"""Requests added while the engine runs: same texts whatever is reused, in chunks, drafted, and in any order."""

import asyncio
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import nn
from maxlib.inference import GREEDY, LocalEngine, LogitBias, Sampler
from maxlib.inference import _continuous as continuous
from maxlib.models import mistral
from tests.nn.tiny import LLAMA, filled, filled_llama
from tests.outside_recurrent import Hybrid

RNG = np.random.default_rng(0)
SYSTEM = RNG.integers(0, 40, 37).tolist()
PROMPTS = [[*SYSTEM, *RNG.integers(0, 40, n).tolist()] for n in (3, 30, 7, 1)] + [[4, 5], SYSTEM[:20]]
SAMPLERS = [Sampler(1.2, 20, 0.9, 0.01), Sampler(0.8, top_k=20), GREEDY, GREEDY, Sampler(), Sampler(0.5, top_p=0.8)]

DRAWN = {"sampler": Sampler(0.8, presence_penalty=0.5), "key": jax.random.key(5)}


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2)


def run(engine, order):
    """Two turns of every conversation, submitted in an order; returns their tokens, log-probabilities and reuse."""
    completions, num_cached = {}, 0
    for turn in range(2):
        requests = {}
        for n in order:
            prompt = PROMPTS[n]
            if turn:
                prompt = [*prompt, *completions[n, 0][0], 7, 8, 9]
            key = jax.random.fold_in(jax.random.key(turn), n)
            requests[n] = engine.submit(prompt, max_new_tokens=5 + n, sampler=SAMPLERS[n], key=key)
            engine.step()
        for n, request in requests.items():
            done = request.result()
            completions[n, turn] = done.tokens, done.log_probs
            num_cached += request.cached
    return completions, num_cached


@pytest.mark.parametrize(
    "options",
    [
        {"capacity": 96, "num_drafts": 3},
        *(
            pytest.param(options, marks=pytest.mark.full)
            for options in ({"capacity": 96}, {"cache_tokens": 192, "num_drafts": 3})
        ),
    ],
)
def test_reuse_chunks_drafts_and_order_change_no_text(model, options):
    order = list(range(len(PROMPTS)))
    want, cached = run(LocalEngine(model, slots=2, capacity=96, reuse=False, dtype=jnp.float32), order)
    assert cached == 0
    order[1:] = random.Random(1).sample(order[1:], 5)  # the first has all filters, so steps are compiled once
    got, cached = run(LocalEngine(model, slots=2, chunk=16, dtype=jnp.float32, **options), order)
    assert got.keys() == want.keys() and (cached > 200 or "cache_tokens" in options)
    for name, (tokens, log_probs) in got.items():
        assert tokens == want[name][0]
        np.testing.assert_allclose(log_probs, want[name][1], atol=1e-5)


def count_calls(monkeypatch, name):
    """Returns a list that grows with each call of a program of the engine."""
    calls, program = [], getattr(continuous, name)
    monkeypatch.setattr(continuous, name, lambda *args, **options: calls.append(1) or program(*args, **options))
    return calls


def test_rows_wait_for_blocks_and_give_them_back(model, monkeypatch):
    """Three rows that end with three blocks each do not fit four: the newest is computed again, and draws the same."""
    prompts = [[*SYSTEM, *RNG.integers(0, 40, n).tolist()] for n in (13, 15, 12)]
    want = LocalEngine(model, slots=4, dtype=jnp.float32).generate(prompts, max_new_tokens=[100, 90, 80], **DRAWN)
    engine, calls = LocalEngine(model, slots=4, cache_tokens=300, dtype=jnp.float32), count_calls(monkeypatch, "insert")
    got = engine.generate(prompts, max_new_tokens=[100, 90, 80], **DRAWN)
    assert len(calls) > 3 and engine.cache_tokens == 256
    for (completion,), (alone,) in zip(got, want, strict=True):
        assert completion.tokens == alone.tokens
        np.testing.assert_allclose(completion.log_probs, alone.log_probs, atol=1e-5)
    engine.update(model)  # forgets what is kept for reuse
    assert engine._memory.num_free == len(engine._memory) == 4
    with pytest.raises(ValueError, match="memory of 256 tokens, got 257"):
        engine.submit(prompts[0], max_new_tokens=207)


def test_rows_share_the_blocks_of_their_common_beginning(model):
    system, engine = RNG.integers(0, 40, 130).tolist(), LocalEngine(model, slots=4, dtype=jnp.float32)
    first = engine.submit([*system, 1], max_new_tokens=20, **DRAWN)
    next(iter(first))
    rows = [engine.submit([*system, n], max_new_tokens=20, **DRAWN) for n in range(2, 5)]
    samples = [engine.submit([*system, 4], max_new_tokens=20, **DRAWN) for _ in range(2)]  # of one prompt
    for row in rows:
        next(iter(row))
    assert len(engine._memory) - engine._memory.num_free == 2 + 4  # two blocks of all, and one of each
    assert [row.cached for row in rows] == [130] * 3
    alone = LocalEngine(model, slots=4, reuse=False, dtype=jnp.float32)
    want = alone.submit([*system, 4], max_new_tokens=20, **DRAWN).result().tokens
    assert [row.result().tokens for row in (rows[2], *samples)] == [want] * 3


def test_a_state_is_reused_by_what_continues_all_of_it(monkeypatch):
    """It cannot be rewound: a conversation goes on from its slot, also after a stop token."""
    model = filled(lambda: Hybrid(rngs=nnx.Rngs(0)))
    engine = LocalEngine(model, slots=16, chunk=16, dtype=jnp.float32)  # of which a step runs eight
    alone = LocalEngine(model, slots=2, reuse=False, chunk=16, dtype=jnp.float32)
    first = engine.submit(SYSTEM, max_new_tokens=9).result().tokens
    stop = first[4]
    conversation = [*SYSTEM]
    for turn in range(3):
        requests = [each.submit(conversation, max_new_tokens=9, stop_token_ids=[stop]) for each in (engine, alone)]
        other = engine.submit([*SYSTEM[::-1], turn], max_new_tokens=7)  # runs beside it, in the other slot
        got, want = (request.result() for request in requests)
        other.result()
        assert got.tokens == want.tokens
        # The first turn is the prompt computed last.
        assert requests[0].cached == len(conversation) - (0 if turn == 0 else 4) and requests[1].cached == 0
        conversation += [*got.tokens, 1, 2, 3]


def test_a_state_that_a_failed_row_left_is_not_reused():
    """A row whose processor fails must not run: its state would have a token that its text lacks."""
    model = jax.jit(lambda: Hybrid(rngs=nnx.Rngs(0)))()
    engine = LocalEngine(model, slots=2, chunk=16, dtype=jnp.float32)

    def failing(request):
        return [0.0, 1 / 0][0] if request.tokens else np.zeros(engine.generator.vocab, np.float32)

    with pytest.raises(ZeroDivisionError):
        engine.submit(SYSTEM, max_new_tokens=9, processors=[failing]).result()
    longer, options = [*SYSTEM, 1, 2, 3], {"max_new_tokens": 4, "alternatives": 1}
    got = engine.submit(longer, **options).result()
    want = LocalEngine(model, slots=2, chunk=16, dtype=jnp.float32).submit(longer, **options).result()
    assert got.tokens == want.tokens
    np.testing.assert_allclose(got.log_probs, want.log_probs, atol=1e-5)


def test_scores_without_alternatives(model):
    prompt, logits = SYSTEM, model.logits(model(jnp.asarray([SYSTEM]), dtype=jnp.float32).hidden)[0]
    log_probs, best = LocalEngine(model, slots=1, dtype=jnp.float32).score(prompt)
    want = jax.nn.log_softmax(logits)[np.arange(len(prompt) - 1), np.array(prompt[1:])]
    np.testing.assert_allclose(log_probs, want, atol=1e-5)
    assert best == [([], [])] * (len(prompt) - 1)


def test_the_same_prompt_again_counts_as_cached(model):
    engine = LocalEngine(model, slots=2, capacity=96, dtype=jnp.float32)
    requests = [engine.submit(SYSTEM, max_new_tokens=2) for _ in range(2)]
    assert [request.result() and request.cached for request in requests] == [0, len(SYSTEM)]


def test_new_weights_empty_what_is_cached(model):
    engine = LocalEngine(model, slots=2, capacity=96, dtype=jnp.float32)
    new = filled_llama(1, num_layers=2)
    engine.submit(PROMPTS[0], max_new_tokens=3).result()
    running = engine.submit(PROMPTS[1], max_new_tokens=20)
    next(iter(running))
    engine.update(new)
    request = engine.submit(PROMPTS[1], max_new_tokens=4)
    want = LocalEngine(new, slots=2, capacity=96, dtype=jnp.float32).generate([PROMPTS[1]], max_new_tokens=4)
    assert request.result().tokens == want[0][0].tokens and request.cached == 0
    engine.update(model, 7)
    assert request.result().versions == [1] * 4
    versions = running.result().versions or []
    assert versions == sorted(versions) and set(versions) == {0, 1, 7} and running.result().version == 0
    again = engine.submit([*PROMPTS[1], *running.tokens], max_new_tokens=2)  # its slot holds keys of all weights
    assert again.result().versions == [7, 7] and again.cached <= len(PROMPTS[1]) + 4


def test_penalties_are_those_of_the_formulas(model):
    """Beside a row without any; float64 on the logits of a forward pass, the repetition as transformers has it."""
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    engine = LocalEngine(model, slots=2, capacity=96, dtype=jnp.float32)
    forward = jax.jit(lambda ids: model.logits(model(ids, dtype=jnp.float32).hidden))
    sampler = Sampler(0, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.3)
    plain = engine.submit(PROMPTS[1], max_new_tokens=14)
    got = engine.submit(PROMPTS[0], max_new_tokens=14, sampler=sampler).result()
    text = [*PROMPTS[0]]
    for token, log_prob in zip(got.tokens, got.log_probs, strict=True):
        logits = np.asarray(forward(jnp.asarray([text + [0] * (96 - len(text))]))[0, len(text) - 1], np.float64)
        np.testing.assert_allclose(log_prob, logits[token] - np.log(np.exp(logits).sum()), atol=1e-5)
        repeated = process.RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([text]), torch.tensor(logits[None]))
        counts = np.bincount(text[len(PROMPTS[0]) :], minlength=LLAMA.vocab)
        assert token == (repeated.numpy()[0] - 0.3 * counts - 0.7 * (counts > 0)).argmax()
        text.append(token)
    free = engine.submit(PROMPTS[0], max_new_tokens=14).result()
    assert got.tokens != free.tokens
    assert plain.result().tokens == engine.submit(PROMPTS[1], max_new_tokens=14).result().tokens


class Letters:
    """A tokenizer of one letter for each id."""

    def decode(self, ids):
        return "".join(chr(65 + i) for i in ids)


def test_texts_end_a_row_and_processors_change_one(model):
    engine = LocalEngine(model, slots=2, capacity=96, tokenizer=Letters(), dtype=jnp.float32)
    free = engine.submit(PROMPTS[0], max_new_tokens=12).result()
    stop = Letters().decode(free.tokens[4:6])
    end = Letters().decode(free.tokens).index(stop) + 2
    got = engine.submit(PROMPTS[0], max_new_tokens=12, stop=["??", stop]).result()
    assert got.tokens == free.tokens[:end] and got.finish_reason == "stop"
    place = next(n for n in range(2, 12) if free.tokens[n] not in free.tokens[:n])
    banned = LogitBias({free.tokens[place]: -1e9}, vocab=LLAMA.vocab)
    request = engine.submit(PROMPTS[0], max_new_tokens=12, processors=[banned], alternatives=3)
    other = engine.submit(PROMPTS[0], max_new_tokens=12)

    def failing(request):
        raise OverflowError("no")

    wrong = engine.submit(PROMPTS[0], max_new_tokens=12, processors=[failing])
    got = request.result()
    assert got.tokens[:place] == free.tokens[:place] and free.tokens[place] not in got.tokens
    # Log-probabilities, and the best tokens, are those before processors.
    assert request.best[place][0][0] == free.tokens[place] and len(request.best) == 12
    np.testing.assert_allclose(request.best[place][1][0], free.log_probs[place], atol=1e-5)
    assert got.log_probs[place] < free.log_probs[place] and other.result().tokens == free.tokens
    with pytest.raises(OverflowError, match="no"):
        wrong.result()
    engine = LocalEngine(model, dtype=jnp.float32)
    with pytest.raises(ValueError, match="stop needs the text of tokens"):
        engine.submit([1], max_new_tokens=1, stop=["a"])
    with pytest.raises(ValueError, match="stop must be a list of texts, got 'a'"):
        engine.submit([1], max_new_tokens=1, stop="a")
    assert engine.cache_bytes == 0 and engine.submit([1], max_new_tokens=1).result().tokens and engine.cache_bytes > 0
    with pytest.raises(ValueError, match="keys must be of one implementation, got rbg after threefry2x32"):
        engine.submit([1], max_new_tokens=1, sampler=Sampler(), key=jax.random.key(0, impl="rbg"))


def test_an_error_of_a_step_ends_all_requests_and_not_the_engine(model, monkeypatch):
    engine = LocalEngine(model, slots=1, capacity=96, dtype=jnp.float32)
    want = engine.submit(PROMPTS[4], max_new_tokens=3).result().tokens
    running, waiting = (engine.submit(PROMPTS[4], max_new_tokens=3) for _ in range(2))
    engine.step()

    async def read(request):
        return [token async for token in request]

    with monkeypatch.context() as broken:
        broken.setattr(engine, "_step", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            running.result()
    for read_on in (waiting.result, lambda: list(waiting), lambda: asyncio.run(read(waiting))):
        with pytest.raises(ZeroDivisionError):
            read_on()
    assert engine.is_idle and engine.submit(PROMPTS[4], max_new_tokens=3).result().tokens == want


def test_slots_grow_while_rows_run(model):
    engine = LocalEngine(model, slots=2, dtype=jnp.float32)
    short = engine.submit(PROMPTS[4], max_new_tokens=9)
    next(iter(short))
    long = engine.submit(PROMPTS[1], max_new_tokens=60)
    alone = LocalEngine(model, slots=2, capacity=128, dtype=jnp.float32)
    want = alone.generate([PROMPTS[4], PROMPTS[1]], max_new_tokens=[9, 60])
    assert [short.result().tokens, long.result().tokens] == [completion.tokens for (completion,) in want]


@pytest.mark.full
def test_a_window_becomes_a_ring_when_a_longer_request_comes():
    """It waits until rows with an entry for each token have ended; a bounded memory has rings from the start."""
    cfg = mistral.Config(
        vocab=61, num_layers=2, dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=12, rope=LLAMA.rope, window=70
    )
    model = filled(lambda: mistral.Mistral(cfg, rngs=nnx.Rngs(0)))
    prompts, limits = [PROMPTS[4], PROMPTS[1], PROMPTS[0]], [20, 60, 30]
    want = [LocalEngine(model, slots=1, dtype=jnp.float32).generate([p], max_new_tokens=n)[0][0].tokens
            for p, n in zip(prompts, limits, strict=True)]  # fmt: skip
    engine, bounded = (LocalEngine(model, slots=2, cache_tokens=n, dtype=jnp.float32) for n in (None, 256))
    for each in (engine, bounded):
        first = each.submit(prompts[0], max_new_tokens=20)
        next(iter(first))
        rest = [each.submit(p, max_new_tokens=n) for p, n in zip(prompts[1:], limits[1:], strict=True)]
        assert [request.result().tokens for request in (first, *rest)] == want
    assert engine._state is not None
    assert {type(cache) for cache in nn.cache.layer_caches(engine._state.caches.model.layers)} == {nn.cache.RingCache}


def test_async_requests_run_together_and_can_be_cancelled(model):
    engine = LocalEngine(model, slots=2, capacity=96, dtype=jnp.float32)
    want = [engine.submit(prompt, max_new_tokens=8).result().tokens for prompt in PROMPTS]

    async def read(prompt, most):
        request = engine.submit(prompt, max_new_tokens=8)
        stream, tokens = aiter(request), []
        async for token in stream:
            tokens.append(token)
            if len(tokens) == most:
                await stream.aclose()
                break
        return tokens

    async def all_of_them():
        return await asyncio.gather(*(read(prompt, 2 if n == 1 else 8) for n, prompt in enumerate(PROMPTS)))

    assert asyncio.run(all_of_them()) == [tokens[:2] if n == 1 else tokens for n, tokens in enumerate(want)]
    cancelled = engine.submit(PROMPTS[0], max_new_tokens=8)
    cancelled.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        cancelled.result()
    while engine.step():
        pass
    assert engine.is_idle and engine.num_running == 0


def test_drafts_save_steps_of_a_text_that_repeats_itself(model, monkeypatch):
    steps = count_calls(monkeypatch, "step")
    bias = LogitBias({3: 100.0}, vocab=LLAMA.vocab)
    engine = LocalEngine(model, slots=2, capacity=96, num_drafts=3, dtype=jnp.float32)
    with pytest.raises(ValueError, match="rejected draft cannot be removed"):
        LocalEngine(filled(lambda: Hybrid(rngs=nnx.Rngs(0))), num_drafts=2)
    steered = engine.submit(PROMPTS[0], max_new_tokens=20, processors=[bias]).result()
    assert steered.tokens == [3] * 20 and len(steps) == 19  # processors have no drafts
    steps.clear()
    want = LocalEngine(model, slots=2, capacity=96, dtype=jnp.float32).generate([PROMPTS[0]], max_new_tokens=24)
    plain = len(steps)
    steps.clear()
    got = engine.submit([*PROMPTS[0], *want[0][0].tokens[:16]], max_new_tokens=8).result()
    assert got.tokens == want[0][0].tokens[16:] and plain == 23
