"""Tool calls: reads the functions that a model calls from its text, in the formats of Hermes (also Qwen), Llama 3,
DeepSeek and GPT-OSS.
"""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from maxlib._utils.files import JSON_TYPES

ToolFormat = Literal["hermes", "llama3", "deepseek", "gpt-oss"]
Tools = Sequence[Mapping[str, Any]]

_HERMES, _PYTHON_TAG = "<tool_call>", "<|python_tag|>"
_DEEPSEEK, _DEEPSEEK_CALL, _DEEPSEEK_SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_DSML = "<｜DSML｜function_calls>"
_TYPES = JSON_TYPES | {type(None): "null"}
_QUOTED = 200  # characters of a text that an error shows
# The text from which each format's calls may begin; Llama 3 writes bare JSON.
CALL_MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    "hermes": (_HERMES,),
    "llama3": (_PYTHON_TAG, "{"),
    "deepseek": (_DEEPSEEK, _DSML),
}


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a function by a model.

    Attributes:
        name: Name of the function.
        arguments: Its arguments by name.
    """

    name: str
    arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class ParsedAnswer:
    """An answer of a model, taken apart.

    Attributes:
        content: Text for the user, without reasoning and calls.
        tool_calls: Calls in their order; empty if there is none.
        reasoning: Text of the reasoning: before `</think>`, or GPT-OSS's channel `analysis`.
    """

    content: str
    tool_calls: list[ToolCall]
    reasoning: str = ""


def parse_tool_calls(text: str, format: ToolFormat, *, tools: Tools = ()) -> ParsedAnswer:
    """Reads the tool calls of an answer. Calls inside the reasoning are not calls.

    Args:
        text: The answer, with its special tokens and without the token that ends the turn.
        format: "hermes" reads JSON or Qwen's XML inside `<tool_call>`; "llama3" JSON with `parameters`; "deepseek" the
            formats of V3, V3.1 and V3.2; "gpt-oss" messages to `functions.name` (harmony).
        tools: JSON schemas of the tools. Only the XML formats need them: they do not tell the string "7" from a number.

    Raises:
        ValueError: when the format is unknown, or a call is cut off or malformed: its message tells the model why.
    """
    if format not in get_args(ToolFormat):
        raise ValueError(f"format must be one of {', '.join(get_args(ToolFormat))}, got {format!r}")
    if format == "gpt-oss":
        return _parse_harmony(text)
    thought, closed, answer = text.rpartition("</think>")
    content, calls = _PARSERS[format](answer, tools)
    reasoning = thought.strip().removeprefix("<think>").strip() if closed else ""
    return ParsedAnswer(content.strip(), calls, reasoning)


def tool_call_format(template: str) -> ToolFormat | None:
    """Returns the format in which a chat template writes tool calls, or None for an unknown one.

    Args:
        template: Source of the template (`tokenization.ChatTemplate.tool_source`).
    """
    if "<|channel|>" in template:
        return "gpt-oss"
    if "tool▁call" in template or _DSML in template:
        return "deepseek"
    if _HERMES in template:
        return None if "<arg_key>" in template else "hermes"  # GLM's calls have the same marker
    return "llama3" if _PYTHON_TAG in template or '"parameters": ' in template else None


def _parse_hermes(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    content, calls, at = text, [], text.find(_HERMES)
    if at >= 0:
        content = text[:at]
    while at >= 0:
        at = _skip_space(text, at + len(_HERMES))
        if text.startswith("<function=", at):
            call, at = _xml_call(text, at, tools)
        else:
            fields, at = _read_object(text, at)
            call = _call(fields.get("name"), fields.get("arguments"), text)
        calls.append(call)
        at = text.find(_HERMES, at)
    return content, calls


def _parse_llama3(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Reads objects with `name` and `parameters`, one after the other or with `;` between them."""
    content, marked, rest = text.partition(_PYTHON_TAG)
    if not marked:
        content, rest = "", text
    calls, at = [], _skip_space(rest, 0)
    try:
        while at < len(rest):
            fields, at = _read_object(rest, at)
            calls.append(_call(fields.get("name"), fields.get("parameters"), rest))
            at = _skip_space(rest, at)
            if rest.startswith(";", at):
                at = _skip_space(rest, at + 1)
    except ValueError:
        if marked:
            raise
        return text, []  # a text, or JSON that is the answer
    return content, calls


def _parse_deepseek(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    if _DSML in text:
        content, _, rest = text.partition(_DSML)
        return content, list(_dsml_calls(rest))
    content, _, rest = text.partition(_DEEPSEEK)
    calls = []
    for block in rest.split(_DEEPSEEK_CALL)[1:]:
        name, _, arguments = block.partition(_DEEPSEEK_SEP)
        if name == "function":  # V3: type, separator, name, and JSON in a block of code
            name, _, arguments = arguments.partition("\n")
            arguments = arguments.strip().removeprefix("```json")
        fields, _ = _read_object(arguments, _skip_space(arguments, 0))
        calls.append(_call(name, fields, block))
    return content, calls


def _dsml_calls(text: str) -> Iterator[ToolCall]:
    """Yields the calls of DeepSeek V3.2, whose parameters say whether they are strings."""
    for block in text.split('<｜DSML｜invoke name="')[1:]:
        name, _, rest = block.partition('">')
        body, closed, _ = rest.partition("</｜DSML｜invoke>")
        if not closed:
            raise ValueError(f"the text ends within a tool call: {block[-_QUOTED:]!r}")
        parameters = re.findall(
            r'<｜DSML｜parameter name="([^"]+)" string="(true|false)">(.*?)</｜DSML｜parameter>', body, re.DOTALL
        )
        yield _call(
            name, {key: value if is_text == "true" else _json(value) for key, is_text, value in parameters}, body
        )


def _parse_harmony(text: str) -> ParsedAnswer:
    """Reads GPT-OSS's messages: `header<|message|>body<|end|>`, of which the header names channel and recipient."""
    content, reasoning, calls = [], [], []
    # A text that does not begin with a header has one in its prompt.
    text = text if "<|message|>" in text else f"<|channel|>final<|message|>{text}"
    for header, body in re.findall(
        r"(.*?)<\|message\|>(.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|(?=<\|start\|>)|\Z)", text, re.DOTALL
    ):
        if recipient := re.search(r"functions\.([^\s<]+)", header):
            fields, _ = _read_object(body, _skip_space(body, 0))
            calls.append(_call(recipient[1], fields, body))
        elif "<|channel|>analysis" in header:
            reasoning.append(body)
        else:
            content.append(body)
    return ParsedAnswer("".join(content), calls, "\n".join(reasoning))


_PARSERS: dict[str, Callable[[str, Tools], tuple[str, list[ToolCall]]]] = {
    "hermes": _parse_hermes,
    "llama3": _parse_llama3,
    "deepseek": _parse_deepseek,
}


def _xml_call(text: str, at: int, tools: Tools) -> tuple[ToolCall, int]:
    """Reads a call of Qwen 3.5 and Qwen3-Coder, and returns it and where it ends."""
    call = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL).match(text, at)
    if call is None:
        raise ValueError(f"the text ends within a tool call: {text[at:][-_QUOTED:]!r}")
    name, body = call.groups()
    parameters = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", body, re.DOTALL)
    types = _parameter_types(tools, name)
    return ToolCall(name, {key: _typed(value, types.get(key, set())) for key, value in parameters}), call.end()


def _parameter_types(tools: Tools, name: str) -> dict[str, set[str]]:
    """Returns the types of a tool's parameters by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: _types(schema) for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _types(schema: Mapping[str, Any]) -> set[str]:
    """Returns the types that a JSON schema allows; empty if it does not say."""
    stated, options = schema.get("type"), (schema.get("anyOf"), schema.get("oneOf"))
    names = {stated} if isinstance(stated, str) else {each for each in _listed(stated) if isinstance(each, str)}
    inner = [_types(option) for each in options for option in _listed(each) if isinstance(option, Mapping)]
    return names.union(*inner) or {_TYPES[type(each)] for each in _listed(schema.get("enum")) if type(each) in _TYPES}


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _typed(value: str, kinds: set[str]) -> Any:
    """Returns a parameter that is written as text as a value of one of its types; without a type, JSON is read as
    such.
    """
    if kinds == {"string"}:
        return value
    constants = {"True": True, "False": False, "None": None}  # as templates write Python's
    try:
        read = constants[value] if value in constants else _DECODER.decode(value)
    except (ValueError, RecursionError):
        return value
    other = kinds - {"string"}
    fits = _TYPES[type(read)] in other or (isinstance(read, int) and "number" in other)
    return read if fits or "string" not in kinds else value


def _call(name: Any, arguments: Any, text: str) -> ToolCall:
    arguments = _json(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError(
            f"a tool call must have a name and a JSON object of arguments, got {name!r:.{_QUOTED}} and "
            f"{arguments!r:.{_QUOTED}} in {text[:_QUOTED]!r}"
        )
    return ToolCall(name.strip(), arguments)


def _read_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Reads the JSON object at a place of the text, and returns it and where it ends."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"a tool call must be JSON ({error}), got {text[at : at + _QUOTED]!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"a tool call must be a JSON object, got {text[at : at + _QUOTED]!r}")
    return value, end


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"arguments of a tool call must be JSON ({error}), got {text[:_QUOTED]!r}") from None


def _refuse(constant: str) -> Any:
    raise ValueError(f"JSON has no {constant}")


_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)  # Python's own would read NaN and Infinity


def _skip_space(text: str, at: int) -> int:
    """Returns the place of the first character from `at` that is not white space."""
    return at + len(text[at:]) - len(text[at:].lstrip())
