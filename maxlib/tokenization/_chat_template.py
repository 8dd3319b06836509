"""Chat templates: render chats as text with a model's template, for prompts and for training."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from maxlib._utils.files import read_json_object
from maxlib.tokenization._sandbox import SANDBOX
from maxlib.tokenization._special_tokens import special_tokens as read_special_tokens

Message = Mapping[str, Any]
Span = tuple[int, int]

_BEGIN, _END = "\ufdd0", "\ufdd1"  # Unicode noncharacters, which do not occur in text
_OTHERS = "additional_chat_templates"  # folder of the templates that are not the default
_CONTINUED = "CONTINUED_HERE "  # the space shows whether the template strips messages
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning, the standard one first
# Arguments of transformers' method that would otherwise be variables of the template, without effect.
_TOKENIZES = ("tokenize", "return_dict", "return_tensors", "return_assistant_tokens_mask", "truncation", "max_length")


class ChatTemplate:
    """Renders messages as transformers' `apply_chat_template` does, in a separate process, because it is untrusted.

    Args:
        source: The template, or several by name. With tools the one named `tool_use` is used if there is one, else
            `default`.
        special_tokens: Texts that it may name, such as `{"bos_token": "<s>"}`; None for one that does not exist.
        seconds: Maximum processor time of a rendering. The other limits are 16 million characters and 1 GiB of memory.

    Attributes: `source`, the default template; `tool_source`, the one for chats with tools; `marks_generation`, whether
    the default marks with `{% generation %}` what the model writes.

    Raises:
        ValueError: when it is not a template of Jinja.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        *,
        special_tokens: Mapping[str, str | None] | None = None,
        seconds: float = 5.0,
    ):
        self._sources = {"default": source} if isinstance(source, str) else dict(source)
        self._special_tokens, self._seconds = dict(special_tokens or {}), seconds
        self.source = self._sources.get("default", "")
        self.tool_source = self._sources.get("tool_use", self.source)
        self.marks_generation = re.search(r"{%[-+]?\s*generation\b", self.source) is not None
        for text in self._sources.values():
            self._render(text, None)

    @classmethod
    def from_directory(cls, directory: str | os.PathLike, *, default: str | None = None) -> "ChatTemplate":
        """Reads the templates of a Hugging Face directory.

        Args:
            directory: A directory with a tokenizer, whose special tokens the template may use.
            default: Source of the template of a directory without one, such as that of a base model.

        Raises:
            FileNotFoundError: It has none, and there is no default.
            ValueError: The files are damaged, or the template is none.
        """
        directory = Path(directory)
        sources = _sources(directory) or ({} if default is None else {"default": default})
        if not sources:
            raise FileNotFoundError(
                f"{directory} has no chat template, in chat_template.jinja or tokenizer_config.json: write one there, or "
                "pass one as default="
            )
        return cls(sources, special_tokens=read_special_tokens(directory))

    def __call__(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """Renders the prompt of `messages`. It has its special tokens already: encode it without adding any.

        Args:
            messages: Each with `role` and `content`.
            add_generation_prompt: True ends the prompt with the beginning of an answer.
            continue_final_message: True ends the prompt within the last message, for the model to continue; the name
                of a field, such as "reasoning_content", within that field.
            chat_template: Name of the template to use.
            variables: What this template takes besides, such as `tools`.

        Raises:
            ValueError: when the template refuses the messages, exceeds a limit, or names a special token that no file
                states.
        """
        if ignored := variables.keys() & set(_TOKENIZES):
            raise ValueError(
                f"a ChatTemplate returns text, so it takes no {', '.join(sorted(ignored))}; encode the text"
            )
        if continue_final_message:
            field = continue_final_message if isinstance(continue_final_message, str) else "content"
            add_generation_prompt, messages = False, _with_mark(messages, field)
        names = {
            "tools": None,
            "documents": None,
            **variables,
            "messages": [_normalized(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._render(self._choose(chat_template, names["tools"]), names)
        return _before_mark(text) if continue_final_message else text

    def generated(self, messages: Sequence[Message], **variables: Any) -> tuple[str, list[Span]]:
        """Renders whole chats, and finds the characters (begin, end) of each `{% generation %}` in them."""
        text = self(messages, add_generation_prompt=False, **variables)
        marks: Any = {"generation_begins": _BEGIN, "generation_ends": _END}
        pieces = re.split(f"([{_BEGIN}{_END}])", self(messages, add_generation_prompt=False, **variables, **marks))
        if "".join(pieces[::2]) != text or pieces[1::2] != [_BEGIN, _END] * (len(pieces) // 4):
            raise ValueError(f"messages must not contain the characters {_BEGIN!r} and {_END!r}, nor may blocks nest")
        ends = [0, *accumulate(map(len, pieces[::2]))]
        return text, [(ends[i], ends[i + 1]) for i in range(1, len(ends) - 1, 2)]

    def end_of_turn(self) -> str:
        """Returns what the template writes after an answer, such as `"<|im_end|>"`, or "" if it does not write answers.

        Raises:
            ValueError: when it cannot render a plain chat.
        """
        mark = _CONTINUED.strip()
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}]
        before, _, end = self(messages, add_generation_prompt=False).rpartition(mark)
        return end.strip() if before else ""

    def save(self, directory: str | os.PathLike) -> None:
        """Writes the templates where `from_directory` and transformers find them, in place of those that are there."""
        shutil.rmtree(Path(directory) / _OTHERS, ignore_errors=True)
        for name, source in self._sources.items():
            file = "chat_template.jinja" if name == "default" else f"{_OTHERS}/{name}.jinja"
            path = Path(directory) / file
            path.parent.mkdir(exist_ok=True)
            path.write_text(source, encoding="utf-8")

    def _choose(self, name: str | None, tools: Any) -> str:
        if name is None:
            name = "tool_use" if tools is not None and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ValueError(f"chat_template must be one of {', '.join(self._sources)}, got {name!r:.100}")
        return self._sources[name]

    def _render(self, source: str, variables: Mapping[str, Any] | None) -> str:
        return SANDBOX.render(source, self._special_tokens, variables, seconds=self._seconds)


def _sources(directory: Path) -> dict[str, str]:
    """Reads templates by name: those in files of their own replace the ones in tokenizer_config.json."""
    files = [("default", directory / "chat_template.jinja")]
    files += [(path.stem, path) for path in sorted(directory.glob(f"{_OTHERS}/*.jinja"))]
    try:
        sources = {name: path.read_text(encoding="utf-8") for name, path in files if path.exists()}
    except UnicodeDecodeError as error:
        raise ValueError(f"{directory}: chat_template.jinja must be text in UTF-8, got {error}") from error
    for name in ("tokenizer_config.json", "chat_template.json"):  # the second is of older processors
        path = directory / name
        if not sources and path.exists():
            sources = _named(path, read_json_object(path).get("chat_template"))
    return sources


def _named(path: Path, stored: Any) -> dict[str, str]:
    """Returns the templates of a file by name: one text, or a list of objects."""
    if stored is None:
        return {}
    entries = stored if isinstance(stored, list) else [{"name": "default", "template": stored}]
    for entry in entries:
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("name", "template")):
            raise ValueError(f"{path}: chat_template must be text, or a list of objects with name and template")
    return {entry["name"]: entry["template"] for entry in entries}


def _normalized(message: Message) -> dict[str, Any]:
    """Leaves out what is None, and copies the reasoning to the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in _REASONING if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


def _with_mark(messages: Sequence[Message], field: str) -> list[Message]:
    """Appends a mark to the text of a field of the last message."""
    if not messages:
        raise ValueError("continue_final_message needs a message, got none")
    *before, last = messages
    content: Any = last.get(field)
    if isinstance(content, str):
        return [*before, {**last, field: content + _CONTINUED}]
    at = max((i for i, block in enumerate(content or []) if "text" in block), default=None)
    if at is None:
        raise ValueError(f"continue_final_message needs text in {field!r} of the last message")
    marked = {**content[at], "text": content[at]["text"] + _CONTINUED}
    return [*before, {**last, field: [*content[:at], marked, *content[at + 1 :]]}]


def _before_mark(text: str) -> str:
    at = text.rfind(_CONTINUED.strip())
    if at < 0:
        raise ValueError("continue_final_message=True needs a template that writes the last message as it is")
    return text[:at] if text.startswith(_CONTINUED, at) else text[:at].rstrip()
