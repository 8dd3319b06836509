"""Chat templates: render chats as text with a model's template, for prompts and for training."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols

from maxlib.tokenization._sandbox import Sandbox

Message = Mapping[str, Any]
Span = tuple[int, int]

_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters, which do not occur in text


class ChatTemplate:
    """Renders messages as transformers' `apply_chat_template` does, in jinja's sandbox.

    source: the template. special_tokens: what it may name, such as `{"bos_token": "<s>"}`. seconds: the time that
    rendering may take. A template that takes longer, or makes more than 16 million characters, is a ValueError.

    Attributes: `source`; `marks_generation`, whether the template says what the model writes, with `{% generation %}`.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None, seconds: float = 5.0):
        self._sandbox = env = Sandbox(seconds=seconds, extensions=[_Generation, loopcontrols])
        env.filters["tojson"] = _to_json
        env.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        try:
            self._template = env.from_string(source)
        except (
            TemplateError,
            RecursionError,
            SyntaxError,
            AssertionError,
        ) as error:  # the last two come from compilation
            raise ValueError(f"the chat template is not one of Jinja ({error})") from error
        self.source = source
        self.marks_generation = re.search(r"{%[-+]?\s*generation\b", source) is not None
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, directory: str | os.PathLike, *, default: str | None = None) -> "ChatTemplate":
        """Reads the template of a Hugging Face directory.

        Args:
          directory: a directory with a tokenizer, whose special tokens the template may use.
          default: source of the template of a directory without one, such as that of a base model.

        Raises:
          FileNotFoundError: It has none, and there is no default.
          ValueError: The files are damaged, or the template is none.
        """
        directory = Path(directory)
        path, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
        try:
            fields = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
            source = path.read_text(encoding="utf-8") if path.exists() else _default(fields.get("chat_template"))
            tokens = {name: _text(value) for name, value in fields.items() if name.endswith("_token") and value}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{config} and {path.name} must hold a template and tokens, got {error!r}") from error
        source = default if source is None else source
        if source is None:
            raise FileNotFoundError(
                f"{directory} has no chat template, in chat_template.jinja or tokenizer_config.json: write one there, or "
                "pass one as default="
            )
        if not isinstance(source, str):
            raise ValueError(f"{config}: chat_template must be text, got a {type(source).__name__}")
        return cls(source, special_tokens={name: token for name, token in tokens.items() if token is not None})

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """Renders the prompt of `messages`, each with `role` and `content`; variables: what this template takes besides
        (`tools`).

        The text holds the special tokens already: encode it without adding any. Raises ValueError where the template
        does.
        """
        names = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        more = {"tools": None, "documents": None} | variables
        return self._sandbox.write(self._template, self._special_tokens | names | more)

    def generated(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[Span]]:
        """Renders whole chats, and finds the characters (begin, end) of each `{% generation %}` in them."""
        text = self(messages, add_generation_prompt=False, **variables)
        marks = {"generation_begins": _BEGIN, "generation_ends": _END}
        pieces = re.split(f"([{_BEGIN}{_END}])", self(messages, add_generation_prompt=False, **variables, **marks))
        if "".join(pieces[::2]) != text or pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
            raise ValueError(f"messages must not contain the characters {_BEGIN!r} and {_END!r}, nor may blocks nest")
        ends = [0, *accumulate(map(len, pieces[::2]))]
        return text, [(ends[i], ends[i + 1]) for i in range(1, len(ends) - 1, 2)]


class _Generation(Extension):
    """The tag `{% generation %}`, which marks the model's text for training; in prompts it only renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [_mark("generation_begins"), *body, _mark("generation_ends")]


def _mark(name: str) -> nodes.Node:
    """Writes the variable of that name, if it exists."""
    return nodes.Output([nodes.Name(name, "load")])


def _default(stored: Any) -> str | None:
    """Chooses the default template: older directories store several under names."""
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def _text(token: Any) -> str | None:
    """Reads a token: older directories store it as an object, and options that only end in "_token" are none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Writes JSON. Unlike jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"the chat template refuses these messages: {message}")
