"""What callers may pass to generators and engines: numpy's and JAX's values work, anything else is refused at once."""

import inspect
import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.inference import Generator, LocalEngine, Sampler, ServerEngine, _arguments, _continuous, _scoring, _server
from maxlib.inference import _generate as generation
from tests.nn.tiny import filled_llama

VOCAB = 61


@pytest.fixture(autouse=True)
def _unannotated(monkeypatch):
    """Takes away the checks of annotations, which only tests have."""

    def bare(holder):
        for name, value in list(vars(holder).items()):
            if isinstance(value, types.FunctionType) and value is not inspect.unwrap(value):
                monkeypatch.setattr(holder, name, inspect.unwrap(value))

    for module in (_arguments, generation, _continuous, _server, _scoring):
        bare(module)
    for holder in (Generator, LocalEngine, ServerEngine, Sampler, generation.Keys):
        bare(holder)


@pytest.fixture(scope="module")
def engines():
    model = filled_llama(num_layers=1)
    local = LocalEngine(model, slots=2, capacity=16, dtype=jnp.float32)
    # Nothing listens there: a ServerError would say that a request was made.
    server = ServerEngine("http://127.0.0.1:9", "m", vocab=VOCAB, timeout=1)
    return {"generator": local.generator, "local": local, "server": server}


PROMPTS = {
    "none": [],
    "text": "hello",
    "ids": [1, 2],
    "a number": 3,
    "an iterator": iter([[1]]),
    "empty": [[1], []],
    "floats": [[1.0, 2.0]],
    "bools": [[True, False]],
    "None": [[1, None]],
    "nested": [[[1], [2, 3]]],
    "negative": [[-1]],
    "beyond the vocabulary": [[VOCAB]],
}
COUNTS = {"zero": 0, "float": 2.0, "bool": True, "text": "2", "None": None}
STOPS = {"text": "</s>", "texts": ["</s>"], "bool": [True], "id": 3, "beyond": [VOCAB]}
SEVERAL = {"floats": [2.5], "too many": [1, 2], "none": [], "nested": [[1]]}
BAD = [
    *[("prompts", kind, {"prompts": value}, "prompt") for kind, value in PROMPTS.items()],
    *[("max_new_tokens", kind, {"max_new_tokens": n}, "max_new_tokens must") for kind, n in COUNTS.items()],
    *[("stop", kind, {"stop_token_ids": ids}, "stop_token_ids must be a list of ids") for kind, ids in STOPS.items()],
    *[
        ("sampler", str(getattr(x, "__name__", x)), {"sampler": x}, "sampler must be an inference.Sampler")
        for x in (0.7, None, np.argmax)
    ],
    *[("key", repr(x), {"key": x}, "key must be a random key") for x in (0, "0", [0, 0])],
]
BAD_OF_ENGINES = [
    *[("max_new_tokens of each", kind, {"max_new_tokens": n}, "max_new_tokens must") for kind, n in SEVERAL.items()],
    *[("num_samples", kind, {"num_samples": n}, "num_samples must be an integer") for kind, n in COUNTS.items()],
]


@pytest.mark.parametrize(("options", "words"), [pytest.param(*b[2:], id=f"{b[0]}: {b[1]}") for b in BAD])
def test_wrong_arguments_are_refused_alike(engines, options, words):
    for engine in engines.values():
        with pytest.raises(ValueError, match=words):
            engine.generate(**{"prompts": [[1, 2]], "max_new_tokens": 2} | options)


@pytest.mark.parametrize(("options", "words"), [pytest.param(*b[2:], id=f"{b[0]}: {b[1]}") for b in BAD_OF_ENGINES])
def test_wrong_numbers_of_an_engine_are_refused(engines, options, words):
    for engine in (engines["local"], engines["server"]):
        with pytest.raises(ValueError, match=words):
            engine.generate(**{"prompts": [[1, 2]], "max_new_tokens": 2} | options)


def test_arrays_and_scalars_of_numpy_and_jax_are_lists_and_numbers(engines):
    want = engines["local"].generate([[1, 2], [3, 4]], max_new_tokens=[2, 1], stop_token_ids=[5])
    for array in (np.asarray, jnp.asarray):
        for prompts in (array([[1, 2], [3, 4]]), [array([1, 2]), array([3, 4])], ([array(1), array(2)], (3, 4))):
            options = {"num_samples": array(1), "stop_token_ids": array([5]), "max_new_tokens": array([2, 1])}
            got = engines["local"].generate(prompts, **options)
            assert got == want and {type(t) for ((c,), *_) in [got] for t in c.tokens} == {int}
            rows = engines["generator"].generate(prompts, max_new_tokens=array(1))
            assert rows == [c.tokens[:1] for (c,) in want]


@pytest.mark.parametrize("wrong", [0, 2.5])
def test_wrong_sizes_are_refused(engines, wrong):
    generator = engines["generator"]
    for make, name in (
        (lambda: LocalEngine(generator.model, slots=wrong), "slots"),
        (lambda: LocalEngine(generator.model, capacity=wrong), "capacity"),
        (lambda: ServerEngine("http://127.0.0.1:9", "m", connections=wrong), "connections"),
        (lambda: ServerEngine("http://127.0.0.1:9", "m", vocab=wrong), "vocab"),
        (lambda: generator.generate([[1]], max_new_tokens=1, capacity=wrong), "capacity"),
        (lambda: list(_scoring.score(generator, [([1], [2])], batch_size=wrong, max_length=8)), "batch_size"),
        (lambda: list(_scoring.score(generator, [([1], [2])], batch_size=1, max_length=wrong)), "max_length"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be an integer of at least 1, got"):
            make()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        *[("temperature", x) for x in (-1.0, float("nan"), 1e-38, 1e39, True, "1")],
        *[("top_k", x) for x in (0, 2.0, True)],
        *[(name, x) for name in ("top_p", "min_p") for x in (0, 1.5, float("nan"))],
    ],
)
def test_settings_out_of_range_are_refused(name, wrong):
    with pytest.raises(ValueError, match=f"{name} must"):
        Sampler(**{name: wrong})


def test_equal_settings_are_equal_samplers():
    """A sampler is a static argument: its settings must hash, and share a program with Python's numbers."""
    settings: dict[str, Any] = {"temperature": 0.5, "top_k": 3, "top_p": 0.75, "min_p": 0.25}
    for array in (np.asarray, jnp.asarray):
        arrays: dict[str, Any] = {name: array(value) for name, value in settings.items()}
        sampler = Sampler(**arrays)
        assert sampler == Sampler(**settings) and hash(sampler) == hash(Sampler(**settings))


@pytest.mark.parametrize("pair", [([1.0], [2]), ([1], [VOCAB]), ([1], [True]), ("a", "b")], ids=str)
def test_wrong_ids_are_not_scored(engines, pair):
    with pytest.raises(ValueError, match="prompt 0"):
        next(_scoring.score(engines["generator"], [pair], batch_size=1, max_length=8))


@pytest.mark.parametrize("seed", [2.5, None, "0", True])
def test_a_seed_is_an_integer(engines, seed):
    with pytest.raises(ValueError, match="seed must be an integer, got"):
        ServerEngine("http://127.0.0.1:9", "m", seed=seed)
