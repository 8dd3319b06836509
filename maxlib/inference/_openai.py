"""A server with OpenAI's HTTP API over a `LocalEngine`, as an ASGI application of Starlette."""

import asyncio
import contextlib
import dataclasses
import functools
import hmac
import json
import logging
import time
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Key
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HTTPRequest
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route

from maxlib.inference._continuous import LocalEngine
from maxlib.inference._openai_fields import BadRequest, ChatFields, CompletionFields, Fields
from maxlib.inference._processors import Grammar, LogitBias
from maxlib.inference._requests import LogitsProcessor, Request
from maxlib.inference._text import TextWriter, overlap, text_lengths, token_bytes, token_text
from maxlib.inference._tool_calls import CALL_MARKERS, ToolCall, ToolFormat, parse_tool_calls
from maxlib.tokenization import ChatTemplate

logger = logging.getLogger(__name__)
_IMPOSSIBLE = -9999.0  # what is written for a probability of zero, as JSON has no infinity
_BEGINNING = 16  # characters a token of the maximum length, after which a text is surely too long, or mostly spaces
_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error", 500: "server_error"}


class _Choice:
    """One completion of a request: its text, tool calls and log-probabilities for the client."""

    def __init__(
        self, request: Request, writer: TextWriter, tool_format: ToolFormat | None, tools: Any, most_calls: int | None
    ):
        self.request, self._writer, self._tools, self._most_calls = request, writer, tools, most_calls
        self._format: ToolFormat | None = tool_format
        self.tool_calls: list[ToolCall] = []
        self.reasoning, self._text, self._num_written = "", "", 0
        self.text_offset = 0  # characters of the tokens in the events of a stream so far

    async def pieces(self) -> AsyncIterator[tuple[str, int]]:
        """Yields pieces of text that are certain, each with the number of tokens until then."""
        count = 0
        async for token in self.request:
            count += 1
            if piece := self._content(self._writer.add(token)):
                yield piece, count
        yield self._last(self._writer.rest()), count

    async def text(self) -> str:
        """Returns the whole text at its end."""
        completion = await self.request.completion()
        return self._last(self._writer.add_all(completion.tokens))

    @property
    def finish_reason(self) -> str | None:
        """Returns the finish reason for a client."""
        reason = self.request.finish_reason  # an answer that was cut off says so, whatever it called before
        return "tool_calls" if self.tool_calls and reason == "stop" else reason

    def _content(self, piece: str) -> str:
        """Returns the text before tool calls, without what may be the beginning of one."""
        self._text += piece
        if self._format == "gpt-oss":  # only all messages say which is the answer
            return ""
        end, answer = len(self._text), self._text.rfind("</think>") + 1  # calls inside the reasoning are not calls
        for marker in CALL_MARKERS[self._format] if self._format else ():
            place = self._text.find(marker, answer)
            end = min(end, place if place >= 0 else len(self._text) - overlap(self._text, marker))
        content = self._text[self._num_written : max(end, self._num_written)]
        self._num_written += len(content)
        return content

    def _last(self, piece: str) -> str:
        """Reads the tool calls, and returns the rest of the text; malformed calls stay text."""
        content = self._content(piece)
        rest = self._text[self._num_written :]
        if self._format is None:
            return content + rest
        try:
            answer = parse_tool_calls(self._text, self._format, tools=self._tools)
        except ValueError:
            return content + rest
        self.tool_calls = answer.tool_calls[: self._most_calls]
        if self._format == "gpt-oss":
            self.reasoning = answer.reasoning
            return answer.content
        return content if self.tool_calls else content + rest


class _Endpoint:
    """The ASGI application of one path: checks the key, and turns errors into answers of OpenAI's shape."""

    def __init__(self, server: "Server", answer: Callable[[Any], Awaitable[Any]]):
        self._server, self._answer = server, answer

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        request, begin = HTTPRequest(scope, receive, send), time.perf_counter()
        try:
            if request.url.path.startswith("/v1/"):
                self._server.check_key(request)
            response = await self._answer(request)
        except BadRequest as error:
            response = _error(error.status, str(error), error.param)
        except Exception as error:
            # Messages may quote prompts: only places are logged.
            places = "".join(traceback.format_tb(error.__traceback__))
            logger.error("%s failed with %s:\n%s", request.url.path, type(error).__name__, places)
            response = _error(500, "the server failed; its log says where")
        self._server.count(requests=1, errors=int(response.status_code >= 400))
        seconds = time.perf_counter() - begin
        logger.info("%s %s %d %.3f s", request.method, request.url.path, response.status_code, seconds)
        await response(scope, receive, send)


@dataclasses.dataclass(eq=False)
class Server:
    """The endpoints. See `openai_app` for the arguments."""

    engine: LocalEngine
    tokenizer: Any
    name: str
    template: ChatTemplate | None
    stop_token_ids: list[int]
    tool_format: ToolFormat | None
    max_length: int
    max_body: int
    max_waiting: int
    api_key: str | None

    def __post_init__(self):
        self._started = int(time.time())
        self._counters = {"requests": 0, "errors": 0, "prompt_tokens": 0, "cached_tokens": 0, "generated_tokens": 0}
        self._grammar_tokenizer: Any = None
        self._token_text = functools.cache(functools.partial(token_text, self.tokenizer))

    def app(self) -> Starlette:
        """Makes the application."""
        endpoints = {
            "/v1/completions": ("POST", self.completions),
            "/v1/chat/completions": ("POST", self.chat),
            "/v1/models": ("GET", self.models),
            "/health": ("GET", self.health),
            "/metrics": ("GET", self.metrics),
        }

        def refused(request: Any, error: Any) -> Any:
            return _error(error.status_code, f"{error.detail}: {request.method} {request.url.path}")

        return Starlette(
            routes=[
                Route(path, _Endpoint(self, answer), methods=[method]) for path, (method, answer) in endpoints.items()
            ],
            exception_handlers={HTTPException: refused},
        )

    async def health(self, request: Any) -> Any:
        """Answers as long as the server runs."""
        return _json({"status": "ok"})

    async def models(self, request: Any) -> Any:
        """Lists the one model."""
        fields = {"id": self.name, "object": "model", "created": self._started, "owned_by": "maxlib"}
        return _json({"object": "list", "data": [fields | {"max_model_len": self.max_length}]})

    async def metrics(self, request: Any) -> Any:
        """Writes counters in Prometheus' text format."""
        lines = []
        for name, value in self._counters.items():
            lines += [f"# TYPE maxlib_{name}_total counter", f"maxlib_{name}_total {value}"]
        for name, value in (("running", self.engine.num_running), ("waiting", self.engine.num_waiting)):
            lines += [f"# TYPE maxlib_{name} gauge", f"maxlib_{name} {value}"]
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")

    async def completions(self, request: Any) -> Any:
        """Answers `/v1/completions`."""
        fields = CompletionFields.read(await self._body(request))
        self._check(fields, len(fields.prompts) * fields.n)
        prompts = [await self._ids(prompt, special=fields.add_special_tokens) for prompt in fields.prompts]
        choices = await self._choices(fields, prompts, None, ())
        if fields.stream:
            return self._streamed("text_completion", fields, choices, _completion_chunk)
        echoes = [await self._echo(fields, prompt) for prompt in prompts] if fields.echo else []
        texts = await _unless_disconnected(request, _texts(choices))
        answers = []
        for n, (choice, text) in enumerate(zip(choices, texts, strict=True)):
            echo = echoes[n // fields.n] if fields.echo else None
            answers.append(self._completion(fields, choice, text, n, echo))
        return _json(
            self._envelope("text_completion", answers)
            | {"usage": self._usage(prompts, choices if fields.max_tokens else [])}
        )

    async def chat(self, request: Any) -> Any:
        """Answers `/v1/chat/completions`."""
        fields = ChatFields.read(await self._body(request))
        self._check(fields, fields.n)
        if self.template is None:
            raise BadRequest("this model has no chat template: use /v1/completions", "messages")
        if fields.tools and self.tool_format is None:
            raise BadRequest("the format of this model's tool calls is not known", "tools")
        messages = fields.template_messages(arguments_as_text=self.tool_format == "deepseek")
        try:
            text = await asyncio.to_thread(
                self.template, messages, tools=fields.tools or None, **fields.chat_template_kwargs
            )
        except (ValueError, TypeError) as error:  # TypeError: a variable that it has already
            raise BadRequest(str(error), "messages") from None
        prompt = await self._ids(text, special=False)
        if fields.max_tokens is None:
            fields.max_tokens = max(1, self.max_length - len(prompt))
        reads_calls = fields.tools or self.tool_format == "gpt-oss"
        tool_format: ToolFormat | None = self.tool_format if reads_calls else None
        choices = await self._choices(fields, [prompt], tool_format, fields.tools)
        if fields.stream:
            return self._streamed("chat.completion.chunk", fields, choices, _chat_chunk)
        texts = await _unless_disconnected(request, _texts(choices))
        answers = []
        for n, (choice, text) in enumerate(zip(choices, texts, strict=True)):
            message: dict[str, Any] = {"role": "assistant", "content": text or (None if choice.tool_calls else "")}
            message |= {"tool_calls": _tool_calls(choice)} if choice.tool_calls else {}
            message |= {"reasoning_content": choice.reasoning} if choice.reasoning else {}
            answer = {"index": n, "message": message, "finish_reason": choice.finish_reason}
            answers.append(answer | {"logprobs": self._chat_log_probs(fields, choice, 0, len(choice.request.tokens))})
        return _json(self._envelope("chat.completion", answers) | {"usage": self._usage([prompt], choices)})

    def count(self, **numbers: int) -> None:
        """Adds numbers to the counters of `/metrics`."""
        for name, number in numbers.items():
            self._counters[name] += number

    def check_key(self, request: Any) -> None:
        """Raises BadRequest if the request lacks the server's key."""
        sent = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self.api_key is not None and not hmac.compare_digest(sent.encode(), self.api_key.encode()):
            raise BadRequest("the API key is missing or wrong", status=401)

    def _check(self, fields: Fields, count: int) -> None:
        """Raises BadRequest for another model, and for more completions than may wait."""
        if fields.model != self.name:
            raise BadRequest(f"there is no model {fields.model!r:.100}; this server has {self.name!r}", "model", 404)
        if count > self.max_waiting:
            raise BadRequest(f"a request may have at most {self.max_waiting} completions, got {count}", "n")
        if self.engine.num_waiting + count > self.max_waiting:
            raise BadRequest("too many requests wait; send this one again later", status=429)

    async def _body(self, request: Any) -> dict[str, Any]:
        """Reads the JSON object of a request."""
        body = bytearray()
        try:
            async with asyncio.timeout(60):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self.max_body:
                        raise BadRequest(f"the body must have at most {self.max_body} bytes", status=413)
        except TimeoutError:
            raise BadRequest("the body did not arrive within 60 s", status=408) from None
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            raise BadRequest("the body must be JSON") from None
        if not isinstance(value, dict):
            raise BadRequest("the body must be a JSON object")
        return value

    async def _ids(self, prompt: str | list[int], *, special: bool) -> list[int]:
        """Returns the ids of a prompt."""
        if isinstance(prompt, list):
            return prompt
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise BadRequest("texts must be Unicode without lone surrogates", "prompt") from None

        def encode(text: str) -> list[int]:  # a batch, as only that lets other threads run
            return self.tokenizer.encode_batch([text], add_special_tokens=special)[0].ids

        # Refuse a text that is much too long by its beginning: all of it may take minutes.
        most = _BEGINNING * self.max_length
        if len(prompt) > most and (count := len(await asyncio.to_thread(encode, prompt[:most]))) > 2 * self.max_length:
            raise BadRequest(
                f"this model's maximum length is {self.max_length} tokens, but the prompt has more than {count}",
                "prompt",
            )
        return await asyncio.to_thread(encode, prompt)

    async def _choices(
        self,
        fields: CompletionFields | ChatFields,
        prompts: list[list[int]],
        tool_format: ToolFormat | None,
        tools: Sequence[Any],
    ) -> list[_Choice]:
        """Submits `n` completions of each prompt."""
        assert fields.max_tokens is not None
        longest = max(map(len, prompts))
        if longest + fields.max_tokens > self.max_length:
            raise BadRequest(
                f"this model's maximum length is {self.max_length} tokens, but the prompt has {longest} and max_tokens is "
                f"{fields.max_tokens}",
                "max_tokens",
            )
        ends = sorted({*fields.stop_token_ids, *(() if fields.ignore_eos else self.stop_token_ids)})
        choices: list[_Choice] = []
        most_calls = None if getattr(fields, "parallel_tool_calls", True) else 1

        def submit() -> None:
            processors = self._processors(fields)
            for number in range(len(prompts) * fields.n):
                prompt = prompts[number // fields.n]
                request = self.engine.submit(
                    prompt,
                    max_new_tokens=max(1, fields.max_tokens or 0),
                    sampler=fields.sampler,
                    stop_token_ids=ends,
                    stop=fields.stops,
                    processors=processors,
                    alternatives=fields.num_alternatives,
                    key=None if fields.seed is None else jax.random.fold_in(_key(fields.seed), number),
                )
                show_special = tool_format is not None
                writer = TextWriter(self.tokenizer, prompt, stop=fields.stops, ends=ends, show_special=show_special)
                choices.append(_Choice(request, writer, tool_format, tools, most_calls))

        try:
            await asyncio.to_thread(submit)  # as a row's key may wait for a step
        except ValueError as error:
            for choice in choices:
                choice.request.cancel()
            raise BadRequest(str(error)) from None
        return choices

    def _processors(self, fields: Fields) -> list[LogitsProcessor]:
        processors: list[LogitsProcessor] = []
        vocab, schema = self.engine.generator.vocab, fields.schema_of_answers
        try:
            if fields.logit_bias:
                bias = {int(token): value for token, value in fields.logit_bias.items()}
                processors.append(LogitBias(bias, vocab))
            if schema is not None:
                if self._grammar_tokenizer is None:
                    self._grammar_tokenizer = Grammar.prepare(
                        self.tokenizer, vocab=vocab, stop_token_ids=self.stop_token_ids
                    )
                processors.append(Grammar.json_schema(schema, self._grammar_tokenizer))
        except (ValueError, ImportError) as error:  # ImportError: without the package for grammars
            raise BadRequest(str(error)) from None
        return processors

    async def _echo(self, fields: CompletionFields, prompt: list[int]) -> dict[str, Any]:
        """Returns the prompt's text, with log-probabilities if they are asked for; the first token has none."""
        text = self.tokenizer.decode(prompt)
        if fields.logprobs is None:
            return {"text": text}
        log_probs, best = await asyncio.to_thread(self.engine.score, prompt, fields.logprobs)
        offsets = text_lengths(self.tokenizer, [], prompt)[:-1]
        probs = self._log_probs(fields, prompt, [None, *log_probs], [None, *best], offsets)
        return {"text": text, "logprobs": probs}

    def _completion(
        self, fields: CompletionFields, choice: _Choice, text: str, index: int, echo: dict[str, Any] | None
    ) -> dict[str, Any]:
        request, log_probs = choice.request, None
        count = min(len(request.tokens), fields.max_tokens or 0)
        if fields.logprobs is not None:
            best = list(request.best) if request.best else [([], [])] * count
            start = len(echo["text"]) if echo else 0
            tokens, drawn = request.tokens[:count], request.log_probs[:count]
            offsets = [start + length for length in text_lengths(self.tokenizer, request.prompt, tokens)[:-1]]
            log_probs = self._log_probs(fields, tokens, drawn, best[:count], offsets)
        text = text if fields.max_tokens else ""
        # Without new tokens nothing has ended the text.
        answer: dict[str, Any] = {"index": index, "finish_reason": choice.finish_reason if count else "length"}
        if fields.return_token_ids:
            answer |= {"token_ids": request.tokens[:count], "prompt_token_ids": request.prompt}
        if echo is not None:
            text = echo["text"] + text
            if log_probs is not None:
                log_probs = {name: [*echo["logprobs"][name], *values] for name, values in log_probs.items()}
        return answer | {"text": text, "logprobs": log_probs}

    def _log_probs(
        self, fields: Fields, tokens: Any, log_probs: Any, best: Any, offsets: Sequence[int]
    ) -> dict[str, Any]:
        """Returns log-probabilities in the format of completions; `offsets` are the tokens' places in the text."""
        names = [self._token(fields, token) for token in tokens]
        tops: list[Any] = []
        for name, log_prob, alternatives in zip(names, log_probs, best, strict=True):
            if alternatives is None:
                tops.append(None)
                continue
            top = {
                self._token(fields, token): max(value, _IMPOSSIBLE) for token, value in zip(*alternatives, strict=True)
            }
            tops.append(top | {name: max(log_prob, _IMPOSSIBLE)})
        log_probs = [value if value is None else max(value, _IMPOSSIBLE) for value in log_probs]
        return {"tokens": names, "token_logprobs": log_probs, "top_logprobs": tops, "text_offset": offsets}

    def _chat_log_probs(self, fields: ChatFields, choice: _Choice, start: int, end: int) -> dict[str, Any] | None:
        """Returns the log-probabilities of some tokens in the format of chats."""
        if not fields.logprobs:
            return None
        request, content = choice.request, []
        for n in range(start, end):
            best = zip(*request.best[n], strict=True) if request.best else ()
            tops = [self._chat_log_prob(token, log_prob) for token, log_prob in best]
            content.append(self._chat_log_prob(request.tokens[n], request.log_probs[n]) | {"top_logprobs": tops})
        return {"content": content}

    def _chat_log_prob(self, token: int, log_prob: float) -> dict[str, Any]:
        text, data = self._token_text(token), token_bytes(self.tokenizer, token)
        return {"token": text, "logprob": max(log_prob, _IMPOSSIBLE), "bytes": list(data)}

    def _token(self, fields: Fields, token: int) -> str:
        if fields.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return self._token_text(token)

    def _usage(self, prompts: Sequence[Sequence[int]], choices: Sequence[_Choice]) -> dict[str, Any]:
        """Returns the numbers of tokens, which are counted here too."""
        num_prompt, num_new = sum(map(len, prompts)), sum(len(choice.request.tokens) for choice in choices)
        cached = sum(choice.request.cached for choice in choices[:: max(1, len(choices) // len(prompts))])
        self.count(prompt_tokens=num_prompt, cached_tokens=cached, generated_tokens=num_new)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _envelope(self, kind: str, choices: list[Any]) -> dict[str, Any]:
        return {
            "id": f"{'cmpl' if kind == 'text_completion' else 'chatcmpl'}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.name,
            "choices": choices,
        }

    def _streamed(self, kind: str, fields: Any, choices: list[_Choice], chunk: Callable[..., dict[str, Any]]) -> Any:
        """Returns an answer of server-sent events."""
        envelope = self._envelope(kind, [])

        async def events() -> AsyncIterator[str]:
            try:
                async for event in self._chunks(fields, choices, chunk):
                    yield f"data: {json.dumps(envelope | event)}\n\n"
                usage = self._usage([choice.request.prompt for choice in choices[:: fields.n]], choices)
                if fields.stream_options.get("include_usage"):
                    yield f"data: {json.dumps(envelope | {'usage': usage})}\n\n"
            except RuntimeError:  # the engine failed: the status has been sent
                body = {"error": {"message": "the server failed", "type": "server_error", "param": None, "code": 500}}
                yield f"data: {json.dumps(body)}\n\n"
            finally:
                for choice in choices:
                    choice.request.cancel()
            yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _chunks(self, fields: Any, choices: list[_Choice], chunk: Any) -> AsyncIterator[dict[str, Any]]:
        """Yields the events of all choices as their pieces come."""
        news: asyncio.Queue[Any] = asyncio.Queue()

        async def read(n: int, choice: _Choice) -> None:
            num_sent = 0
            try:
                async for piece, count in choice.pieces():
                    await news.put((n, piece, num_sent, count))
                    num_sent = count
                await news.put((n, None, num_sent, num_sent))
            except Exception as error:
                await news.put(error)

        tasks = [asyncio.create_task(read(n, choice)) for n, choice in enumerate(choices)]
        try:
            num_running = len(choices)
            while num_running:
                event = await news.get()
                if isinstance(event, Exception):
                    raise event
                n, piece, start, end = event
                num_running -= piece is None
                yield {"choices": [{"index": n, **chunk(self, fields, choices[n], piece, start, end)}]}
        finally:
            for task in tasks:
                task.cancel()


def _completion_chunk(
    server: Server, fields: CompletionFields, choice: _Choice, piece: str | None, start: int, end: int
) -> dict[str, Any]:
    """Returns the event of a piece; None is the end."""
    request, log_probs = choice.request, None
    if fields.logprobs is not None and end > start:
        best = request.best[start:end] or [([], [])] * (end - start)
        before, tokens = [*request.prompt, *request.tokens[:start]], request.tokens[start:end]
        lengths = text_lengths(server.tokenizer, before, tokens)
        *offsets, choice.text_offset = [choice.text_offset + length for length in lengths]
        log_probs = server._log_probs(fields, tokens, request.log_probs[start:end], best, offsets)
    ids = {"token_ids": request.tokens[start:end]} if fields.return_token_ids else {}
    return {
        "text": piece or "",
        "logprobs": log_probs,
        "finish_reason": choice.finish_reason if piece is None else None,
        **ids,
    }


def _chat_chunk(
    server: Server, fields: ChatFields, choice: _Choice, piece: str | None, start: int, end: int
) -> dict[str, Any]:
    """Returns the event of a piece; None is the end, with the tool calls."""
    delta: dict[str, Any] = {"role": "assistant"} if start == 0 else {}
    if piece is not None:
        log_probs = server._chat_log_probs(fields, choice, start, end)
        return {"delta": delta | {"content": piece}, "logprobs": log_probs, "finish_reason": None}
    if choice.reasoning:
        delta["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(_tool_calls(choice))]
    return {"delta": delta, "logprobs": None, "finish_reason": choice.finish_reason}


def _key(seed: int) -> Key[Array, ""]:
    """Returns the key of a seed of 64 bits, of which JAX reads the lower half."""
    key, upper = jax.random.key(seed), seed >> 32
    return jax.random.fold_in(key, upper & 0xFFFFFFFF) if upper not in (0, -1) else key


def _tool_calls(choice: _Choice) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for call in choice.tool_calls
    ]


async def _texts(choices: list[_Choice]) -> list[str]:
    """Returns the whole text of each choice."""
    try:
        return await asyncio.gather(*(choice.text() for choice in choices))
    finally:
        for choice in choices:
            choice.request.cancel()


async def _unless_disconnected(request: Any, work: Any) -> Any:
    """Returns the result of a coroutine, which is cancelled if the client goes away."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(disconnected())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise BadRequest("the client closed the connection", status=499)
        return tasks[0].result()
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await tasks[0]


def _json(body: Mapping[str, Any], status: int = 200) -> Any:
    return JSONResponse(body, status)


def _error(status: int, message: str, param: str | None = None) -> Any:
    kind = _KINDS.get(status, "invalid_request_error")
    return _json({"error": {"message": message, "type": kind, "param": param, "code": status}}, status)
