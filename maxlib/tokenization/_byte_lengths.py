"""The number of bytes of text that each token stands for, by which models with different tokenizers are compared."""

import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Int32

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")  # a token for one byte, in SentencePiece's vocabularies
_SPACE = "\u2581"  # and its mark of a space


def byte_lengths(tokenizer: Any) -> Int32[np.ndarray, " V"]:
    """Returns the number of bytes (UTF-8) of text that each token stands for; 0 for special tokens.

    The tokens of a text have as many bytes as the text, so Σ nll / (ln 2 Σ bytes) is its number of bits per byte. A
    tokenizer that puts a space before each text adds the space's byte.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face one that is based on it: byte-level BPE, or SentencePiece
            with its mark of spaces.

    Raises:
        ValueError: for another kind, such as WordPiece, whose tokens do not contain the text's spaces.
    """
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    state = json.loads(tokenizer.to_str())
    decoders = list(_decoders(state["decoder"]))
    kinds = {decoder["type"] for decoder in decoders}
    is_byte_level = "ByteLevel" in kinds
    marks_spaces = "Metaspace" in kinds or any(d.get("pattern") == {"String": _SPACE} for d in decoders)
    if not is_byte_level and not marks_spaces:
        raise ValueError(
            f"byte_lengths needs a byte-level tokenizer, or one of SentencePiece, which decode without loss; this one "
            f"decodes with {sorted(kinds)}"
        )
    lengths = np.zeros(max(tokenizer.get_vocab().values(), default=-1) + 1, np.int32)
    for token, i in tokenizer.get_vocab().items():
        if is_byte_level:  # each character of its alphabet stands for one byte
            lengths[i] = len(token)
        else:
            lengths[i] = 1 if _BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
    for token in state["added_tokens"]:
        lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return lengths


def _decoders(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yields the parts of a decoder."""
    if decoder is None:
        return
    yield decoder
    for inner in decoder.get("decoders", ()):
        yield from _decoders(inner)
