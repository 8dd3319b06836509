"""Chats with a model from a directory: its tokenizer, chat template and end-of-turn ids."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Key

from maxlib import quantization
from maxlib._utils.files import read_json_object
from maxlib.inference._generate import Generator
from maxlib.inference._sampling import GREEDY, Sampler
from maxlib.inference._text import encode, stream_text
from maxlib.tokenization import ChatTemplate, load_tokenizer, special_tokens
from maxlib.weights import from_pretrained, model_directory
from maxlib.weights.files import QUANTIZED


def stop_tokens(directory: str | Path) -> list[int]:
    """Returns the ids that end a text or a turn.

    They are `eos_token_id` of generation_config.json, or else of config.json, or else the tokenizer's `eos_token`.

    Args:
        directory: A Hugging Face directory.

    Raises:
        ValueError: when a file is damaged, or the ids are not integers.
    """
    for name in ("generation_config.json", "config.json"):
        path = Path(directory) / name
        end = _end_of_text(path) if path.exists() else None
        if end is not None:
            ids = end if isinstance(end, list) else [end]
            if not all(type(i) is int for i in ids):
                raise ValueError(f"{path}: eos_token_id must be an integer or a list of integers, got {end!r:.100}")
            return ids
    end = special_tokens(directory).get("eos_token")
    if end is None or not (Path(directory) / "tokenizer.json").exists():
        return []
    end_id = load_tokenizer(directory).token_to_id(end)
    return [] if end_id is None else [end_id]


def _end_of_text(path: Path) -> Any:
    """Reads `eos_token_id`, also from a nested text model."""
    fields = read_json_object(path)
    inner = fields.get("text_config") or {}
    if not isinstance(inner, dict):
        raise ValueError(f"{path}: text_config must be a JSON object, got {inner!r:.100}")
    stated = fields.get("eos_token_id")  # null counts as absent
    return inner.get("eos_token_id") if stated is None else stated


def read_model(directory: Path) -> Any:
    """Returns the model of a directory, whose weights may be quantized (`quantization.save`)."""
    quantized = (directory / QUANTIZED).exists()
    return quantization.load(directory) if quantized else from_pretrained(directory)


class Chat:
    """A conversation with a model. Answers end at the directory's end-of-turn ids.

    Args:
        generator: The model, ready to decode.
        tokenizer: Its tokenizer.
        template: Its chat template; None for a model that only continues texts.
        stop_token_ids: Ids that end an answer, see `stop_tokens`.
        sampler: Draws tokens; greedy by default.

    Attributes:
        messages: The conversation so far, with `role` and `content`. Clear it to start over; insert a system message at
            the front.
    """

    def __init__(
        self,
        generator: Generator,
        tokenizer: Any,
        template: ChatTemplate | None,
        *,
        stop_token_ids: list[int],
        sampler: Sampler = GREEDY,
    ):
        self.generator, self.tokenizer, self.template = generator, tokenizer, template
        self.stop_token_ids, self.sampler = stop_token_ids, sampler
        self.messages: list[dict[str, str]] = []

    @classmethod
    def from_pretrained(cls, name: str | Path, *, dtype: Any = jnp.bfloat16, sampler: Sampler = GREEDY) -> "Chat":
        """Loads a model with its tokenizer, chat template and end-of-turn ids.

        Args:
            name: A Hugging Face directory, or a name on the hub; also a directory that `quantization.save` wrote.
            dtype: Dtype of the computation.
            sampler: Draws tokens; greedy by default.
        """
        directory = model_directory(name)
        try:
            template = ChatTemplate.from_directory(directory)
        except FileNotFoundError:
            template = None
        generator = Generator(read_model(directory), dtype=dtype)
        ends = stop_tokens(directory)
        return cls(generator, load_tokenizer(directory), template, stop_token_ids=ends, sampler=sampler)

    def send(self, message: str, *, max_new_tokens: int = 512, key: Key[Array, ""] | None = None) -> str:
        """Returns the answer to a user message; both are appended to `messages`."""
        return "".join(self.stream(message, max_new_tokens=max_new_tokens, key=key))

    def stream(self, message: str, *, max_new_tokens: int = 512, key: Key[Array, ""] | None = None) -> Iterator[str]:
        """Yields the answer to a user message piece by piece.

        Args:
            message: The user's message.
            max_new_tokens: Maximum number of tokens in the answer, which also ends at the model's last position.
            key: Random key for sampling; None uses a new key for each call.

        Raises:
            ValueError: when the model has no chat template.
        """
        if self.template is None:
            raise ValueError(
                "this model has no chat template in its directory (chat_template.jinja): continue a text instead, with "
                "Chat.complete or `maxlib generate --raw`"
            )
        messages = [*self.messages, {"role": "user", "content": message}]
        # The template writes all special tokens.
        prompt = self.tokenizer.encode(self.template(messages), add_special_tokens=False).ids
        answer = ""
        for piece in self._pieces(prompt, max_new_tokens, key):
            answer += piece
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def complete(self, text: str, *, max_new_tokens: int = 512, key: Key[Array, ""] | None = None) -> Iterator[str]:
        """Yields the continuation of a text piece by piece, without the template."""
        yield from self._pieces(text, max_new_tokens, key)

    def _pieces(self, prompt: str | list[int], max_new_tokens: int, key: Any) -> Iterator[str]:
        prompt = encode(self.tokenizer, prompt) if isinstance(prompt, str) else prompt
        options = {"sampler": self.sampler, "stop_token_ids": self.stop_token_ids, "key": key}
        # An answer ends where the model's positions do. A prompt that fills them is an error of the generator.
        limit = getattr(self.generator.model, "max_length", None)
        if limit is not None and len(prompt) < limit:
            max_new_tokens = min(max_new_tokens, limit - len(prompt))
        return stream_text(self.generator, self.tokenizer, prompt, max_new_tokens=max_new_tokens, **options)
