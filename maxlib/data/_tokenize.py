"""Tokenization of text."""

from functools import partial
from typing import Any, Protocol, runtime_checkable

import grain
import numpy as np

from maxlib.data._sources import Document


@runtime_checkable
class Encodes(Protocol):
    """Protocol of tokenizers: `tokenizers.Tokenizer`, or any Hugging Face tokenizer."""

    def encode(self, text: Any, /, *, add_special_tokens: bool) -> Any: ...


def tokenize(
    documents: grain.MapDataset[Document], tokenizer: Encodes, *, bos_id: int | None = None, eos_id: int | None = None
) -> grain.MapDataset[Document]:
    """Adds `"tokens"`, int32, to every document with `"text"`.

    The tokenizer's own template of special tokens is not applied; only the given ids are added.

    Args:
      documents: documents with `"text"`.
      tokenizer: the tokenizer.
      bos_id: token before each document, or None.
      eos_id: token after each document, or None.

    Raises:
      ValueError: when the tokenizer truncates or pads.
    """
    if isinstance(tokenizer, str):
        raise TypeError(
            f"tokenizer must be one, such as Tokenizer.from_file('tokenizer.json'), got the name {tokenizer!r}."
        )
    check_whole(tokenizer)
    return documents.map(partial(_with_tokens, tokenizer=tokenizer, bos_id=bos_id, eos_id=eos_id))


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


def _with_tokens(document: Document, *, tokenizer: Encodes, bos_id: int | None, eos_id: int | None) -> Document:
    encoded = tokenizer.encode(document["text"], add_special_tokens=False)
    ids = list(getattr(encoded, "ids", encoded))
    if not ids:
        raise ValueError(f"The tokenizer made no tokens from the document {document['text'][:80]!r}: remove it.")
    ends = ([] if bos_id is None else [bos_id], [] if eos_id is None else [eos_id])
    return {**document, "tokens": np.array(ends[0] + ids + ends[1], np.int32)}
