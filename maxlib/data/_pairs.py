"""Preference data: pairs of answers, and answers that are good or bad."""

import math
import numbers
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from maxlib.data._audio import AudioProcessor
from maxlib.data._documents import Document, Row, is_hf_dataset, is_messages, map_named, without_nulls
from maxlib.data._images import ImageProcessor
from maxlib.data._tokenize import warn_of_endless_turns, with_targets
from maxlib.tokenization import ChatTemplate

LOOK_AHEAD = 100
Documents = Any  # a grain.MapDataset, or anything with a length and items by number


def pairs(
    documents: Documents,
    tokenizer: Any,
    template: ChatTemplate,
    *,
    images: ImageProcessor | None = None,
    audio: AudioProcessor | None = None,
) -> grain.MapDataset[dict[str, Row]]:
    """Tokenizes pairs of chats: documents with the lists of messages `chosen` and `rejected`, and maybe `prompt`.

    Both chats end with the compared answer; everything before it must be the same. Targets are -1 outside of that
    answer. A number `margin` of a document is kept (`post_training.BradleyTerry`). `pad` turns them into rows.

    Args:
        documents: Records with the fields of TRL's preference data sets: a dataset of grain's, a list, or one of
            Hugging Face's.
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face tokenizer that has one.
        template: The chat template.
        images: The image processor of a vision model; each half then has `"images"`, as in `tokenize_chats`. Give `pad`
            a row that has room for them.
        audio: The audio processor of a model that hears, likewise.

    Returns:
        Documents `{"chosen": {"tokens", "targets"}, "rejected": ...}`.

    Raises:
        ValueError: when reading a document whose answers are equal, whose prompts differ, or that has images without a
            processor; `data.SkipBadRecords` skips such documents.
    """
    warn_of_endless_turns(template)
    return map_named(
        _dataset(documents), lambda document, _: _pair(document, tokenizer, template, images, audio), "document"
    )


def kto_examples(
    documents: Documents,
    tokenizer: Any,
    template: ChatTemplate,
    *,
    images: ImageProcessor | None = None,
    audio: AudioProcessor | None = None,
) -> grain.MapDataset[Row]:
    """Tokenizes chats that are `desirable` or not, for KTO, each paired with an answer to another prompt.

    That is the answer of the next document with a different prompt, so the pairs depend on the order of documents. From
    these mismatched answers KTO estimates the KL divergence of the policy (arXiv:2402.01306).

    Args:
        documents: Records with `messages` and `desirable`, a boolean; as for `pairs`.
        tokenizer: As for `pairs`.
        template: The chat template.
        images: As for `pairs`.
        audio: As for `pairs`.

    Returns:
        Documents `{"tokens", "targets", "desirable", "mismatched": {"tokens", "targets"}}`.

    Raises:
        ValueError: when reading a document whose next 100 documents have the same prompt: shuffle the documents.
    """
    warn_of_endless_turns(template)
    dataset = _dataset(documents)

    def example(document: Document, index: int) -> Row:
        messages = document["messages"]
        mismatched = [*messages[:-1], _answer_to_another(dataset, index, messages[:-1])]
        row = _answered(document, messages, tokenizer, template, images, audio)
        row["desirable"] = _truth(document["desirable"])
        row["mismatched"] = _answered(document, mismatched, tokenizer, template, images, audio)
        return row

    return map_named(dataset, example, "document")


def _answer_to_another(documents: grain.MapDataset, index: int, prompt: Sequence[Any]) -> Any:
    """Returns the last message of the next document after `index` whose prompt differs."""
    for ahead in range(1, min(len(documents), LOOK_AHEAD + 1)):
        other = documents[(index + ahead) % len(documents)]
        if other is not None and other["messages"][:-1] != prompt:  # None is filtered out
            return other["messages"][-1]
    raise ValueError(
        f"kto_examples needs an answer to another prompt, but the next {min(len(documents) - 1, LOOK_AHEAD)} documents have "
        "the same one: shuffle the documents"
    )


def _truth(desirable: Any) -> np.bool_:
    """Returns a label; raises ValueError for one whose truth is not meant, such as "false"."""
    if not isinstance(desirable, int | np.integer | np.bool_) or desirable not in (0, 1):
        raise ValueError(f"'desirable' must be True or False, got {desirable!r}")
    return np.bool_(desirable)


def _dataset(documents: Documents) -> grain.MapDataset[Document]:
    """Returns documents of any kind as a dataset."""
    if isinstance(documents, grain.MapDataset):
        return documents
    dataset = grain.MapDataset.source(documents)
    return dataset.map(without_nulls) if is_hf_dataset(documents) else dataset


def _answered(
    document: Document,
    messages: Sequence[Any],
    tokenizer: Any,
    template: ChatTemplate,
    images: ImageProcessor | None,
    audio: AudioProcessor | None,
) -> Row:
    """Returns tokens, targets, images and sound of a chat; only its last answer has targets."""
    if not is_messages(messages) or messages[-1]["role"] != "assistant":
        roles = [message.get("role") for message in messages] if is_messages(messages) else messages
        raise ValueError(f"the compared answer must be the last message, of the role 'assistant', got {roles!r:.200}")
    return with_targets({**document, "messages": messages}, tokenizer, template, "last", images=images, audio=audio)


def _pair(
    document: Document,
    tokenizer: Any,
    template: ChatTemplate,
    images: ImageProcessor | None,
    audio: AudioProcessor | None,
) -> Row:
    if not {"chosen", "rejected"} <= document.keys():
        raise ValueError(f"a pair needs the messages 'chosen' and 'rejected', got {sorted(document)}")
    chosen, rejected = ([*(document.get("prompt") or []), *document[half]] for half in ("chosen", "rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise ValueError(
            "chosen and rejected must answer the same prompt, but the messages before their last turns differ"
        )
    pair = {
        "chosen": _answered(document, chosen, tokenizer, template, images, audio),
        "rejected": _answered(document, rejected, tokenizer, template, images, audio),
    }
    if np.array_equal(pair["chosen"]["tokens"], pair["rejected"]["tokens"]):
        raise ValueError("chosen and rejected are equal, so neither is preferred: remove the pair")
    return pair | ({} if document.get("margin") is None else {"margin": _margin(document["margin"])})


def _margin(margin: Any) -> np.float32:
    """Returns by how much the chosen answer is better; raises ValueError for what is no finite number."""
    if not isinstance(margin, numbers.Real) or not math.isfinite(margin):
        raise ValueError(f"'margin' must be a finite number, got {margin!r}")
    return np.float32(margin)
