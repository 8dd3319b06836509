"""Decoding against the full forward pass, batches against single prompts, a mesh against one device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib import inference, nn, ops, sharding
from maxlib.inference import Generator, Sampler, _generate, stream_text
from maxlib.inference._generate import right_padded
from maxlib.ops import DynamicNTKScaling, Rope
from tests.nn.tiny import LLAMA, filled, filled_llama

PROMPTS = [[5, 9, 2, 7, 30], [11], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2]]


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=2)


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model, dtype=jnp.float32)


def by_full_passes(model, prompt, count):
    """Decodes greedily without a cache: one forward pass over all previous tokens per new token."""
    ids = list(prompt)
    for _ in range(count):
        scores = full_pass(model, jnp.asarray([ids + [0] * (32 - len(ids))], jnp.int32))
        ids.append(int(np.argmax(np.asarray(scores)[0, len(ids) - 1])))
    return ids[len(prompt) :]


@jax.jit
def full_pass(model, ids):
    return model.logits(model(ids, dtype=jnp.float32).hidden)


def test_greedy_equals_full_passes_in_a_batch(model, generator):
    got = generator.generate(PROMPTS, max_new_tokens=6)
    assert got == [by_full_passes(model, prompt, 6) for prompt in PROMPTS]


def test_texts_of_similar_lengths_share_two_programs(model):
    """One for prompts, one for a new token: neither other prompts nor new weights of the same shapes add one."""
    traced = chex.assert_max_traces(type(model).__call__, n=2)
    counted = jax.tree.map(lambda x: x, model)
    counted.__class__ = type("Counted", (type(model),), {"__slots__": (), "__call__": lambda *a, **k: traced(*a, **k)})
    generator = Generator(counted, dtype=jnp.float32)
    for prompts in ([[1, 2, 3], [4]], [[5, 6], [7, 8, 9, 10]], [[1], [2]]):
        generator.generate(prompts, max_new_tokens=4)
    generator.update(jax.tree.map(lambda x: 0.5 * x, counted))
    generator.generate([[3, 2, 1], [4]], max_new_tokens=4)


def test_equal_prompts_are_run_once(model, generator, monkeypatch):
    """And have the texts that they have where each row is run."""
    counts = []
    monkeypatch.setattr(
        _generate, "right_padded", lambda rows, **options: counts.append(len(rows)) or right_padded(rows, **options)
    )
    every_row = Generator(model, dtype=jnp.float32)
    every_row._caches_by_row = False
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    options = {"max_new_tokens": 4, "sampler": Sampler(1.0), "key": jax.random.key(3)}
    texts = [each.generate(prompts, **options) for each in (generator, every_row)]
    assert texts[0] == texts[1]
    assert counts == [9, 4, 9, 9]  # of the checks, and of the program: three prompts and a row of padding
    assert len({*map(tuple, texts[0])}) > len(PROMPTS)


def test_sampled_rows_do_not_depend_on_their_neighbours(generator):
    options = dict(max_new_tokens=8, sampler=Sampler(temperature=0.9, top_k=20), key=jax.random.key(3))
    first = generator.generate(PROMPTS, **options)
    assert first == generator.generate(PROMPTS, **options)
    assert first[0] == generator.generate([PROMPTS[0], [1], PROMPTS[2][::-1]], **options)[0]
    assert first != generator.generate(PROMPTS, **options | {"key": jax.random.key(4)})


def test_without_a_key_each_call_draws_anew(model):
    """Rollouts of a loop must not repeat their noise; another run of the same program draws the same."""
    options = dict(max_new_tokens=8, sampler=Sampler(temperature=0.9, top_k=20))  # as above: no other program
    make = lambda **seed: Generator(model, dtype=jnp.float32, **seed)
    first, again, other = make(), make(), make(seed=1)
    drawn = [first.generate(PROMPTS, **options) for _ in range(3)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    assert drawn == [again.generate(PROMPTS, **options) for _ in range(3)]
    assert other.generate(PROMPTS, **options) != drawn[0]
    once = lambda: inference.generate(model, PROMPTS, dtype=jnp.float32, **options)
    assert once() != once()


def test_stop_ends_a_row_and_the_others_go_on(generator):
    free = generator.generate(PROMPTS, max_new_tokens=6)
    stop = free[0][2]
    got = generator.generate(PROMPTS, max_new_tokens=6, stop_token_ids=[stop])
    assert got == [row[: row.index(stop) + 1] if stop in row else row for row in free]


def test_stream_yields_what_generate_returns(generator):
    rows = list(generator.stream(PROMPTS, max_new_tokens=4))
    assert [list(row) for row in zip(*rows, strict=True)] == generator.generate(PROMPTS, max_new_tokens=4)


def test_updated_weights_are_those_of_a_new_generator_and_nothing_is_compiled(model):
    """A whole model, then a policy's parameters alone, which a training step may donate afterwards."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if "backend_compile" in name else None
    )
    generator, others = Generator(model, dtype=jnp.float32), [filled_llama(num_layers=2, seed=i) for i in (1, 2, 3)]
    run = lambda generator: generator.generate(PROMPTS, max_new_tokens=6)
    before, want = run(generator), [run(Generator(other, dtype=jnp.float32)) for other in others]
    generator.update(others[0])
    compiled.clear()
    assert run(generator) == want[0] != before
    generator.update(others[1])
    assert run(generator) == want[1] != want[0]
    assert not compiled
    params, _ = nn.partition(others[2])
    part = {path: jnp.copy(value) for path, value in params.items() if path.startswith("layers.")}
    generator.update({path: value for path, value in params.items() if path not in part})
    assert run(generator) not in (want[1], want[2])
    generator.update(part)
    jax.tree.map(lambda x: x.delete(), part)
    assert run(generator) == want[2]


def test_weights_of_another_model_are_refused(model, generator):
    with pytest.raises(ValueError, match=r"embed.w\S* is \(61, 32\) here, got \(64, 32\)"):
        generator.update(filled_llama(num_layers=2, vocab=64))
    with pytest.raises(ValueError, match="a model of the same structure"):
        generator.update(filled_llama(num_layers=3))
    with pytest.raises(KeyError, match="no place in the model for"):
        generator.update({"embed.v": jnp.zeros((61, 32))})


def test_a_mesh_changes_nothing(model, generator):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    want = generator.generate(PROMPTS + PROMPTS[:1], max_new_tokens=5)
    with sharding.use(sharding.Layout(mesh, sharding.FSDP_TP)):
        placed = jax.device_put(
            model, sharding.shardings(model, sharding.Layout(mesh, sharding.FSDP_TP | {"vocab": None}))
        )
        got = inference.generate(placed, PROMPTS + PROMPTS[:1], max_new_tokens=5, dtype=jnp.float32)
    assert got == want


def test_rotary_length_is_that_of_each_row_so_far_or_a_fixed_one():
    """Dynamic NTK: a prefill equals a full pass over the row alone; with `rope_length`, every step rotates alike."""
    rope = Rope(12, scaling=DynamicNTKScaling(factor=4.0, original_length=8))
    model = filled_llama(num_layers=1, rope=rope)
    rows = [PROMPTS[2], PROMPTS[2][:10]]
    tokens, valid = right_padded(rows)
    forward = jax.jit(lambda model, ids, **inputs: model(ids, dtype=jnp.float32, **inputs))
    cache = model.init_cache(2, 32, dtype=jnp.float32)
    both = np.asarray(forward(model, tokens, valid=valid, cache=cache).hidden)
    for i, row in enumerate(rows):
        alone = forward(model, jnp.asarray([row], jnp.int32)).hidden
        np.testing.assert_allclose(both[i, : len(row)], alone[0], atol=2e-6)
    prompt = jnp.asarray([PROMPTS[2]], jnp.int32)
    fixed = forward(model, prompt, cache=model.init_cache(1, 32, dtype=jnp.float32, rope_length=32)).hidden
    cache, steps = model.init_cache(1, 32, dtype=jnp.float32, rope_length=32), []
    for t in range(prompt.shape[1]):
        out = forward(model, prompt[:, t : t + 1], cache=cache)
        cache, steps = out.cache, [*steps, out.hidden]
    fixed, both, steps = jax.device_get((fixed, both, steps))
    np.testing.assert_allclose(np.concatenate(steps, axis=1), fixed, atol=2e-6)
    assert np.abs(fixed[0] - both[0, : prompt.shape[1]]).max() > 1e-3


def test_prompts_inside_a_prefix_are_refused():
    """New tokens would join the prefix, whose cached keys have not seen them."""
    model = filled_llama(num_layers=1)
    model.layers.groups[0][0].attn.mask = ops.Causal() | ops.Prefix(4)
    engine = inference.LocalEngine(model, slots=1, dtype=jnp.float32)
    for generate in (inference.Generator(model).generate, engine.generate):
        with pytest.raises(ValueError, match="whole prefix of 4 tokens, which attend to each other, got 3 tokens"):
            generate([[1, 2, 3], [1, 2, 3, 4]], max_new_tokens=2)


def test_the_callers_model_stays_usable(model):
    inference.generate(model, PROMPTS, max_new_tokens=6, dtype=jnp.float32)  # nothing is cast, so nothing is copied
    assert np.isfinite(full_pass(model, jnp.ones((1, 32), jnp.int32))).all()


def test_bfloat16_keeps_norms_in_float32(model):
    made = Generator(model).model
    assert made.layers[0].attn.q.w[...].dtype == jnp.bfloat16
    assert made.layers[0].attn_norm.scale[...].dtype == jnp.float32


class Bytes:
    """A tokenizer whose tokens are bytes, so that characters span tokens."""

    def encode(self, text):
        return [b % LLAMA.vocab for b in text.encode()]

    def decode(self, ids):
        return bytes([0xC3 if i % 2 else 0xA9 for i in ids]).decode(errors="replace")


def test_streamed_text_is_whole_characters(generator):
    ids = [104 % LLAMA.vocab]  # within a character, which the first piece completes
    new = generator.generate([ids], max_new_tokens=20)[0]
    pieces = list(stream_text(generator, Bytes(), "h", max_new_tokens=20))
    assert "".join(pieces) == Bytes().decode(ids + new)
    assert not any(piece.endswith("\N{REPLACEMENT CHARACTER}") for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1] * 30], {"capacity": 32}, "must fit the capacity of the cache"),
        ([[1]], {"images": np.zeros((1, 3, 4, 4), np.float32)}, "Llama reads text only"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(generator, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generator.generate(prompts, **{"max_new_tokens": 4} | options)


def test_sliding_layers_generate_past_their_window():
    class Block(nnx.Module):
        def __init__(self, rngs):
            mask = ops.Causal() & ops.SlidingWindow(4)
            self.attn = nn.Attention(16, num_heads=2, head_dim=8, mask=mask, rope=ops.Rope(8), rngs=rngs)

        def __call__(self, x, ctx, cache):
            h, cache = self.attn(x, ctx, cache)
            return x + h, cache, {}

        def init_cache(self, *args):
            return self.attn.init_cache(*args)

    class Model(nnx.Module):
        softcap = None

        def __init__(self, rngs):
            self.embed = nn.Embed(61, 16, init=nnx.initializers.normal(1.0), rngs=rngs)
            self.layers = nn.Stack(lambda _, rngs: Block(rngs), 3, rngs=rngs)

        def __call__(self, tokens, *, valid=None, cache=None, dtype=jnp.bfloat16):
            ctx = nn.make_context(*tokens.shape, valid=valid, cache=cache)
            x, layers, aux = self.layers(self.embed(tokens, dtype=dtype), ctx, cache and cache.layers)
            return nn.Output(x, cache and cache.advanced(layers, ctx), aux)

        def logits(self, hidden):
            return self.embed.logits(hidden)

        def head_weight(self):
            return self.embed.w[...]

        def init_cache(self, batch, capacity, *, dtype=jnp.bfloat16, rope_length=None):
            return nn.cache.Cache(
                self.layers.init_cache(batch, capacity, dtype), jnp.zeros(batch, jnp.int32), rope_length
            )

    model = filled(lambda: Model(nnx.Rngs(0)))
    got = inference.generate(model, PROMPTS, max_new_tokens=9, dtype=jnp.float32)
    assert got == [by_full_passes(model, prompt, 9) for prompt in PROMPTS]
