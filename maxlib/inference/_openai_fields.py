"""Fields of requests to OpenAI's API: checked by pydantic, with the defaults of the API."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from maxlib.inference._sampling import Sampler

_IGNORED = frozenset(["user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key"])
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1, fail_fast=True)]
Count = Annotated[int, Field(ge=1, lt=1 << 31)]


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


class Fields(pydantic.BaseModel):
    """Fields that completions and chats have."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    model: str = ""
    max_tokens: Count | None = None
    n: int = Field(1, ge=1, le=128)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(-1, ge=-1, lt=1 << 31)
    top_p: float = Field(1.0, ge=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0, le=10)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    stop: str | Annotated[list[str], Field(max_length=16)] = []
    stop_token_ids: list[Id] = Field([], fail_fast=True)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]+$")], Annotated[float, Field(ge=-100, le=100)]] = {}
    response_format: dict[str, Any] = {}
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False

    @classmethod
    def _read(cls, body: Mapping[str, Any]) -> Any:
        """Reads a request; null counts as absent.

        Raises:
            BadRequest: when a field is unknown, of another type, or out of range.
        """
        try:
            fields = cls.model_validate(
                {name: value for name, value in body.items() if value is not None and name not in _IGNORED}
            )
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            name = str((*errors[0]["loc"], "body")[0])[:100]  # names that are no text have no place
            raise BadRequest(
                f"{name}: {' or '.join(dict.fromkeys(each['msg'] for each in errors[:4]))}", name
            ) from None
        if fields.stream_options and not fields.stream:
            raise BadRequest("stream_options are for stream=true", "stream_options")
        if fields.ignore_eos and fields.schema_of_answers is not None:
            raise BadRequest("with response_format a text must end, so ignore_eos must be false", "ignore_eos")
        return fields

    @property
    def sampler(self) -> Sampler:
        """Returns the sampler; raises ValueError for settings of which none can be made."""
        return Sampler(
            temperature=self.temperature,
            top_k=self.top_k if self.top_k > 0 else None,
            top_p=self.top_p or 1e-6,
            min_p=self.min_p or None,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )

    @property
    def stops(self) -> list[str]:
        """Returns the texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def schema_of_answers(self) -> Any:
        """Returns the JSON schema of answers; None for any text."""
        match self.response_format:
            case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
                return schema
            case {"type": "json_object"}:
                return {"type": "object"}
            case {"type": "text"} | {"type": None}:
                return None
        if self.response_format:
            raise BadRequest("response_format must be of type text, json_object or json_schema", "response_format")
        return None


class CompletionFields(Fields):
    """Fields of `/v1/completions`; `logprobs` is the number of the best tokens, None for none."""

    prompt: str | Ids | Annotated[list[str | Ids], Field(min_length=1, max_length=1024)]
    max_tokens: int = Field(16, ge=0, lt=1 << 31)
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None
    add_special_tokens: bool = True

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "CompletionFields":
        """Reads a request.

        Raises:
            BadRequest: when a field is unknown, of another type, or out of range.
        """
        fields = cls._read(body)
        if fields.best_of not in (None, fields.n):
            raise BadRequest("best_of other than n is not supported", "best_of")
        if fields.echo and fields.stream:
            raise BadRequest("echo cannot be streamed", "echo")
        if not fields.max_tokens and not fields.echo:
            raise BadRequest("max_tokens must be at least 1 without echo", "max_tokens")
        return fields

    @property
    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, each a text or ids."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        prompts: Any = self.prompt if several else [self.prompt]
        return prompts

    @property
    def num_alternatives(self) -> int:
        """Returns the number of the best tokens to return."""
        return self.logprobs or 0


class ChatFields(Fields):
    """Fields of `/v1/chat/completions`."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> "ChatFields":
        """Reads a request, as `CompletionFields.read` does."""
        fields = cls._read(body)
        if not all(isinstance(message.get("role"), str) for message in fields.messages):
            raise BadRequest("messages must be objects with a role", "messages")
        if fields.top_logprobs and not fields.logprobs:
            raise BadRequest("top_logprobs need logprobs=true", "top_logprobs")
        fields.max_tokens = fields.max_completion_tokens or fields.max_tokens
        fields.tools = fields.tools if fields.tool_choice == "auto" else []
        return fields

    @property
    def num_alternatives(self) -> int:
        """Returns the number of the best tokens to return."""
        return self.top_logprobs if self.logprobs else 0

    def template_messages(self, *, arguments_as_text: bool) -> list[dict[str, Any]]:
        """Returns messages as chat templates take them: contents as texts, and arguments of calls as objects.

        Args:
            arguments_as_text: True leaves arguments as JSON texts, for templates that join them.
        """
        messages = []
        for message in self.messages:
            message = message | {"content": _text(message.get("content"))}
            if message.get("tool_calls") and not arguments_as_text:
                message["tool_calls"] = _template_calls(message["tool_calls"])
            messages.append(message)
        return messages


def _text(content: Any) -> str:
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRequest("contents must be texts: images and audio are not supported", "messages")
        return "".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise BadRequest("the content of a message must be a text or a list of texts", "messages")
    return content or ""


def _template_calls(calls: Any) -> list[dict[str, Any]]:
    try:
        arguments = [json.loads(call["function"].get("arguments") or "{}") for call in calls]
        return [
            call | {"function": call["function"] | {"arguments": each}}
            for call, each in zip(calls, arguments, strict=True)
        ]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(
            "tool_calls must be objects with a function, whose arguments are JSON texts", "messages"
        ) from None
