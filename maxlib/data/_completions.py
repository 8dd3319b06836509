"""Rows of prompts and completions, with targets on the completions."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any

import jax
import numpy as np

from maxlib import nn
from maxlib.data._documents import Row, token_ids
from maxlib.data._padding import pad_document

Texts = Sequence[Sequence[int]]


def completion_rows(
    prompts: Texts,
    completions: Texts,
    *,
    length: int,
    log_probs: Sequence[Sequence[float]] | None = None,
    stop_token_ids: Collection[int] = (),
    images: Sequence[Any] | None = None,
    blank: nn.vision.Patches | None = None,
) -> list[Row]:
    """Makes a row of each prompt and its completion, with targets on the completion.

    Args:
        prompts: Token ids, a prompt for each completion.
        completions: Token ids, with the token that ended the completion.
        length: Number of tokens in a row.
        log_probs: Log-probabilities that a sampler reported for the tokens of each completion.
        stop_token_ids: Ids that end a completion; a warning lists those that are shorter than the longest one and do
            not end with one of them.
        images: For each prompt its `nn.vision.Patches`, or None.
        blank: With `images`, an empty row with the capacity for images that every row has.

    Raises:
        ValueError: when a row is longer than `length` or has more images than `blank`, or numbers disagree.
    """
    scores = [None] * len(completions) if log_probs is None else log_probs
    sizes = list(map(len, completions))
    if log_probs is not None and (numbers := list(map(np.size, log_probs))) != sizes:
        raise ValueError(f"sampler_log_probs must be one for each token of each completion, {sizes}, got {numbers}")
    seen = _images_of_rows(images, blank, len(prompts))
    _check_ends(completions, stop_token_ids)
    rows = enumerate(zip(prompts, completions, scores, seen, strict=True))
    return [_row(i, *columns, length=length, blank=blank) for i, columns in rows]


def _check_ends(completions: Texts, stop_token_ids: Collection[int]) -> None:
    """Warns about completions that are shorter than the longest one but do not end with a stop id."""
    longest = max(map(len, completions), default=0)
    without = sum(len(ids) < longest and not (len(ids) and ids[-1] in stop_token_ids) for ids in completions)
    if stop_token_ids and without:
        warnings.warn(
            f"{without} of {len(completions)} completions are shorter than the longest one and do not end with one of "
            f"{sorted(stop_token_ids)}: the policy does not learn to stop. Keep the token that ended a completion",
            stacklevel=4,
        )


def _row(
    i: int, prompt: Sequence[int], completion: Sequence[int], scores: Any, seen: Row, *, length: int, blank: Any
) -> Row:
    """Returns prompt `i` and its completion as a row; only the completion has targets and scores."""
    if not len(prompt):
        raise ValueError(f"prompt {i} must have a token, which predicts the first of its completion: begin it with one")
    tokens = np.concatenate([token_ids(prompt, f"prompt {i}"), token_ids(completion, f"completion {i}")])
    targets = np.append(np.where(np.arange(1, len(tokens)) >= len(prompt), tokens[1:], -1), -1).astype(np.int32)
    row = pad_document({"tokens": tokens, "targets": targets} | seen, length=length, images=blank)
    if scores is not None:
        row["sampler_log_probs"] = np.zeros(length, np.float32)
        row["sampler_log_probs"][len(prompt) - 1 : len(tokens) - 1] = scores
    return row


def _images_of_rows(images: Any, blank: nn.vision.Patches | None, count: int) -> list[Row]:
    """Returns the images of each row as a part of its document; raises ValueError for images that cannot be rows."""
    if images is None:
        return [{}] * count
    if blank is None or len(images) != count:
        raise ValueError(
            f"images must be those of the prompt of each of the {count} completions, together with blank=, such as "
            f"ImageProcessor.blank(patches), got {len(images)} of them and blank={type(blank).__name__}"
        )
    if wrong := [x for x in images if not isinstance(x, nn.vision.Patches | None)]:
        raise ValueError(
            "the images of a prompt must be nn.vision.Patches, as an ImageProcessor makes them, got "
            f"{type(wrong[0]).__name__}: pixels of one size have no rows, so a batch of them cannot be split"
        )

    def row(patches: nn.vision.Patches) -> nn.vision.Patches:
        return jax.tree.map(lambda x: np.asarray(x[0] if x.ndim == 3 else x), patches)

    return [{} if patches is None else {"images": row(patches)} for patches in images]
