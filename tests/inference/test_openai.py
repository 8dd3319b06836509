"""The server against the official `openai` client, our own client, malformed requests and signals."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import maxlib
from maxlib import inference, ops
from maxlib.inference._text import TextWriter
from maxlib.models import llama
from maxlib.tokenization import ChatTemplate
from tests.nn.tiny import filled, filled_llama

httpx = pytest.importorskip("httpx")
uvicorn = pytest.importorskip("uvicorn")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("starlette")
_openai = pytest.importorskip("maxlib.inference._openai")

VOCAB, EOS = 260, 256
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ "
    "{'name': c.function.name, 'arguments': c.function.arguments}|tojson }}</tool_call>{% endfor %}\n{% endfor %}a:"
)
KEY = "sk-very-secret"


def bytes_tokenizer():
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


TOKENIZER = bytes_tokenizer()


@contextlib.contextmanager
def running(app):
    """Serves from a thread; yields the server and its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server, f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def make_app(model, **options):
    engine = inference.LocalEngine(model, slots=4, capacity=128, tokenizer=TOKENIZER, dtype=jnp.float32)
    template = ChatTemplate(TEMPLATE)
    return engine, inference.openai_app(
        engine, TOKENIZER, name="tiny", template=template, stop_token_ids=[EOS], tool_format="hermes", **options
    )


@pytest.fixture(scope="module")
def model():
    return filled_llama(num_layers=1, vocab=VOCAB)


@pytest.fixture(scope="module")
def served(model):
    engine, app = make_app(model, api_key=KEY, max_body=100_000)
    with running(app) as (_, url):
        yield engine, url


@pytest.fixture(scope="module")
def client(served):
    openai = pytest.importorskip("openai")  # here: it takes a second to import
    return openai.OpenAI(base_url=f"{served[1]}/v1", api_key=KEY, max_retries=0)


def test_the_official_client_reads_completions(model, client):
    assert [each.id for each in client.models.list()] == ["tiny"]
    prompt, alone = "Once upon", inference.LocalEngine(model, slots=4, capacity=128, dtype=jnp.float32)
    ids = TOKENIZER.encode(prompt).ids
    ((want,),) = alone.generate([ids], max_new_tokens=12, stop_token_ids=[EOS])
    options = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
    ids_too = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    got = client.completions.create(**options, logprobs=2, extra_body=ids_too)
    (choice,) = got.choices
    assert choice.token_ids == want.tokens and choice.finish_reason == want.finish_reason
    assert choice.text == TOKENIZER.decode(want.tokens)
    np.testing.assert_allclose(choice.logprobs.token_logprobs, want.log_probs, atol=1e-5)
    assert all(len(top) == 2 and max(top, key=top.get) == f"token_id:{token}"
               for top, token in zip(choice.logprobs.top_logprobs, want.tokens, strict=True))  # fmt: skip
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(ids), len(want.tokens))
    shown = [TOKENIZER.decode(want.tokens[:n]).rstrip("\ufffd") for n in range(len(want.tokens))]
    offsets = choice.logprobs.text_offset
    assert all(length <= offset <= n for n, (offset, length) in enumerate(zip(offsets, map(len, shown), strict=True)))
    pieces = list(client.completions.create(**options, logprobs=2, stream=True, stream_options={"include_usage": True}))
    probs = [piece.choices[0].logprobs for piece in pieces if piece.choices and piece.choices[0].logprobs]
    assert [offset for each in probs for offset in each.text_offset] == offsets
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == choice.text
    assert pieces[-1].usage == got.usage.model_copy(
        update={"prompt_tokens_details": pieces[-1].usage.prompt_tokens_details}
    )
    stop = choice.text[5:7]
    cut = client.completions.create(**options, stop=[stop, "never"]).choices[0]
    assert cut.text == choice.text[: choice.text.index(stop)] and cut.finish_reason == "stop"
    several = client.completions.create(**options | {"temperature": 1, "prompt": [prompt, ids]}, n=2, seed=3)
    again = client.completions.create(**options | {"temperature": 1, "prompt": [prompt, ids]}, n=2, seed=3)
    texts = [each.text for each in several.choices]
    assert texts == [each.text for each in again.choices] and len(set(texts)) > 1
    assert [each.index for each in several.choices] == [0, 1, 2, 3]
    banned = client.completions.create(**options, logit_bias={str(want.tokens[0]): -100}).choices[0].text
    assert banned[0] != choice.text[0]


def test_an_echo_has_the_log_probabilities_of_the_prompt(model, client):
    ids = TOKENIZER.encode("A wall of bricks").ids
    got = client.completions.create(model="tiny", prompt=ids, max_tokens=1, echo=True, logprobs=1, temperature=0)
    probs, forward = got.choices[0].logprobs, jax.jit(lambda ids: model.logits(model(ids, dtype=jnp.float32).hidden)[0])
    scores = np.asarray(forward(jnp.asarray([ids])), np.float64)
    want = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    assert probs.token_logprobs[0] is None and len(probs.tokens) == len(ids) + 1
    np.testing.assert_allclose(probs.token_logprobs[1:-1], want[np.arange(len(ids) - 1), ids[1:]], atol=1e-5)
    np.testing.assert_allclose([max(top.values()) for top in probs.top_logprobs[1:]], want.max(-1), atol=1e-5)
    assert got.choices[0].text.startswith("A wall of bricks")
    alone = client.completions.create(model="tiny", prompt=ids, max_tokens=0, echo=True, logit_bias={str(EOS): 100})
    assert alone.choices[0].text == "A wall of bricks" and alone.usage.completion_tokens == 0
    assert alone.choices[0].finish_reason == "length"  # although the next token would be the last one


def test_the_official_client_reads_chats(client):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0}
    got = client.chat.completions.create(**options, logprobs=True, top_logprobs=2)
    content = got.choices[0].message.content
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == content
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[-1].choices[0].finish_reason == "length"
    probs = got.choices[0].logprobs.content
    assert len(probs) == 9 and probs[0].logprob == pytest.approx(probs[0].top_logprobs[0].logprob)
    # Bytes, also of tokens that are parts of a character, are those of the text.
    assert all(len(prob.bytes) == 1 for prob in probs if prob.token)  # ids from 257 on have no text
    assert b"".join(map(bytes, (prob.bytes for prob in probs))).decode(errors="replace") == content
    prompt = "u:Hia:"
    same = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
    assert same.choices[0].text == content


class Scripted:
    """A processor that makes the model write a text."""

    def __init__(self, text):
        self.ids = [*TOKENIZER.encode(text).ids, EOS]

    def __call__(self, request):
        bias = np.zeros(VOCAB, np.float32)
        bias[self.ids[len(request.tokens)]] = 1e4
        return bias


def test_tools_are_called_and_answered(model, monkeypatch):
    openai = pytest.importorskip("openai")
    engine, app = make_app(model)
    call = '{"name": "add", "arguments": {"a": 1, "b": "x"}}'
    script, submit = Scripted(f"Wait <b> <tool_call>\n{call}\n</tool_call>"), engine.submit
    monkeypatch.setattr(engine, "submit", lambda *args, **options: submit(*args, **options | {"processors": [script]}))
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    with running(app) as (_, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        options = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "tools": tools}
        (choice,) = client.chat.completions.create(**options).choices
        (made,) = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Wait <b> "
        assert made.function.name == "add" and json.loads(made.function.arguments) == {"a": 1, "b": "x"}
        chunks = list(client.chat.completions.create(**options, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Wait <b> "
        assert json.loads(chunks[-1].choices[0].delta.tool_calls[0].function.arguments) == {"a": 1, "b": "x"}
        script.ids = [*TOKENIZER.encode('<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2).ids, EOS]
        for options_of_calls, count in (({}, 2), ({"parallel_tool_calls": False}, 1)):
            (choice,) = client.chat.completions.create(**options, **options_of_calls).choices
            assert len(choice.message.tool_calls) == count
        (cut,) = client.chat.completions.create(**options, max_tokens=len(script.ids) - 1).choices
        assert len(cut.message.tool_calls) == 2 and cut.finish_reason == "length"
        answer = [choice.message, {"role": "tool", "tool_call_id": made.id, "content": "2"}]
        script.ids = [*TOKENIZER.encode("It is <too late").ids, EOS]
        (choice,) = client.chat.completions.create(**options | {"messages": [*options["messages"], *answer]}).choices
        assert choice.message.content == "It is <too late" and choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("format", "text", "content", "count"),
    [
        ("gpt-oss", "Yes, no", "Yes, no", 0),  # read at the end, where nothing may have been written yet
        ("gpt-oss", "<|channel|>analysis<|message|>Hm<|end|><|channel|>final<|message|>Yes", "Yes", 0),
        ("hermes", "A <tool_call>?</think>B<tool_call>{CALL}</tool_call>", "A <tool_call>?</think>B", 1),
        ("hermes", "A <tool_call>?</think>B", "A <tool_call>?</think>B", 0),
    ],
)
def test_the_pieces_of_a_stream_are_the_answer(format, text, content, count):
    class Replayed(inference.Request):
        def __init__(self):
            pass

        async def __aiter__(self):
            for token in TOKENIZER.encode(text.replace("{CALL}", '{"name": "f", "arguments": {}}')).ids:
                yield token

    choice = _openai._Choice(Replayed(), TextWriter(TOKENIZER, [1], show_special=True), format, [], None)

    async def read():
        return [piece async for piece, _ in choice.pieces()]

    assert "".join(asyncio.run(read())) == content and len(choice.tool_calls) == count


def test_all_bits_of_a_seed_count():
    seeds = [0, 1, 1 << 32, 1 + (1 << 32), 1 << 62, -1, -1 << 40]
    keys = {tuple(jax.random.key_data(_openai._key(seed)).tolist()) for seed in seeds}
    assert len(keys) == len(seeds) and (_openai._key(7) == jax.random.key(7)).all()


def test_answers_follow_a_schema(client):
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "?"}],
        max_tokens=60,
        n=3,
        seed=1,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    for choice in answer.choices:
        value = json.loads(choice.message.content)
        assert choice.finish_reason == "stop" and isinstance(value["ok"], bool) and 0 <= value["n"] < 100


def test_our_own_client_trains_from_it(model, served):
    prompts, sampler = [TOKENIZER.encode(text).ids for text in ("One", "Two three")], inference.Sampler()
    ours = inference.ServerEngine(served[1], "tiny", api_key=KEY, vocab=VOCAB)
    want = inference.LocalEngine(model, capacity=128, dtype=jnp.float32).generate(prompts, max_new_tokens=[5, 7])
    got = ours.generate(prompts, max_new_tokens=[5, 7])
    assert [completion.tokens for (completion,) in got] == [completion.tokens for (completion,) in want]
    for (completion,), (other,) in zip(got, want, strict=True):
        np.testing.assert_allclose(completion.log_probs, other.log_probs, atol=1e-5)
    groups = ours.generate(prompts, max_new_tokens=6, num_samples=3, sampler=sampler, stop_token_ids=[EOS])
    assert [len(group) for group in groups] == [3, 3]


def post(url, path="/v1/completions", key=KEY, **options):
    return httpx.post(url + path, headers={"Authorization": f"Bearer {key}"}, timeout=60, **options)


GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 2}


@pytest.mark.parametrize(
    ("status", "options"),
    [
        (401, {"json": GOOD, "key": "sk-wrong"}),
        (404, {"json": GOOD | {"model": "other"}}),
        (404, {"json": GOOD, "path": "/v1/nothing"}),
        (400, {"content": b"{"}),
        (400, {"content": b"[" * 50_000}),
        (400, {"content": b"\xff\xfe"}),
        (400, {"json": [1]}),
        (413, {"content": b" " * 100_001}),
        (400, {"json": GOOD | {"prompt": [1, VOCAB]}}),
        (400, {"json": GOOD | {"prompt": []}}),
        (400, {"json": GOOD | {"prompt": [True]}}),
        (400, {"json": GOOD | {"prompt": "x" * 200}}),
        (400, {"json": GOOD | {"prompt": "x" * 90_000}}),
        (400, {"json": GOOD | {"max_tokens": "9"}}),
        (400, {"json": GOOD | {"max_tokens": 0}}),
        (400, {"json": GOOD | {"temperature": -1}}),
        (400, {"content": b'{"model": "tiny", "prompt": "x", "temperature": NaN}'}),
        (400, {"json": GOOD | {"n": 10**9}}),
        (400, {"json": GOOD | {"seed": 1 << 80}}),
        (400, {"json": GOOD | {"stop": [1]}}),
        (400, {"json": GOOD | {"logit_bias": {"9999": 1}}}),
        (400, {"json": GOOD | {"unheard_of": 1}}),
        (400, {"json": GOOD | {"stream_options": {"include_usage": True}}}),
        (400, {"json": GOOD | {"ignore_eos": True, "response_format": {"type": "json_object"}}}),
        (400, {"json": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
               "path": "/v1/chat/completions"}),
        (400, {"content": b'{"model": "tiny", "prompt": "\\ud800"}'}),
        (400, {"content": b'{"model": "tiny", "prompt": "x", "\\ud800": 1}'}),
        (400, {"json": GOOD | {"best_of": 3}}),
        (400, {"json": GOOD | {"echo": True, "stream": True}}),
        (400, {"json": GOOD | {"response_format": {"type": "xml"}}}),
        (400, {"json": {"model": "tiny", "messages": [{"content": "x"}]}, "path": "/v1/chat/completions"}),
        (400, {"json": {"model": "tiny", "messages": [{"role": "user", "content": 5}]}, "path": "/v1/chat/completions"}),
        (400, {"json": {"model": "tiny", "messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
               "path": "/v1/chat/completions"}),
        (400, {"json": {"model": "tiny", "messages": []}, "path": "/v1/chat/completions"}),
        (400, {"json": {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
               "path": "/v1/chat/completions"}),
        (400, {"json": {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
               "path": "/v1/chat/completions"}),
        (400, {"json": {"model": "tiny", "messages": [{"role": "user", "content": "x"}],
                        "chat_template_kwargs": {"tools": []}}, "path": "/v1/chat/completions"}),
    ],
)  # fmt: skip
def test_errors_have_the_shape_of_openai(served, caplog, status, options):
    with caplog.at_level(logging.DEBUG):
        answer = post(served[1], **options)
    error = answer.json()["error"]
    assert answer.status_code == status and error["code"] == status and error["message"] and error["type"]
    assert KEY not in caplog.text and "sk-wrong" not in caplog.text


def test_a_server_without_grammars_says_so(served, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = post(served[1], json=GOOD | {"response_format": {"type": "json_object"}})
    assert answer.status_code == 400 and "maxlib[grammar]" in answer.json()["error"]["message"]


def test_more_completions_than_may_wait_are_refused(model, monkeypatch):
    engine, app = make_app(model, max_waiting=3)
    with running(app) as (_, url):
        assert "at most 3 completions" in post(url, json=GOOD | {"prompt": ["x", "y"], "n": 2}).text
        monkeypatch.setattr(type(engine), "num_waiting", 2)
        assert post(url, json=GOOD | {"n": 2}).status_code == 429


def test_failures_tell_neither_client_nor_log_the_prompt(model, caplog, monkeypatch):
    engine, app = make_app(model)

    def failing(*args, **options):
        raise KeyError(TOKENIZER.decode(args[0]))

    monkeypatch.setattr(engine, "submit", failing)
    with running(app) as (_, url), caplog.at_level(logging.DEBUG):
        answer = post(url, json=GOOD | {"prompt": "a secret prompt"})
    assert answer.status_code == 500 and "secret" not in answer.text + caplog.text and "KeyError" in caplog.text


def metrics(url):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


async def hammer(url, count, length):
    """Requests that are good, malformed, left in the middle, too long, or slow."""
    rng = np.random.default_rng(0)
    limits = httpx.Limits(max_connections=32)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def one(kind):
            body = GOOD | {"prompt": "p" * int(rng.integers(1, 60)), "max_tokens": 60, "temperature": 1}
            if kind == 0:
                return (await client.post("/v1/completions", json=body | {"max_tokens": 5})).status_code
            if kind == 1:
                return (await client.post("/v1/completions", content=rng.bytes(50))).status_code
            if kind == 2:  # 10^6 tokens, as ids and as text
                prompt = [[1] * length, "p" * length][int(rng.integers(2))]
                return (await client.post("/v1/completions", json=body | {"prompt": prompt})).status_code
            with contextlib.suppress(httpx.ReadTimeout):
                if kind == 3:
                    await client.post("/v1/completions", json=body, timeout=httpx.Timeout(120, read=0.05))
            if kind == 4:
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    async for _ in answer.aiter_lines():
                        break  # goes away after the first event
            if kind == 5 and rng.integers(2):  # writes slowly

                async def pieces():
                    for byte in json.dumps(body | {"max_tokens": 5}).encode():
                        yield bytes([byte])
                        await asyncio.sleep(0.002)

                assert (await client.post("/v1/completions", content=pieces())).status_code == 200
            elif kind == 5:  # reads slowly
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
                    async for _ in answer.aiter_lines():
                        await asyncio.sleep(0.002)
            return None

        return await asyncio.gather(*(one(n % 6) for n in range(count)))


@pytest.mark.parametrize(("count", "length"), [(24, 20_000), pytest.param(500, 1_000_000, marks=pytest.mark.full)])
def test_clients_that_misbehave_leave_nothing_behind(model, count, length):
    engine, app = make_app(model)
    with running(app) as (_, url):
        statuses = asyncio.run(hammer(url, count, length))
        for status, wanted in ((0, 200), (1, 400), (2, 400)):
            assert set(statuses[status::6]) == {wanted}
        end = time.monotonic() + 30
        while metrics(url)["maxlib_running"] + metrics(url)["maxlib_waiting"] and time.monotonic() < end:
            time.sleep(0.05)
        numbers = metrics(url)
        assert numbers["maxlib_running"] == numbers["maxlib_waiting"] == 0
        assert post(url, json=GOOD).status_code == 200 and httpx.get(f"{url}/health").json() == {"status": "ok"}
    assert engine.is_idle and len(asyncio.all_tasks(asyncio.new_event_loop())) == 0


def test_a_server_that_ends_finishes_what_runs(model):
    _, app = make_app(model)
    body = GOOD | {"max_tokens": 100, "stream": True}
    with running(app) as (server, url), httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        server.should_exit = True  # as SIGTERM sets it
        lines = [line for line in lines if line]
    assert lines[-1] == "data: [DONE]" and json.loads(lines[-2][6:])["choices"][0]["finish_reason"]


@pytest.mark.full
def test_a_thousand_samples_follow_a_schema(model):
    """Objects, arrays, enums, numbers and texts of a model that writes noise."""
    pytest.importorskip("llguidance")
    jsonschema = pytest.importorskip("jsonschema")
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "kind": {"enum": ["wall", "roof", "door"]},
            "sizes": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 500}, "maxItems": 3},
            "where": {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"],
                      "additionalProperties": False},
        },
        "required": ["name", "kind", "sizes", "where"],
        "additionalProperties": False,
    }  # fmt: skip
    prepared = inference.Grammar.prepare(TOKENIZER, vocab=VOCAB, stop_token_ids=[EOS])
    grammar = inference.Grammar.json_schema(schema, prepared)
    engine = inference.LocalEngine(model, slots=32, capacity=256, tokenizer=TOKENIZER, dtype=jnp.float32)
    prompts = [TOKENIZER.encode(f"Thing {n}: ").ids for n in range(100)]
    groups = engine.generate(
        prompts,
        num_samples=10,
        max_new_tokens=230,
        sampler=inference.Sampler(1.5),
        stop_token_ids=[EOS],
        processors=[grammar],
    )
    texts = {TOKENIZER.decode(completion.tokens) for group in groups for completion in group}
    assert all(completion.finish_reason == "stop" for group in groups for completion in group) and len(texts) > 900
    for text in texts:
        jsonschema.validate(json.loads(text), schema)


def write_model(directory, model):
    """Writes a model with the tokenizer of bytes."""
    maxlib.save_pretrained(model, directory, overwrite=True)
    TOKENIZER.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@contextlib.contextmanager
def serving(directory, *flags):
    """Runs `maxlib serve` in a process; yields it and its address."""
    command = [sys.executable, "-m", "maxlib", "serve", str(directory), "--port", "0", "--dtype", "float32", *flags]
    process = subprocess.Popen([*command, "--name", "tiny"], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        url = next(m[1] for line in process.stderr if (m := re.search(r"running on (http://\S+)", line)))
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, url
    finally:
        process.kill()


@pytest.mark.full
def test_the_command_serves_lm_eval_and_ends_on_sigterm(tmp_path):
    """lm-eval's `local-completions` scores as our own harness; SIGTERM finishes what runs."""
    for package in ("lm_eval", "aiohttp", "tenacity"):  # those of lm-eval[api]
        pytest.importorskip(package)
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    write_model(tmp_path, filled_llama(num_layers=2, vocab=VOCAB, rope=ops.Rope(12, max_length=128)))
    with serving(tmp_path) as (process, url):
        theirs = LocalCompletionsAPI(
            model="tiny",
            base_url=f"{url}/v1/completions",
            tokenizer=str(tmp_path),
            tokenizer_backend="huggingface",
            tokenized_requests=True,
            num_concurrent=1,
        )
        ours = inference.Harness.from_pretrained(tmp_path, dtype=jnp.float32)
        pairs = [("the house", " is red"), ("a wall", " of stone"), ("x", "y")]
        requests = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
        for got, want in zip(theirs.loglikelihood(requests), ours.loglikelihood(requests), strict=True):
            np.testing.assert_allclose(got[0], want[0], atol=1e-4)
            assert got[1] == want[1]
        until = Instance("generate_until", {}, ("the", {"until": ["\n"], "max_gen_toks": 8, "temperature": 0}), 0)
        assert theirs.generate_until([until]) == ours.generate_until([until])
        body = {"model": "tiny", "prompt": "the", "max_tokens": 40, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        process.wait(30)


@pytest.mark.full
def test_a_server_on_a_mesh_writes_the_same(tmp_path):
    rope = ops.Rope(8, max_length=128)
    cfg = llama.Config(vocab=264, num_layers=2, dim=64, mlp_dim=96, num_heads=8, num_kv_heads=8, head_dim=8, rope=rope)
    model = filled(lambda: llama.Llama(cfg, rngs=nnx.Rngs(0)))
    write_model(tmp_path, model)
    prompts = [TOKENIZER.encode(text).ids for text in ("One wall", "Two walls", "A house without any")]
    want = inference.LocalEngine(model, dtype=jnp.float32).generate(prompts, max_new_tokens=12, stop_token_ids=[EOS])
    with serving(tmp_path, "--tensor", "8") as (_, url):
        got = inference.ServerEngine(url, "tiny").generate(prompts, max_new_tokens=12, stop_token_ids=[EOS])
    for (completion,), (alone,) in zip(got, want, strict=True):
        assert completion.tokens == alone.tokens
        np.testing.assert_allclose(completion.log_probs, alone.log_probs, atol=1e-5)


@pytest.mark.full
def test_vllms_benchmark_client_reads_all_answers(tmp_path):
    """`MAXLIB_VLLM` is the Python of an environment with vLLM, see test_vllm.py."""
    if (python := os.environ.get("MAXLIB_VLLM")) is None:
        pytest.skip("MAXLIB_VLLM must be a Python with vLLM")
    write_model(tmp_path, filled_llama(num_layers=2, vocab=VOCAB, rope=ops.Rope(12, max_length=128)))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with serving(tmp_path) as (_, url):
        command = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--base-url", url, "--model", "tiny"]
        command += ["--tokenizer", str(tmp_path), "--dataset-name", "random", "--random-input-len", "40"]
        command += ["--random-output-len", "20", "--num-prompts", "24", "--ignore-eos", "--backend", "openai"]
        command += ["--save-result", "--result-filename", str(tmp_path / "result.json")]
        subprocess.run(command, env=environment | {"HF_HUB_OFFLINE": "1"}, check=True, timeout=300)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 24 and result["total_output_tokens"] == 24 * 20
