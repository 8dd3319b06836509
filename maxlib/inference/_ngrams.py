"""Drafts from n-grams: what followed the last tokens when the text had them before (prompt lookup)."""

from collections.abc import Sequence

_SIZES = (4, 3, 2)  # of the n-grams, the longest first


class NGrams:
    """The n-grams of a row, each with the place after its last occurrence.

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
