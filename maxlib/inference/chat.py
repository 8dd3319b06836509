"""Chats as prompts: the template that a model's directory brings."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]


class ChatTemplate:
    """Renders messages as transformers' `apply_chat_template` does, in jinja's sandbox.

    source: the template. special_tokens: what it may name, such as `{"bos_token": "<s>"}`.
    """

    def __init__(self, source: str, *, special_tokens: Mapping[str, str] | None = None):
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        env.filters["tojson"] = _to_json
        env.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: datetime.now().strftime(form)}
        self._template = env.from_string(source)
        self._special_tokens = dict(special_tokens or {})

    @classmethod
    def from_directory(cls, directory: str | os.PathLike) -> "ChatTemplate":
        """The template of a Hugging Face directory. Raises FileNotFoundError if it has none."""
        directory = Path(directory)
        path, config = directory / "chat_template.jinja", directory / "tokenizer_config.json"
        fields = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        source = path.read_text(encoding="utf-8") if path.exists() else _default(fields.get("chat_template"))
        if source is None:
            raise FileNotFoundError(
                f"{directory} has no chat template, in chat_template.jinja or tokenizer_config.json"
            )
        tokens = {name: _text(value) for name, value in fields.items() if name.endswith("_token") and value}
        return cls(source, special_tokens={name: token for name, token in tokens.items() if token is not None})

    def __call__(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt of `messages`, each with `role` and `content`; variables: what this template takes besides (`tools`).

        The text holds the special tokens already: encode it without adding any. Raises ValueError where the template does.
        """
        names = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        return self._template.render(**self._special_tokens, **names, **{"tools": None, "documents": None} | variables)


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its content stands for itself."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _default(stored: Any) -> str | None:
    """Older directories store several templates under names."""
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}.get("default")
    return stored


def _text(token: Any) -> str | None:
    """Older directories store a token as an object; options that only end in "_token" are none."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Unlike jinja's own it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise ValueError(f"the chat template refuses these messages: {message}")
