"""Continuous batching against one prompt at a time; its log-probabilities against a forward pass."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, sharding
from maxlib.inference import Generator, LocalEngine, Sampler
from maxlib.inference import _continuous as continuous
from maxlib.inference import _slots as programs
from maxlib.inference._generate import row_counts
from maxlib.models import gpt2
from tests.nn.tiny import filled, filled_llama

PROMPTS = [[5, 9, 2, 7, 30], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 8], [40, 41, 42]]
LIMITS = [4, 9, 2, 1, 6]
SAMPLER = Sampler(temperature=0.8, top_k=20)


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2)


@pytest.fixture(scope="module")
def engine(model):
    return LocalEngine(model, slots=2, capacity=32, dtype=jnp.float32)


def test_greedy_equals_one_prompt_at_a_time(model, engine):
    alone = Generator(model, dtype=jnp.float32)
    want = [alone.generate([p], max_new_tokens=n, capacity=32)[0] for p, n in zip(PROMPTS, LIMITS, strict=True)]
    got = engine.generate(PROMPTS, max_new_tokens=LIMITS)
    assert [completion.tokens for (completion,) in got] == want
    assert {(completion.finish_reason, completion.sampler) for (completion,) in got} == {("length", inference.GREEDY)}


def test_completions_of_a_prompt_are_those_of_rows_of_their_own(model, engine, monkeypatch):
    """Keys are those of the prompts repeated, and each prompt is computed once."""
    key, calls, prefill = jax.random.key(3), [], continuous.prefill
    monkeypatch.setattr(continuous, "prefill", lambda *args, **options: calls.append(1) or prefill(*args, **options))
    got = engine.generate(PROMPTS[:3], num_samples=3, max_new_tokens=5, sampler=SAMPLER, key=key)
    repeated = [prompt for prompt in PROMPTS[:3] for _ in range(3)]
    alone = Generator(model, dtype=jnp.float32)
    rows = alone.generate(repeated, max_new_tokens=5, sampler=SAMPLER, key=key, capacity=32)
    assert [completion.tokens for group in got for completion in group] == rows and len(calls) == 3
    assert len({tuple(completion.tokens) for completion in got[0]}) > 1


def test_calls_without_a_key_draw_anew_and_runs_alike(model, engine):
    """Rollouts of two rounds must not be the same noise; a run that is started again must be the same run."""

    def rounds(seed):
        fresh = LocalEngine(model, slots=2, capacity=32, dtype=jnp.float32, seed=seed)
        draw = lambda **key: [
            completion.tokens for (completion,) in fresh.generate(PROMPTS, max_new_tokens=4, sampler=SAMPLER, **key)
        ]
        return [draw(), draw(key=jax.random.key(7)), draw()]

    first, again, other = rounds(0), rounds(0), rounds(1)
    assert first == again and first[0] != first[2]
    assert first[0] != other[0] and first[1] == other[1]  # a key that is given says all


def test_a_stop_token_ends_a_row_and_belongs_to_it(engine):
    free = engine.generate(PROMPTS, max_new_tokens=6)
    stop = free[0][0].tokens[2]
    for unstopped, got in zip(free, engine.generate(PROMPTS, max_new_tokens=6, stop_token_ids=[stop]), strict=True):
        tokens, ended = unstopped[0].tokens, stop in unstopped[0].tokens
        assert got[0].tokens == (tokens[: tokens.index(stop) + 1] if ended else tokens)
        assert got[0].finish_reason == ("stop" if ended else "length")


def test_log_probabilities_are_those_of_a_forward_pass_at_the_temperature(model, engine):
    got = engine.generate(PROMPTS, max_new_tokens=6, sampler=SAMPLER)
    rows = [prompt + completion.tokens for prompt, (completion,) in zip(PROMPTS, got, strict=True)]
    padded = jnp.asarray([ids + [0] * (32 - len(ids)) for ids in rows])
    scores = (
        np.asarray(jax.jit(lambda ids: model.logits(model(ids, dtype=jnp.float32).hidden))(padded), np.float64) / 0.8
    )
    want = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    for row, prompt, (completion,) in zip(want, PROMPTS, got, strict=True):
        at = np.arange(6)
        np.testing.assert_allclose(completion.log_probs, row[len(prompt) - 1 + at, completion.tokens], atol=1e-5)


def test_new_weights_compile_nothing(model, engine):
    before = engine.generate(PROMPTS, max_new_tokens=LIMITS)
    sizes = [f._cache_size() for f in (programs.prefill, programs.extend, programs.insert, programs.step)]
    engine.update(filled_llama(1, num_layers=2))
    after = engine.generate(PROMPTS, max_new_tokens=LIMITS)
    assert sizes == [f._cache_size() for f in (programs.prefill, programs.extend, programs.insert, programs.step)]
    engine.update(model)
    assert before != after and before == engine.generate(PROMPTS, max_new_tokens=LIMITS)


def test_what_cannot_be_continued_is_refused(model, engine):
    with pytest.raises(ValueError, match="capacity of 32, got 34"):
        engine.generate(PROMPTS, max_new_tokens=17)

    class Shared(type(model)):
        def init_cache(self, batch, capacity, *, dtype=jnp.bfloat16, rope_length=None):
            return nn.cache.Cache(jnp.zeros((capacity, batch)), jnp.zeros(batch, jnp.int32))

    odd = object.__new__(Shared)
    odd.__dict__.update(model.__dict__)
    with pytest.raises(ValueError, match="must be rows, got"):
        continuous._check_rows(odd)
    assert isinstance(engine, inference.Engine)


@pytest.mark.full
def test_a_mesh_changes_nothing(model, engine):
    layout = sharding.Layout(sharding.make_mesh(data=2, fsdp=2, tensor=2), sharding.FSDP_TP | {"vocab": None})
    options = dict(max_new_tokens=LIMITS, num_samples=2, sampler=Sampler(temperature=0.8), key=jax.random.key(2))
    want = engine.generate(PROMPTS, **options)
    with sharding.use(layout):
        placed = jax.device_put(model, sharding.shardings(model, layout))
        got = LocalEngine(placed, slots=4, capacity=32, dtype=jnp.float32).generate(PROMPTS, **options)
    for ours, alone in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.tokens == alone.tokens
        np.testing.assert_allclose(ours.log_probs, alone.log_probs, atol=1e-5)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices have halves only")
def test_steps_have_few_numbers_of_rows():
    assert row_counts(64) == [64, 48, 32, 16, 8]
    assert row_counts(20) == [20, 10] and row_counts(15) == [15]


def test_learned_positions_bound_the_cache():
    cfg = gpt2.Config(vocab=64, dim=32, num_layers=1, num_heads=4, mlp_dim=64, num_positions=50)
    model = filled(lambda: gpt2.GPT2(cfg, rngs=nnx.Rngs(0)))
    (completion,) = LocalEngine(model, slots=2, capacity=48, dtype=jnp.float32).generate([[1, 2]], max_new_tokens=3)[0]
    forward = jax.jit(lambda ids: model.logits(model(ids, dtype=jnp.float32).hidden)[0].argmax(axis=-1))
    best = forward(jnp.asarray([[1, 2, *completion.tokens]]))
    assert completion.tokens == best[1:-1].tolist()
