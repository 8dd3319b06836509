"""The OpenAI HTTP client against a small server that responds as vLLM does."""

import contextlib
import http.server
import json
import math
import socketserver
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from maxlib import inference
from maxlib.inference import Completion, LocalEngine, Sampler, ServerEngine, ServerError
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
            (completions,) = self.server.engine.generate(
                [body["prompt"]],
                max_new_tokens=body["max_tokens"],
                num_samples=body["n"],
                stop_token_ids=body["stop_token_ids"],
                sampler=Sampler(temperature=body["temperature"]),
                key=jax.random.key(body["seed"]),
            )
        choices = [choice(i, completion) for i, completion in enumerate(completions)]
        return self.answer(
            json.dumps({"choices": [self.server.change(completion) for completion in choices]}).encode(), 200
        )

    def answer(self, text, status):
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        pass


def choice(index: int, completion: Completion) -> dict:
    names = [f"token_id:{t}" for t in completion.tokens]
    logprobs = {"tokens": names, "token_logprobs": completion.log_probs}
    return {
        "index": index,
        "token_ids": completion.tokens,
        "logprobs": logprobs,
        "finish_reason": completion.finish_reason,
    }


@pytest.fixture(scope="module")
def local():
    return LocalEngine(filled_llama(num_layers=2), slots=2, capacity=32, dtype=jnp.float32)


@contextlib.contextmanager
def serving(engine, change=lambda choice: choice):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.engine, server.change, server.seen, server.lock = engine, change, [], threading.Lock()
        server.models = {"base", "base-1", "base-2"}
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
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
        assert {completion.sampler for group in groups for completion in group} == {Sampler()}
        rounds = [ServerEngine(url, "base"), ServerEngine(url, "base")]
        seeds = [sorted(_seeds(completion, server)) for completion in rounds for _ in range(2)]
        assert seeds[:2] == seeds[2:] and not {*seeds[0]} & {*seeds[1]}
        assert all(body["ignore_eos"] and body["return_token_ids"] for _, body in server.seen)
        unfiltered = {
            "top_k": -1,
            "top_p": 1.0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }  # not the model's own defaults
        assert all(unfiltered.items() <= body.items() for _, body in server.seen)


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


def answer(*choices, **changes) -> bytes:
    """A whole response over HTTP of two tokens, 5 and 6; `changes` are those of its only choice."""
    logprobs = {"tokens": ["a", "b"], "token_logprobs": [-1.0, -2.0]}
    good = {"index": 0, "token_ids": [5, 6], "finish_reason": "length", "logprobs": logprobs}
    return response(json.dumps({"choices": list(choices) or [good | changes]}).encode())


def response(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers])
    return head.encode() + b"\r\n\r\n" + body


def scores(*values) -> bytes:
    return answer(logprobs={"tokens": ["a", "b"], "token_logprobs": list(values)})


NAMES = [" a", "token_id:6"]
ANSWERS = {
    "no logprobs": (answer(logprobs=None), "got 2 ids and 0 log-probabilities: text alone cannot be trained on"),
    "no ids": (answer(token_ids=None), "got 0 ids and 2"),
    "text for ids": (answer(token_ids=None, logprobs={"tokens": NAMES, "token_logprobs": [-1, -2]}), "got 0 ids and 2"),
    "ids of another type": (answer(token_ids={"5": 6}), "got 0 ids and 2"),
    "bool ids": (answer(token_ids=[5, True]), "ids must be integers"),
    "negative ids": (answer(token_ids=[5, -1]), "ids must be integers"),
    "ids outside": (answer(token_ids=[5, 61]), r"\[0, 61\), got 61"),
    "NaN": (scores(float("nan"), -1.0), "log-probabilities of drawn tokens must be numbers .* got nan"),
    "infinite": (scores(float("-inf"), -1.0), "got -inf"),
    "of an impossible token": (scores(-9999.0, -1.0), "got -9999.0"),
    "text for numbers": (scores("-1", -1.0), "must be numbers"),
    "ended without a stop token": (answer(finish_reason="stop"), "must end with the first of stop_token_ids or by its"),
    "aborted": (answer(finish_reason="abort"), "got 'abort'"),
    "stop token inside": (answer(token_ids=[9, 6]), "must end with the first of stop_token_ids"),
    "too long": (
        answer(token_ids=[5] * 3, logprobs={"token_logprobs": [-1.0] * 3}),
        "max_new_tokens=2 .* got 3 tokens",
    ),
    "too short": (answer(token_ids=[5], logprobs={"token_logprobs": [-1.0]}), "max_new_tokens=2 .* got 1 tokens"),
    "index of another": (answer(index=1), "with the indices from 0, got 1"),
    "no choice": (response(b'{"choices": []}'), "must return 1 completions"),
    "two choices": (answer({"index": 0}, {"index": 0}), "got 2 with"),
    "an error in JSON": (response(b'{"error": "context too long"}'), "a list of choices.*context too long"),
    "a page": (response(b"<html>log in</html>"), "log in"),
    "cut JSON": (response(b'{"choices": ['), "cannot be used"),
    "deep JSON": (response(b"[" * 200_000), "recursion depth"),
    "cut": (response(b"x" * 99)[:-90], "cannot be used"),
    "no HTTP": (b"hello\r\n\r\n", "did not answer by HTTP"),
    "many headers": (response(b"{}", "200 OK", *["X: y"] * 200), "did not answer by HTTP"),
    "nothing": (b"", "cannot be reached"),
    "a redirect": (response(b"", "307 Moved", "Location: http://127.0.0.1:9/there"), "307, a redirect, .*9/there"),
    "refused": (
        response(b'{"message": "no room for SECRET, Bearer SECRET"}', "503 Busy"),
        r"answered 503.*\[api_key\]",
    ),
    "refused at length": (response(b"SECRET" + b"x" * 500_000, "500 Error"), r"answered 500: '\[api_key\]xxx"),
}


@pytest.fixture(scope="module")
def raw():
    """A server that answers with the bytes of `server.answer`, each after `server.pause` seconds."""

    class Raw(socketserver.StreamRequestHandler):
        def handle(self):
            length = 0
            while (line := self.rfile.readline()) not in (b"\r\n", b""):
                length = int(line.split(b":")[1]) if line.lower().startswith(b"content-length") else length
            self.rfile.read(length)
            step = 1 if self.server.pause else 1 << 20
            with contextlib.suppress(OSError):  # the client has hung up
                for start in range(0, len(self.server.answer), step):
                    self.wfile.write(self.server.answer[start : start + step])
                    time.sleep(self.server.pause)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Raw) as server:
        server.daemon_threads, server.answer, server.pause = True, b"", 0
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, **options):
    engine = ServerEngine(f"http://127.0.0.1:{server.server_address[1]}", "base", api_key="SECRET", vocab=61, **options)
    return engine.generate([[1, 2]], max_new_tokens=2, stop_token_ids=[9])


@pytest.mark.parametrize("kind", ANSWERS)
def test_every_other_answer_is_a_server_error(raw, kind):
    """The error quotes the answer in a few words, and never the key."""
    raw.answer, words = ANSWERS[kind]
    with pytest.raises(ServerError, match=words) as error:
        ask(raw)
    assert "SECRET" not in str(error.value) and len(str(error.value)) < 800 and error.value.__cause__ is None


def test_what_the_api_says_is_an_answer(raw):
    raw.answer = answer()
    assert ask(raw) == [[Completion([5, 6], [-1.0, -2.0], "length", inference.GREEDY)]]
    raw.answer = answer(token_ids=[9], logprobs={"token_logprobs": [0]}, finish_reason="stop")
    assert ask(raw) == [[Completion([9], [0.0], "stop", inference.GREEDY)]]
    raw.answer = answer(token_ids=[5, 9])  # the stop token is also the last one allowed
    assert ask(raw) == [[Completion([5, 9], [-1.0, -2.0], "stop", inference.GREEDY)]]


@pytest.mark.parametrize("slow", [answer(), b"HTTP/1.1 100 Continue\r\n\r\n" * 99], ids=["body", "head"])
def test_the_time_limit_is_that_of_the_request(raw, monkeypatch, slow):
    raw.answer = slow
    monkeypatch.setattr(raw, "pause", 0.02)  # each byte comes in time
    start = time.monotonic()
    with pytest.raises(ServerError, match="did not answer within 0.2 s"):
        ask(raw, timeout=0.2)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    "options",
    [
        *[{"url": url} for url in ("host:8000", "file:///etc/passwd", "http://", "http://h:x", "http://h/?a=b")],
        {"url": "http://user:SECRET@host"},
        *[{"api_key": key} for key in ("", "SECRET\n", "SECR\u00c9T SECRET")],
        *[{"timeout": seconds} for seconds in (0, -1, float("nan"), float("inf"), 1e30)],
    ],
    ids=str,
)
def test_addresses_keys_and_times_are_checked(options):
    with pytest.raises(ValueError) as error:
        ServerEngine(**{"url": "http://host", "model": "base"} | options)
    assert "SECRET" not in str(error.value)


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
    with pytest.raises(ServerError, match="cannot be reached"):
        raw.generate(PROMPTS, max_new_tokens=1)
    with serving(local) as (url, _), pytest.raises(ServerError, match="answered 404: .*no such model"):
        ServerEngine(url, "other").generate(PROMPTS, max_new_tokens=1)
    assert math.isfinite(local.generate(PROMPTS, max_new_tokens=1)[0][0].log_probs[0])
