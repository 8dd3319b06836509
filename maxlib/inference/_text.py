"""Generation of text with a tokenizer."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jaxtyping import Array, Key

from maxlib.inference._generate import Audio, Generator, Images
from maxlib.inference._sampling import GREEDY, Sampler


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
    done, shown, text = list(ids), len(tokenizer.decode(ids)), ""
    for (token,) in steps:
        assert token is not None  # a stream of one prompt ends with it
        if token in stop_token_ids:
            break
        done.append(token)
        text = tokenizer.decode(done)
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # the token ends within a character: wait for the rest
            yield text[shown:]
            shown = len(text)
    if text[shown:]:
        yield text[shown:]


def encode(tokenizer: Any, text: str) -> list[int]:
    """Returns the token ids of a text.

    Args:
        tokenizer: A `tokenizers.Tokenizer` or a Hugging Face one.
        text: The text.
    """
    encoded = tokenizer.encode(text)
    return list(getattr(encoded, "ids", encoded))
