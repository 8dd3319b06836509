"""Generation of text with a tokenizer."""

import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from jaxtyping import Array, Key

from maxlib.inference._generate import Audio, Generator, Images
from maxlib.inference._sampling import GREEDY, Sampler

_CUT = "\N{REPLACEMENT CHARACTER}"  # what decoders write for the bytes of a character without the rest


def stream_text(
    generator: Generator,
    tokenizer: Any,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 256,
    images: Images | None = None,
    audio: Audio | None = None,
    sampler: Sampler = GREEDY,
    stop_token_ids: Collection[int] = (),
    key: Key[Array, ""] | None = None,
) -> Iterator[str]:
    """Yields the continuation of `prompt` piece by piece, in whole characters.

    If token ids end within a character, the first piece begins with that character. A token costs the same after any
    prompt.

    Args:
        generator: The model, ready to decode.
        tokenizer: A `tokenizers.Tokenizer`, or any object with `encode(str)` and `decode(ids)`.
        prompt: Text, or its token ids. Pass ids for a chat, whose template already has the special tokens.
        max_new_tokens: Maximum number of new tokens.
        images: Images of the prompt, for models that read images.
        audio: Clips of the prompt, for models that hear.
        sampler: Draws tokens; greedy by default.
        stop_token_ids: Ids that end the text and are not part of it.
        key: Random key for sampling, by default as in `Generator.stream`.
    """
    ids = encode(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    options: Any = {"sampler": sampler, "stop_token_ids": stop_token_ids, "key": key}
    steps = generator.stream([ids], max_new_tokens=max_new_tokens, images=images, audio=audio, **options)
    pieces = _Pieces(tokenizer.decode, ids)
    for (token,) in steps:
        assert token is not None  # a stream of one prompt ends with it
        if token in stop_token_ids:
            break
        if piece := pieces.add(token):
            yield piece
    if rest := pieces.rest():
        yield rest


class _Pieces:
    """Decodes tokens to pieces of text.

    A decoder may omit the space of its first token, and join the bytes of several tokens. So the tokens that are not
    shown yet are decoded behind those of the last piece, and their text is what that adds.
    """

    def __init__(self, decode: Callable[..., str], prompt: Sequence[int], **options: Any):
        self._decode = functools.partial(decode, **options)
        size = 1
        while size < len(prompt) and not self._decode(prompt[-size:]).strip(_CUT):
            size *= 2
        self._tokens = list(prompt[-size:])
        self._num_shown = len(self._tokens)  # of these tokens
        while self._decode(self._tokens[: self._num_shown]).endswith(_CUT):
            self._num_shown -= 1
        self._shown = self._decode(self._tokens[: self._num_shown])

    def add(self, token: int) -> str:
        """Returns the text that a token completes, or nothing if it ends within a character."""
        self._tokens.append(token)
        text = self._decode(self._tokens)
        if text.endswith(_CUT):
            return ""
        piece = self._new(text)
        if piece:
            del self._tokens[: self._num_shown]
            self._num_shown, self._shown = len(self._tokens), self._decode(self._tokens)
        return piece

    def add_all(self, tokens: Sequence[int]) -> str:
        """Returns the text of the last tokens."""
        self._tokens += tokens
        return self.rest()

    def rest(self) -> str:
        """Returns the text of the tokens that are not shown yet."""
        return self._new(self._decode(self._tokens))

    def _new(self, text: str) -> str:
        """Returns what the text of all tokens adds to the text that is shown."""
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        return self._decode(self._tokens[self._num_shown :])  # the decoder writes what is shown in another way


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text.

    Args:
        tokenizer: A `tokenizers.Tokenizer` or a Hugging Face one.
        text: The text.
    """
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))


def text_lengths(tokenizer: Any, before: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """Returns the number of whole characters from the first token to each one, and to the end of the last."""
    pieces = _Pieces(tokenizer.decode, before)
    return [0, *itertools.accumulate(len(pieces.add(token)) for token in tokens)]


def token_text(tokenizer: Any, token: int) -> str:
    """Returns the text of a token behind another one, as decoders may leave out the space of a first token."""
    once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
    return twice.removeprefix(once)


def token_bytes(tokenizer: Any, token: int) -> bytes:
    """Returns the bytes of a token in UTF-8, also of one that is a part of a character."""
    text, name = token_text(tokenizer, token), tokenizer.id_to_token(token)
    if _CUT not in text:
        return text.encode()
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):  # of SentencePiece
        return bytes.fromhex(byte[1])
    letters = _byte_letters()
    return bytes(letters[letter] for letter in name) if letters.keys() >= {*name} else text.encode()


@functools.cache
def _byte_letters() -> dict[str, int]:
    """Returns the byte for which each letter stands in names of byte-level tokens: printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


class StopTexts:
    """Texts that end a completion.

    Args:
        tokenizer: Converts ids to text.
        texts: The texts, which may be those of special tokens; empty ones are ignored.
    """

    def __init__(self, tokenizer: Any, texts: Collection[str]):
        self._decode, self.texts = tokenizer.decode, [text for text in texts if text]
        added = getattr(tokenizer, "get_added_tokens_decoder", dict)().values()
        if any(token.special and token.content in text for token in added for text in self.texts):
            self._decode = functools.partial(tokenizer.decode, skip_special_tokens=False)
        # Tokens, except special ones, have at least one byte, so this many tokens contain any of these texts.
        self._tail = 8 + max((len(text.encode()) for text in self.texts), default=0)

    def end(self, prompt: Sequence[int], tokens: Sequence[int]) -> bool:
        """Returns whether the last tokens after a prompt have one of the texts."""
        # One more token before them, as decoders may leave out the space of a first token.
        recent = tokens[-self._tail - 1 :] if len(tokens) > self._tail else [*prompt[-1:], *tokens]
        text, before = self._decode(recent), self._decode(recent[:1])
        new = text[len(before) :] if text.startswith(before) else self._decode(recent[1:])
        return any(text in new for text in self.texts)


class TextWriter:
    """Decodes a completion piece by piece, without the token or the text that ends it.

    What may be the beginning of a stop text is held back until that is certain.

    Args:
        tokenizer: A `tokenizers.Tokenizer`.
        prompt: Ids of the prompt.
        stop: Texts that end the completion.
        ends: Ids that end it.
        show_special: True writes special tokens as well.
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        *,
        stop: Collection[str] = (),
        ends: Collection[int] = (),
        show_special: bool = False,
    ):
        self._pieces = _Pieces(tokenizer.decode, prompt, skip_special_tokens=not show_special)
        self._stop, self._ends = [text for text in stop if text], frozenset(ends)
        self._held, self._ended = "", False

    def add(self, token: int) -> str:
        """Returns the text that is certain after a token."""
        return "" if token in self._ends else self._certain(self._pieces.add(token), at_end=False)

    def add_all(self, tokens: Sequence[int]) -> str:
        """Returns the text of all tokens of the completion."""
        return self._certain(self._pieces.add_all([t for t in tokens if t not in self._ends]), at_end=True)

    def rest(self) -> str:
        """Returns the rest of the text."""
        return self._certain(self._pieces.rest(), at_end=True)

    def _certain(self, piece: str, *, at_end: bool) -> str:
        if self._ended:
            return ""
        text = self._held + piece
        places = [place for place in map(text.find, self._stop) if place >= 0]
        self._ended = bool(places)
        if places:
            end = min(places)
        else:
            end = len(text) if at_end else len(text) - max((overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[end:]
        return text[:end]


def overlap(text: str, marker: str) -> int:
    """Returns how many characters at the end of a text may be the beginning of a marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
