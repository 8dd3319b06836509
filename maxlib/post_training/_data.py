"""Batches for post-training: pairs and labelled answers from chats, and rows from sampled completions."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import grain
import numpy as np

from maxlib.data._chats import _with_targets
from maxlib.data._sources import Document
from maxlib.tokenization import ChatTemplate

Row = dict[str, Any]
Long = Literal["error", "truncate", "drop"]
Documents = Any  # a grain.MapDataset, or anything with a length and items by number


def pairs(documents: Documents, tokenizer: Any, template: ChatTemplate) -> grain.MapDataset[dict[str, Row]]:
    """Tokenizes pairs of chats: documents with the lists of messages `chosen` and `rejected`, and maybe `prompt`.

    Both chats end with the answer that is compared; what stands before has to be the same. Targets are -1 outside of
    that answer. `pad` makes rows of them.

    Args:
        documents: Records with the fields of TRL's preference data sets: a dataset of grain's, a list, or one of
            Hugging Face's.
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face tokenizer that has one.
        template: The chat template.

    Returns:
        Documents `{"chosen": {"tokens", "targets"}, "rejected": ...}`.

    Raises:
        ValueError: when a document is read whose answers are equal, or whose prompts differ; `data.SkipBadRecords` sets
            such documents aside.
    """
    return _dataset(documents).map_with_index(_named(partial(_pair, tokenizer=tokenizer, template=template)))


def labelled(documents: Documents, tokenizer: Any, template: ChatTemplate) -> grain.MapDataset[Row]:
    """Tokenizes chats that are `good` or bad, for KTO, with the answer of the next document to the same prompt.

    Args:
        documents: Records with `messages` and `good`, a boolean; as for `pairs`.
        tokenizer: As for `pairs`.
        template: The chat template.

    Returns:
        Documents `{"tokens", "targets", "good", "mismatched": {"tokens", "targets"}}`.
    """

    def one(document: Document, index: int) -> Row:
        following = documents[(index + 1) % len(documents)]
        other = [*document["messages"][:-1], following["messages"][-1]]
        tokenize = lambda messages: _tokenized(messages, tokenizer, template)
        return tokenize(document["messages"]) | {"good": np.bool_(document["good"]), "mismatched": tokenize(other)}

    return _dataset(documents).map_with_index(_named(one))


def pad(documents: grain.MapDataset[Any], *, length: int, long: Long = "error") -> grain.MapDataset[Any]:
    """Pads documents with `tokens` and `targets`, also nested ones, to rows `tokens targets segment_ids` of one length.

    Args:
        documents: Such as `pairs`.
        length: Tokens of a row.
        long: What happens to documents with more: "error", "truncate" (their beginning stays) or "drop".
    """
    if long not in ("error", "truncate", "drop"):
        raise ValueError(f"long must be 'error', 'truncate' or 'drop', got {long!r}")
    if long == "drop":
        documents = documents.filter(lambda document: _longest(document) <= length)
    return documents.map(lambda document: _padded(document, length, long))


def completion_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    advantages: Any,
    *,
    length: int,
    sampler_log_probs: Sequence[Sequence[float]] | None = None,
) -> Row:
    """Makes a batch for `policy_loss`: one prompt and one completion in each row.

    A completion includes its end-of-turn token where it has one (those of `inference.Engine` do), so that ending is
    learned too.

    Args:
        prompts: Token ids, a prompt for each completion.
        completions: Token ids.
        advantages: One per completion, in any shape, such as `N G`.
        length: Tokens of a row.
        sampler_log_probs: What the sampler reported for each token of the completions; "sampler" in the batch.

    Raises:
        ValueError: when a row is longer than `length`, or numbers disagree.
    """
    advantages = np.asarray(advantages, np.float32).reshape(-1)
    if not len(prompts) == len(completions) == len(advantages):
        raise ValueError(
            "there must be a prompt and an advantage for each completion, got "
            f"{len(prompts)} prompts, {len(completions)} completions, {len(advantages)} advantages"
        )
    rows = []
    for i, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        tokens = np.array([*prompt, *completion], np.int32)
        targets = np.append(np.where(np.arange(1, len(tokens)) >= len(prompt), tokens[1:], -1), -1).astype(np.int32)
        row = _padded({"tokens": tokens, "targets": targets}, length, "error")
        if sampler_log_probs is not None:
            row["sampler"] = np.zeros(length, np.float32)
            row["sampler"][len(prompt) - 1 : len(tokens) - 1] = sampler_log_probs[i]
        rows.append(row | {"advantages": np.where(row["targets"] >= 0, advantages[i], 0).astype(np.float32)})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _dataset(documents: Documents) -> grain.MapDataset[Document]:
    return documents if isinstance(documents, grain.MapDataset) else grain.MapDataset.source(documents)


def _named(function: Callable[[Document, int], Row]) -> Callable[[int, Document], Row]:
    """Makes errors say which record they are about."""

    def run(index: int, document: Document) -> Row:
        try:
            return function(document, index)
        except Exception as error:  # jinja raises many kinds
            record = document.get("record", f"document {index}")
            raise ValueError(f"{record}: {type(error).__name__}: {error}") from error

    return run


def _pair(document: Document, index: int, *, tokenizer: Any, template: ChatTemplate) -> dict[str, Row]:
    if not {"chosen", "rejected"} <= document.keys():
        raise ValueError(f"a pair needs the messages 'chosen' and 'rejected', got {sorted(document)}")
    chosen, rejected = ([*document.get("prompt", []), *document[half]] for half in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected must answer the same prompt; what stands before their last turns differs")
    out = {half: _tokenized(x, tokenizer, template) for half, x in (("chosen", chosen), ("rejected", rejected))}
    if np.array_equal(out["chosen"]["tokens"], out["rejected"]["tokens"]):
        raise ValueError("chosen and rejected are equal, so neither is preferred: remove the pair")
    return out


def _tokenized(messages: Sequence[Any], tokenizer: Any, template: ChatTemplate) -> Row:
    """Returns tokens and targets of a chat, of which the last answer is learned."""
    tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
    return _with_targets({"messages": messages}, tokenizer, template, "last")


def _longest(document: Row) -> int:
    nested = [_longest(value) for value in document.values() if isinstance(value, dict)]
    return max([*nested, len(document.get("tokens", ()))])


def _padded(document: Row, length: int, long: Long) -> Row:
    out = {name: _padded(x, length, long) if isinstance(x, dict) else x for name, x in document.items()}
    if "tokens" not in document:
        return out
    size = len(document["tokens"])
    if size > length and long == "error":
        raise ValueError(f"a document of {size} tokens does not fit a row of {length}: give long='truncate' or 'drop'")
    fill = lambda x, value: np.append(x[:length], np.full(max(length - size, 0), value)).astype(np.int32)
    rows = {"tokens": fill(document["tokens"], 0), "targets": fill(document["targets"], -1)}
    return out | rows | {"segment_ids": (np.arange(length) < size).astype(np.int32)}
