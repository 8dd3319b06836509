"""Tokenization of text."""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from maxlib.data._sources import Document
from maxlib.data._token_ids import token_ids

_OF_LATER_STAGES = ("targets", "images", "audio", "source")


@runtime_checkable
class Encodes(Protocol):
    """Protocol of tokenizers: `tokenizers.Tokenizer`, or any Hugging Face tokenizer."""

    def encode(self, text: Any, /, *, add_special_tokens: bool) -> Any: ...


def tokenize(
    documents: grain.MapDataset[Document], tokenizer: Encodes, *, bos_id: int | None = None, eos_id: int | None = None
) -> grain.MapDataset[Document]:
    """Adds `"tokens"`, int32, to every document with `"text"`.

    The tokenizer's own template of special tokens is not applied; only the given ids are added. Fields of a record that
    have the names of what later stages add, `targets`, `images`, `audio` and `source`, are left out.

    Args:
      documents: documents with `"text"`.
      tokenizer: the tokenizer.
      bos_id: token before each document, or None.
      eos_id: token after each document, or None.

    Raises:
      ValueError: when the tokenizer truncates or pads, or `bos_id` or `eos_id` is no token id.
    """
    if isinstance(tokenizer, str):
        raise TypeError(
            f"tokenizer must be one, such as Tokenizer.from_file('tokenizer.json'), got the name {tokenizer!r}."
        )
    check_whole(tokenizer)
    begin, end = end_ids(bos_id, eos_id)
    return documents.map(partial(_tokenized, tokenizer=tokenizer, begin=begin, end=end))


def check_whole(tokenizer: Any) -> None:
    """Raises ValueError for a tokenizer that would truncate documents, or pad them with tokens that are learned as
    text.
    """
    for name in ("truncation", "padding"):
        if (setting := getattr(tokenizer, name, None)) is not None:
            raise ValueError(
                f"the tokenizer's {name} is on, {setting}: call tokenizer.no_{name}() first, or read it with "
                "tokenization.load_tokenizer"
            )


def end_ids(bos_id: int | None, eos_id: int | None) -> tuple[list[int], list[int]]:
    """Returns the ids before and after each document. Raises ValueError for one that is no token id."""
    for name, token in (("bos_id", bos_id), ("eos_id", eos_id)):
        token_ids([] if token is None else [token], name)
    return [] if bos_id is None else [bos_id], [] if eos_id is None else [eos_id]


def with_tokens(document: Document, made: Document) -> Document:
    """Returns a document with what was made of it by its tokenizer, without the fields that later stages add."""
    return {name: value for name, value in document.items() if name not in _OF_LATER_STAGES} | made


def _tokenized(document: Document, *, tokenizer: Encodes, begin: list[int], end: list[int]) -> Document:
    encoded = tokenizer.encode(document["text"], add_special_tokens=False)
    ids = list(getattr(encoded, "ids", encoded))
    if not ids:
        raise ValueError(f"The tokenizer made no tokens from the document {document['text'][:80]!r}: remove it.")
    return with_tokens(document, {"tokens": np.array([*begin, *ids, *end], np.int32)})
