"""The OpenAI HTTP client against a small server that responds as vLLM does."""

import contextlib
import http.server
import json
import math
import threading

import jax
import jax.numpy as jnp
import pytest

from maxlib import inference
from maxlib.inference import Completion, LocalEngine, Sampler, ServerEngine
from tests.nn.tiny import filled_llama

PROMPTS = [[5, 9, 2], [11, 3, 4, 8]]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers from `server.engine`; `server.change` turns an answer into that of another kind of server."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, body))
        if self.path != "/v1/completions":
            return self.answer(b"Success", 200)
        if body["model"] not in self.server.models:
            return self.answer(b'{"error": "no such model"}', 404)
        with self.server.lock:
            (found,) = self.server.engine.generate(
                [body["prompt"]],
                max_new_tokens=body["max_tokens"],
                num_samples=body["n"],
                stop_token_ids=body["stop_token_ids"],
                sampler=Sampler(temperature=body["temperature"]),
                key=jax.random.key(body["seed"]),
            )
        choices = [choice(i, one) for i, one in enumerate(found)]
        return self.answer(json.dumps({"choices": [self.server.change(one) for one in choices]}).encode(), 200)

    def answer(self, text, status):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def choice(index: int, one: Completion) -> dict:
    names = [f"token_id:{t}" for t in one.tokens]
    logprobs = {"tokens": names, "token_logprobs": one.log_probs}
    return {"index": index, "token_ids": one.tokens, "logprobs": logprobs, "finish_reason": one.finish_reason}


@pytest.fixture(scope="module")
def local():
    return LocalEngine(filled_llama(num_layers=2), slots=2, capacity=32, dtype=jnp.float32)


@contextlib.contextmanager
def serving(engine, change=lambda choice: choice):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.engine, server.change, server.seen, server.lock = engine, change, [], threading.Lock()
        server.models = {"base", "base-1", "base-2"}
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", server
        finally:
            server.shutdown()
            thread.join()


def test_ids_and_log_probabilities_travel_both_ways(local):
    stop = [local.generate(PROMPTS, max_new_tokens=6)[0][0].tokens[2]]
    with serving(local) as (url, server):
        engine = ServerEngine(url, "base", api_key="secret")
        assert isinstance(engine, inference.Engine)
        got = engine.generate(PROMPTS, max_new_tokens=[6, 4], stop_token_ids=stop)
        assert got == local.generate(PROMPTS, max_new_tokens=[6, 4], stop_token_ids=stop)
        assert got[0][0].finish_reason == "stop" and got[0][0].tokens[-1] in stop
        groups = engine.generate(PROMPTS, max_new_tokens=3, num_samples=3, sampler=Sampler(), key=jax.random.key(1))
        assert [len(group) for group in groups] == [3, 3]
        assert len({body["seed"] for _, body in server.seen[-2:]}) == 2
        assert {one.sampler for group in groups for one in group} == {Sampler()}
        rounds = [ServerEngine(url, "base"), ServerEngine(url, "base")]
        seeds = [sorted(_seeds(one, server)) for one in rounds for _ in range(2)]
        assert seeds[:2] == seeds[2:] and not {*seeds[0]} & {*seeds[1]}
        assert all(body["ignore_eos"] and body["return_token_ids"] for _, body in server.seen)
        whole = {"top_k": -1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}  # not the model's own defaults
        assert all(whole.items() <= body.items() for _, body in server.seen)


def _seeds(engine, server):
    """The seeds that a call without a key asks with."""
    before = len(server.seen)
    engine.generate(PROMPTS, max_new_tokens=1, sampler=Sampler())
    return [body["seed"] for _, body in server.seen[before:]]


def test_tokens_may_be_written_as_ids(local):
    drop = lambda choice: {name: value for name, value in choice.items() if name != "token_ids"}
    with serving(local, drop) as (url, _):
        assert ServerEngine(url, "base").generate(PROMPTS, max_new_tokens=3) == local.generate(
            PROMPTS, max_new_tokens=3
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda one: {"index": 0, "text": "hello", "finish_reason": "length"}, "text alone cannot be trained on"),
        (
            lambda one: one | {"token_ids": None, "logprobs": one["logprobs"] | {"tokens": [" a"] * 3}},
            "got 0 ids and 3 log-probabilities",
        ),
        (lambda one: one | {"token_ids": one["token_ids"][:-1]}, "got 2 ids and 3"),
        (lambda one: one | {"finish_reason": "stop"}, "must end with one of stop_token_ids or by its length"),
        (lambda one: one | {"finish_reason": "abort"}, "got 'abort'"),
    ],
)
def test_a_server_that_cannot_be_trained_on_is_an_error(local, change, words):
    with serving(local, change) as (url, _), pytest.raises(ValueError, match=words):
        ServerEngine(url, "base").generate(PROMPTS[:1], max_new_tokens=3)


def test_newer_weights_are_a_new_adapter(local):
    written = []
    with serving(local) as (url, server):
        engine = ServerEngine(url, "base", save=lambda weights: written.append(weights) or f"/adapters/{len(written)}")
        engine.update("first")
        engine.update("second")
        engine.generate(PROMPTS[:1], max_new_tokens=2)
        paths = [(path.rpartition("/")[2], body.get("lora_name"), body.get("lora_path")) for path, body in server.seen]
        assert server.seen[-1][1]["model"] == "base-2" and written == ["first", "second"]
    assert paths[:3] == [
        ("load_lora_adapter", "base-1", "/adapters/1"),
        ("load_lora_adapter", "base-2", "/adapters/2"),
        ("unload_lora_adapter", "base-1", None),
    ]


def test_what_is_not_the_samplers_distribution_is_refused(local):
    raw, processed = (
        ServerEngine("http://127.0.0.1:9", "base", logprobs_mode=f"{m}_logprobs") for m in ("raw", "processed")
    )
    with pytest.raises(ValueError, match="raw_logprobs are at temperature 1, but the sampler has 0.7"):
        raw.generate(PROMPTS, max_new_tokens=1, sampler=Sampler(temperature=0.7))
    for sampler in (Sampler(temperature=0), Sampler(top_p=0.9)):
        with pytest.raises(ValueError, match="computed after filters, so there must be no filters"):
            processed.generate(PROMPTS, max_new_tokens=1, sampler=sampler)
    with pytest.raises(ValueError, match="update needs save="):
        raw.update(None)
    with pytest.raises(RuntimeError, match="cannot be reached"):
        raw.generate(PROMPTS, max_new_tokens=1)
    with serving(local) as (url, _), pytest.raises(RuntimeError, match="answered 404: .*no such model"):
        ServerEngine(url, "other").generate(PROMPTS, max_new_tokens=1)
    assert math.isfinite(local.generate(PROMPTS, max_new_tokens=1)[0][0].log_probs[0])
