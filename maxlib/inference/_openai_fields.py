"""Fields of requests to OpenAI's API: checked, with the defaults of the API."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from maxlib.inference._arguments import integer, is_id, number
from maxlib.inference._sampling import Sampler

_MOST = {"n": 128, "logprobs": 20, "stop": 16, "prompts": 1024}
_COMMON = frozenset(
    [
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "n",
        "stream",
        "stream_options",
        "stop",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "seed",
        "logprobs",
        "response_format",
        "top_k",
        "min_p",
        "repetition_penalty",
        "stop_token_ids",
        "ignore_eos",
        "return_token_ids",
        "return_tokens_as_token_ids",
    ]
)
_IGNORED = frozenset(
    ["user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"]
)
_COMPLETION = _COMMON | {"prompt", "echo", "best_of", "suffix", "add_special_tokens"}
_CHAT = _COMMON | {"messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "chat_template_kwargs"}


class BadRequest(Exception):
    """A request that is refused.

    Args:
        message: What the client reads.
        param: Name of the field.
        status: Status of the answer.
    """

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


@dataclasses.dataclass
class Fields:
    """Fields that completions and chats have."""

    model: str
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    sampler: Sampler
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int | None
    logit_bias: dict[int, float]
    schema: Any
    num_alternatives: int
    return_token_ids: bool
    return_tokens_as_token_ids: bool


@dataclasses.dataclass
class CompletionFields(Fields):
    """Fields of `/v1/completions`; `logprobs` is the number of the best tokens, None for none."""

    prompts: list[str | list[int]]
    echo: bool
    logprobs: int | None
    add_special_tokens: bool

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "CompletionFields":
        """Reads a request.

        Raises:
            BadRequest: when a field is unknown, of another type, or out of range.
        """
        _check_known(body, _COMPLETION)
        if body.get("suffix") is not None or body.get("best_of") not in (None, body.get("n") or 1):
            raise BadRequest("suffix, and best_of other than n, are not supported", "suffix")
        logprobs = _get(body, "logprobs", _int(0, _MOST["logprobs"]), None)
        fields = cls(
            **_common(body, max_tokens=_get(body, "max_tokens", _int(0), 16), num_alternatives=logprobs or 0),
            prompts=_prompts(body.get("prompt")),
            echo=_get(body, "echo", _bool, False),
            logprobs=logprobs,
            add_special_tokens=_get(body, "add_special_tokens", _bool, True),
        )
        if fields.echo and fields.stream:
            raise BadRequest("echo cannot be streamed", "echo")
        if not fields.max_tokens and not fields.echo:
            raise BadRequest("max_tokens must be at least 1 without echo", "max_tokens")
        return fields


@dataclasses.dataclass
class ChatFields(Fields):
    """Fields of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    logprobs: bool
    tools: list[dict[str, Any]]
    chat_template_kwargs: dict[str, Any]

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "ChatFields":
        """Reads a request.

        Raises:
            BadRequest: when a field is unknown, of another type, or out of range.
        """
        _check_known(body, _CHAT)
        logprobs = _get(body, "logprobs", _bool, False)
        top = _get(body, "top_logprobs", _int(0, _MOST["logprobs"]), 0)
        limit = _get(body, "max_completion_tokens", _int(1), None) or _get(body, "max_tokens", _int(1), None)
        tools, choice = _get(body, "tools", _objects, []), body.get("tool_choice") or "auto"
        if choice not in ("auto", "none"):
            raise BadRequest("tool_choice must be auto or none: other choices are not supported", "tool_choice")
        messages = _objects(body.get("messages"))
        if not messages or not all(isinstance(message.get("role"), str) for message in messages):
            raise BadRequest("messages must be a list of objects with a role, at least one", "messages")
        return cls(
            **_common(body, max_tokens=limit, num_alternatives=top if logprobs else 0),
            messages=messages,
            logprobs=logprobs,
            tools=tools if choice == "auto" else [],
            chat_template_kwargs=_get(body, "chat_template_kwargs", _object, {}),
        )

    def template_messages(self, *, arguments_as_text: bool) -> list[dict[str, Any]]:
        """Returns messages as chat templates take them: contents as texts, and arguments of calls as objects.

        Args:
            arguments_as_text: True leaves arguments as JSON texts, for templates that join them.
        """
        return [self._template_message(message, arguments_as_text) for message in self.messages]

    def _template_message(self, message: dict[str, Any], arguments_as_text: bool) -> dict[str, Any]:
        content, calls = message.get("content"), message.get("tool_calls")
        if isinstance(content, list):
            if not all(isinstance(x, dict) and isinstance(x.get("text"), str) for x in content):
                raise BadRequest("contents must be texts: images and audio are not supported", "messages")
            content = "".join(x["text"] for x in content)
        if content is not None and not isinstance(content, str):
            raise BadRequest("the content of a message must be a text or a list of texts", "messages")
        message = message | {"content": content if content is not None else ""}
        if calls and not arguments_as_text:
            message["tool_calls"] = [self._template_call(call) for call in _objects(calls)]
        return message

    def _template_call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = _object(call.get("function"))
        arguments = function.get("arguments")
        try:
            return call | {"function": function | {"arguments": json.loads(arguments or "{}")}}
        except (TypeError, ValueError, RecursionError):
            raise BadRequest("arguments of tool calls must be JSON texts", "messages") from None


def _common(body: Mapping[str, Any], *, max_tokens: int | None, num_alternatives: int) -> dict[str, Any]:
    stop = body.get("stop") or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or len(stop) > _MOST["stop"] or not all(isinstance(x, str) for x in stop):
        raise BadRequest(f"stop must be a text or a list of at most {_MOST['stop']} texts", "stop")
    top_k = _get(body, "top_k", _int(-1), -1)
    try:
        sampler = Sampler(
            temperature=_get(body, "temperature", _float(0, 100), 1.0),
            top_k=top_k if top_k > 0 else None,
            top_p=_get(body, "top_p", _float(0, 1), 1.0) or 1e-6,
            min_p=_get(body, "min_p", _float(0, 1), 0.0) or None,
            repetition_penalty=_get(body, "repetition_penalty", _float(0, 10), 1.0),
            presence_penalty=_get(body, "presence_penalty", _float(-2, 2), 0.0),
            frequency_penalty=_get(body, "frequency_penalty", _float(-2, 2), 0.0),
        )
    except ValueError as error:
        raise BadRequest(str(error)) from None
    return {
        "model": _get(body, "model", _str, ""),
        "max_tokens": max_tokens,
        "n": _get(body, "n", _int(1, _MOST["n"]), 1),
        "stream": _get(body, "stream", _bool, False),
        "include_usage": bool(_get(body, "stream_options", _object, {}).get("include_usage")),
        "sampler": sampler,
        "stop": stop,
        "stop_token_ids": _get(body, "stop_token_ids", _ids, []),
        "ignore_eos": _get(body, "ignore_eos", _bool, False),
        "seed": _get(body, "seed", _int(-(1 << 63), (1 << 63) - 1), None),
        "logit_bias": {
            _id(name): _float(-100, 100)(value) for name, value in _get(body, "logit_bias", _object, {}).items()
        },
        "schema": _schema(_get(body, "response_format", _object, {})),
        "num_alternatives": num_alternatives,
        "return_token_ids": _get(body, "return_token_ids", _bool, False),
        "return_tokens_as_token_ids": _get(body, "return_tokens_as_token_ids", _bool, False),
    }


def _check_known(body: Mapping[str, Any], known: frozenset[str]) -> None:
    for name, value in body.items():
        if name not in known | _IGNORED and value is not None:
            raise BadRequest(f"unknown field {name!r:.100}", name[:100])


def _prompts(prompt: Any) -> list[str | list[int]]:
    """Reads one prompt or several, each a text or ids."""
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if several else [prompt]
    if len(prompts) > _MOST["prompts"]:
        raise BadRequest(f"there must be at most {_MOST['prompts']} prompts", "prompt")
    for entry in prompts:
        if not isinstance(entry, str) and not (isinstance(entry, list) and entry and all(map(is_id, entry))):
            raise BadRequest("prompt must be a text, a list of ids, or a list of either, none of them empty", "prompt")
    return prompts


def _schema(response_format: Mapping[str, Any]) -> Any:
    """Returns the JSON schema of an answer's format; None for any text."""
    kind = response_format.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        return _object(_object(response_format.get("json_schema")).get("schema"))
    raise BadRequest("response_format must be of type text, json_object or json_schema", "response_format")


def _get(body: Mapping[str, Any], name: str, read: Callable[[Any], Any], default: Any) -> Any:
    """Reads a field; null counts as absent."""
    value = body.get(name)
    if value is None:
        return default
    try:
        return read(value)
    except (ValueError, OverflowError) as error:
        raise BadRequest(f"{name}: {error}", name) from None


def _int(least: int, most: int = 1 << 31) -> Callable[[Any], int]:
    def read(value: Any) -> int:
        if integer("it", value, least=least) > most:
            raise ValueError(f"it must be at most {most}, got {value}")
        return value

    return read


def _float(least: float, most: float) -> Callable[[Any], float]:
    def read(value: Any) -> float:
        if not least <= number("it", value) <= most:
            raise ValueError(f"it must lie between {least} and {most}, got {value}")
        return float(value)

    return read


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"it must be true or false, got {value!r:.100}")
    return value


def _str(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"it must be a text, got {value!r:.100}")
    return value


def _ids(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(map(is_id, value)):
        raise ValueError("it must be a list of ids")
    return value


def _id(name: str) -> int:
    if not (name.isascii() and name.isdecimal()):
        raise BadRequest("logit_bias must have ids as names", "logit_bias")
    return int(name)


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"there must be a JSON object, got {value!r:.100}")
    return value


def _objects(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise BadRequest(f"there must be a list of JSON objects, got {value!r:.100}")
    return [_object(x) for x in value]
