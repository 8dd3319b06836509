"""Fill-in-the-middle: documents whose middle is moved to the end, so that a model learns to complete gaps."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import grain
import numpy as np

from maxlib.data._documents import Document, text_of
from maxlib.data._tokenize import Encodes, backend, check_not_truncated, end_ids, with_tokens

# Names of the tokens before the prefix, the suffix and the middle: StarCoder, Qwen-Coder, DeepSeek-Coder, Code Llama.
FIM_TOKENS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
_SIGN = "\u263a"  # a character that is in no word


def fill_in_the_middle(
    documents: grain.MapDataset[Document],
    tokenizer: Encodes,
    *,
    rate: float = 0.5,
    spm_rate: float = 0.5,
    tokens: Sequence[str] | None = None,
    bos_id: int | None = None,
    eos_id: int | None = None,
    seed: int = 0,
) -> grain.MapDataset[Document]:
    """Adds `"tokens"` to every document with `"text"`, as `tokenize` does, with the middle of some moved to the end.

    A share `rate` of documents is cut at two characters, chosen uniformly, into prefix, middle and suffix (Bavarian et
    al., arXiv:2207.14255). Most tokenizers were taught one of two orders: PSM, `<pre> prefix <suf> suffix <mid>
    middle`, or, for a share `spm_rate` of the cut documents, SPM, `<pre> <suf> suffix <mid> prefix middle`, in which
    prefix and middle are tokenized together. Every token is learned.

    The cuts follow from `seed` and the document's index, so they are the same after a resume. To cut anew in every
    epoch, call this after `repeat`.

        tokens = fill_in_the_middle(text_files("corpus").shuffle(seed=0).repeat(), tokenizer, eos_id=0)

    Args:
        documents: Documents with `"text"`.
        tokenizer: A tokenizer with tokens for the prefix, the suffix and the middle.
        rate: Share of documents that are rearranged.
        spm_rate: Share of those in the order SPM.
        tokens: Names of the tokens before the prefix, the suffix and the middle; by default the ones of `FIM_TOKENS`
            that the tokenizer has.
        bos_id: Token before each document, or None.
        eos_id: Token after each document, or None.
        seed: Seed of the choices.

    Raises:
        ValueError: when the tokenizer lacks one of the tokens, truncates or pads, or a rate is not between 0 and 1.
    """
    for name, value in (("rate", rate), ("spm_rate", spm_rate)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} must be between 0 and 1, got {value}.")
    check_not_truncated(backend(tokenizer))
    ends, marks = end_ids(bos_id, eos_id), _marks(tokenizer, tokens)
    prepends = backend(tokenizer).encode(_SIGN, add_special_tokens=False).tokens[0].startswith("\u2581")
    rearranged = partial(
        _rearranged,
        tokenizer=tokenizer,
        rate=rate,
        spm_rate=spm_rate,
        marks=marks,
        prepends=prepends,
        ends=ends,
        seed=seed,
    )
    return documents.map_with_index(rearranged)


def _marks(tokenizer: Any, tokens: Sequence[str] | None) -> tuple[int, int, int]:
    """Returns the ids before the prefix, the suffix and the middle."""
    vocabulary = backend(tokenizer)
    candidates = FIM_TOKENS if tokens is None else (tuple(tokens),)
    for names in candidates:
        ids = [vocabulary.token_to_id(name) for name in names]
        if len(ids) == 3 and None not in ids:
            return ids[0], ids[1], ids[2]
    listed = " or ".join(", ".join(names) for names in candidates)
    raise ValueError(
        f"fill_in_the_middle needs a tokenizer with three tokens for the prefix, the suffix and the middle, {listed}: add "
        "them to the tokenizer, or name its own with tokens="
    )


def _rearranged(
    index: int,
    document: Document,
    *,
    tokenizer: Encodes,
    rate: float,
    spm_rate: float,
    marks: tuple[int, int, int],
    prepends: bool,
    ends: tuple[list[int], list[int]],
    seed: int,
) -> Document:
    text, random = text_of(document), np.random.default_rng((seed, index))

    def ids(piece: str) -> list[int]:
        encoded = tokenizer.encode(piece, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))

    def inside(piece: str) -> list[int]:
        """Encodes a piece within a text, without the space that SentencePiece writes before a text."""
        sign, signed = ids(_SIGN), ids(_SIGN + piece)
        return signed[len(sign) :] if prepends and signed[: len(sign)] == sign else ids(piece)

    before_prefix, before_suffix, before_middle = marks
    if random.random() >= rate:
        made = ids(text)
    else:
        first, second = sorted(random.integers(0, len(text) + 1, 2).tolist())
        prefix, middle, suffix = text[:first], text[first:second], text[second:]
        if random.random() < spm_rate:
            made = [before_prefix, before_suffix, *inside(suffix), before_middle, *ids(prefix + middle)]
        else:
            made = [before_prefix, *ids(prefix), before_suffix, *inside(suffix), before_middle, *inside(middle)]
    if not made:
        raise ValueError(f"The tokenizer made no tokens from the document {text[:80]!r}: remove it.")
    begin, end = ends
    return with_tokens(document, {"tokens": np.array([*begin, *made, *end], np.int32)})
