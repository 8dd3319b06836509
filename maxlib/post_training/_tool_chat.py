"""An environment for chats with tools that are Python functions."""

import inspect
import json
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

from maxlib._utils.files import JSON_TYPES
from maxlib.inference import parse_tool_calls, tool_call_format
from maxlib.post_training._pools import Prompt
from maxlib.tokenization import ChatTemplate

Message = dict[str, Any]
_Format = Literal["hermes", "llama3", "deepseek", "gpt-oss"]


class ToolChat:
    """An `Environment` of a chat in which a model calls Python functions, until it answers without a call.

    What a tool returns follows the model's own tokens, with the template's text around it; earlier tokens are neither
    decoded and encoded again nor rendered again. A call that cannot be read, names no tool, raises or returns what JSON
    cannot say gives the model the error as its result.

    Args:
        messages: The chat so far, with `role` and `content`.
        tools: Functions with type hints and docstrings, which describe them to the model.
        score: Takes the messages of the session and returns its reward.
        tokenizer: Tokenizer of the model.
        template: Chat template of the model.
        format: How the model writes calls, see `inference.parse_tool_calls`; None reads it from the template.
        stop_token_ids: Ids that end a turn.
        variables: Other variables of the template.

    Raises:
        ValueError: when `format` is None and the template's is unknown, or a tool's parameters lack type hints.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Callable[..., Any]],
        score: Callable[[list[Message]], float | None],
        *,
        tokenizer: Any,
        template: ChatTemplate,
        format: _Format | None = None,
        stop_token_ids: Collection[int],
        **variables: Any,
    ):
        self.messages: list[Message] = [dict(message) for message in messages]
        self.tools, self.score = {tool.__name__: tool for tool in tools}, score
        self.schemas = [json_schema(tool) for tool in tools]
        known = format or tool_call_format(template.tool_source)
        if known is None:
            raise ValueError("the chat template does not show how it writes tool calls: pass format=, such as 'hermes'")
        self.tokenizer, self.template = tokenizer, template
        self.format: _Format = known
        self.stop_token_ids, self.variables = frozenset(stop_token_ids), variables
        self._tokens: list[int] = []

    def reset(self) -> Prompt:
        """Returns the rendered chat."""
        self._tokens = self._encode(self._render(self.messages, add_generation_prompt=True))
        return Prompt(self._tokens)

    def step(self, tokens: Sequence[int]) -> Prompt | None:
        """Runs the tools that the model called, and returns the session with their results."""
        ended = len(tokens) > 0 and tokens[-1] in self.stop_token_ids
        text = self.tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False)
        results: list[Message]
        try:
            answer = parse_tool_calls(text, self.format, tools=self.schemas)
        except ValueError as error:
            said, results = {"role": "assistant", "content": text}, [{"role": "tool", "content": f"error: {error}"}]
        else:
            said = {"role": "assistant", "content": answer.content, "reasoning_content": answer.reasoning or None}
            functions = [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls]
            if functions:
                said["tool_calls"] = [{"type": "function", "function": function} for function in functions]
            results = [
                {"role": "tool", "name": call.name, "content": self._result(call.name, call.arguments)}
                for call in answer.tool_calls
            ]
        self.messages = [*self.messages, said]
        if not results:
            return None
        following = self._following(results)
        self.messages = [*self.messages, *results]
        self._tokens = [*self._tokens, *tokens, *self._encode(following)]
        return Prompt(self._tokens)

    def reward(self) -> float | None:
        """Returns the score of the session."""
        return self.score(self.messages)

    def _result(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs a tool, and returns its result, or its error, as text."""
        if name not in self.tools:
            return f"error: there is no tool {name}; there are {', '.join(self.tools)}"
        try:
            value = self.tools[name](**arguments)
            return value if isinstance(value, str) else json.dumps(value)
        except Exception as error:
            return f"error: {type(error).__name__}: {error}"

    def _following(self, results: list[Message]) -> str:
        """Returns the text between the end of the model's turn and its next one."""
        before = self._render(self.messages, add_generation_prompt=False)
        ends = [self.tokenizer.decode([token], skip_special_tokens=False) for token in self.stop_token_ids]
        at = max((before.rfind(end) + len(end) for end in ends if end in before), default=len(before))
        after = self._render([*self.messages, *results], add_generation_prompt=True)
        if not after.startswith(before[:at]):
            raise ValueError(
                "the chat template must write a turn in the same way with and without the tool results after it, which "
                "this one does not: write an environment of your own that returns whole prompts"
            )
        return after[at:]

    def _render(self, messages: list[Message], *, add_generation_prompt: bool) -> str:
        return self.template(
            messages, tools=self.schemas, add_generation_prompt=add_generation_prompt, **self.variables
        )

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def json_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Describes a function to a model, by its name, docstring and type hints, as OpenAI's API does.

    Args:
        function: A function whose parameters are numbers, strings, booleans, lists or dictionaries.

    Raises:
        ValueError: when a parameter has no type hint, or another one.
    """
    hints, properties, required = typing.get_type_hints(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        properties[name] = {"type": _json_type(function, name, hints.get(name))}
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    described = {"name": function.__name__, "description": inspect.getdoc(function) or "", "parameters": parameters}
    return {"type": "function", "function": described}


def _json_type(function: Callable[..., Any], name: str, hint: Any) -> str:
    """Returns the JSON type of a type hint, in which None may be allowed besides."""
    union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    choices = [kind for kind in typing.get_args(hint) if kind is not type(None)] if union else [hint]
    kind = typing.get_origin(choices[0]) or choices[0]
    if len(choices) != 1 or kind not in JSON_TYPES:
        raise ValueError(
            f"parameters of a tool must have one of the types {', '.join(t.__name__ for t in JSON_TYPES)}, but {name} of "
            f"{function.__name__} has {hint}"
        )
    return JSON_TYPES[kind]
