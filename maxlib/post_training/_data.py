"""Batches for post-training: pairs and labelled answers from chats, and rows from sampled completions."""

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from maxlib.data._chats import map_named, with_targets
from maxlib.data._padding import Row, padded
from maxlib.data._padding import pad as pad
from maxlib.data._sources import Document
from maxlib.tokenization import ChatTemplate

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
    return _mapped(documents, lambda document, _: _pair(document, tokenizer, template))


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
        tokenize = lambda messages: _answered(document, messages, tokenizer, template)
        return tokenize(document["messages"]) | {"good": np.bool_(document["good"]), "mismatched": tokenize(other)}

    return _mapped(documents, one)


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
        row = padded({"tokens": tokens, "targets": targets}, length)
        if sampler_log_probs is not None:
            row["sampler"] = np.zeros(length, np.float32)
            row["sampler"][len(prompt) - 1 : len(tokens) - 1] = sampler_log_probs[i]
        rows.append(row | {"advantages": np.where(row["targets"] >= 0, advantages[i], 0).astype(np.float32)})
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def _mapped(documents: Documents, function: Callable[[Document, int], Row]) -> grain.MapDataset[Any]:
    """Applies `function` to documents and their numbers."""
    documents = documents if isinstance(documents, grain.MapDataset) else grain.MapDataset.source(documents)
    return map_named(documents, function, "document")


def _answered(document: Document, messages: Sequence[Any], tokenizer: Any, template: ChatTemplate) -> Row:
    """Returns tokens and targets of a chat, of which the last answer is learned, with the document's tools."""
    return with_targets({**document, "messages": messages}, tokenizer, template, "last")


def _pair(document: Document, tokenizer: Any, template: ChatTemplate) -> dict[str, Row]:
    if not {"chosen", "rejected"} <= document.keys():
        raise ValueError(f"a pair needs the messages 'chosen' and 'rejected', got {sorted(document)}")
    chosen, rejected = ([*document.get("prompt", []), *document[half]] for half in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError("chosen and rejected must answer the same prompt; what stands before their last turns differs")
    halves = {"chosen": chosen, "rejected": rejected}
    out = {half: _answered(document, messages, tokenizer, template) for half, messages in halves.items()}
    if np.array_equal(out["chosen"]["tokens"], out["rejected"]["tokens"]):
        raise ValueError("chosen and rejected are equal, so neither is preferred: remove the pair")
    return out
