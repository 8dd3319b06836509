"""Drafts of a row's next tokens, which a step verifies at once: who makes them, and whether a model allows them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from maxlib import nn

if TYPE_CHECKING:
    from maxlib.inference._requests import Request

_SIZES = (4, 3, 2)  # of the n-grams, the longest first


class NGrams:
    """The n-grams of a row, each with the place after its last occurrence (prompt lookup).

    Args:
        prompt: Ids of the prompt.
    """

    def __init__(self, prompt: Sequence[int]):
        self._text, self._num_prompt = list(prompt), len(prompt)
        self._place: dict[tuple[int, ...], int] = {}
        self._index(0)

    def _index(self, start: int) -> None:
        """Adds the n-grams that have a token after them from `start` on."""
        for end in range(max(start, 1), len(self._text)):
            for size in _SIZES:
                if end >= size:
                    self._place[tuple(self._text[end - size : end])] = end

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Returns up to `count` guesses of the tokens after the row's text.

        Args:
            tokens: All new tokens of the row.
            count: Maximum number of guesses.
        """
        start = len(self._text)
        self._text.extend(tokens[start - self._num_prompt :])
        self._index(start)
        for size in _SIZES:
            place = self._place.get(tuple(self._text[-size:]))
            if place is not None and count > 0:
                return self._text[place : place + count]
        return []


def draft_tokens(
    rows: Sequence["Request | None"], count: int, *, by_model: bool
) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns drafts of each row, `S N`, and how many there are.

    N is 0 if no row has drafts; None stands for the drafts of a model, which the devices have.
    """
    drafts, counts = np.zeros((len(rows), count), np.int32), np.zeros(len(rows), np.int32)
    for n, row in enumerate(rows if count else ()):
        # What processors and penalties do to later tokens depends on the drafts.
        if row is None or row._options.processors or row._options.sampler.penalizes:
            continue
        counts[n] = min(count, row._limit - len(row.tokens))
        if not by_model:
            row._ngrams = row._ngrams or NGrams(row.prompt)
            guesses = row._ngrams.drafts(row.tokens, int(counts[n]))
            drafts[n, : len(guesses)], counts[n] = guesses, len(guesses)
    return (None if by_model else drafts if counts.any() else drafts[:, :0]), counts


def check_drafter(model: Any, drafter: Any, num_drafts: int) -> None:
    """Raises ValueError if there is no such source of drafts for the model."""
    if drafter == "ngram":
        return
    if isinstance(drafter, str):
        if drafter != "mtp" or num_drafts != 1:
            raise ValueError(
                f'drafter must be "ngram", "mtp" with num_drafts=1, or a model, got {drafter!r} with {num_drafts}'
            )
        if not isinstance(model, nn.mtp.SupportsDrafting):
            raise ValueError(
                f"{type(model).__name__} does not draft: it lacks the methods of nn.mtp.SupportsDrafting; pass "
                "drafter=, a model that drafts for it"
            )
        return
    if not isinstance(drafter, nn.mtp.Drafter):
        raise ValueError(
            f"drafter must have the methods of nn.mtp.Drafter, as a gemma4_assistant does, got {type(drafter).__name__}"
        )
    drafter.check_target(model)


def check_rewinds(model: Any, caches: Sequence[nn.cache.Cache], *, needs_length: bool) -> None:
    """Raises ValueError if a rejected draft cannot be removed from the caches."""
    name, layers = type(model).__name__, [cache.layers for cache in caches]
    if needs_length:
        raise ValueError(f"{name} rotates by the length of the text so far, which a rejected draft makes wrong")
    if not all(map(nn.cache.can_rewind, layers)):
        kinds = {type(cache).__name__ for cache in nn.cache.layer_caches(layers)}
        raise ValueError(
            f"{name} has layers that only keep a state ({', '.join(sorted(kinds))}), from which a rejected draft "
            "cannot be removed: generate without drafts"
        )
