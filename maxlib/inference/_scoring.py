"""Scores of given continuations, for evaluation.

Shapes: B rows, T tokens of the longest row with padding.
"""

import functools
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn
from maxlib.inference._arguments import check_prompts, integer
from maxlib.inference._generate import Generator, right_padded, shared_capacity

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, and of its continuation
Score = tuple[float, bool]


def score(
    generator: Generator, pairs: Sequence[Pair], *, batch_size: int, max_length: int
) -> Iterator[tuple[int, Score]]:
    """Yields the index of each pair, the log-probability of its continuation, and whether greedy decoding gives it.

    Pairs are sorted from the longest to the shortest, so that batches have little padding. A context that is too long
    is truncated at its beginning.

    Args:
        generator: The model.
        pairs: Contexts and continuations, none of them empty.
        batch_size: Number of rows in a batch.
        max_length: Maximum number of tokens that the model reads at once.

    Raises:
        ValueError: when a context or a continuation is empty, a continuation is longer than `max_length`, an id is
            outside the vocabulary, or a size is not a positive integer.
    """
    batch_size, max_length = integer("batch_size", batch_size), integer("max_length", max_length)
    _check(pairs, max_length)
    rows = [[*context, *continuation] for context, continuation in pairs]
    rows = check_prompts(rows, generator.vocab) if rows else []
    for numbers in _batches([len(row) for row in rows], batch_size):
        # The last token is only predicted. Fill an incomplete batch with its first row, to share the program.
        full = numbers + [numbers[0]] * (batch_size - len(numbers))
        ends = [rows[n][-(max_length + 1) :] for n in full]
        log_prob, correct = _scored(generator, ends, [len(pairs[n][1]) for n in full], max_length)
        for n, p, c in zip(numbers, log_prob, correct, strict=False):
            yield n, (float(p), bool(c))


def _check(pairs: Sequence[Pair], max_length: int) -> None:
    """Raises ValueError for a pair that cannot be scored."""
    for n, (context, continuation) in enumerate(pairs):
        if not len(context) or not 0 < len(continuation) <= max_length:
            raise ValueError(
                f"request {n} must have a context of at least one token and a continuation of 1 to {max_length} (max_length), got "
                f"{len(context)} and {len(continuation)}"
            )


def _batches(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Yields the indices of rows, the longest first, `size` at a time."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _scored(
    generator: Generator, rows: Sequence[Sequence[int]], counts: Sequence[int], max_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores the last `counts` tokens of each row."""
    length = min(shared_capacity(max(map(len, rows)) - 1), max_length)
    tokens, valid = (_of_width(x, length + 1) for x in right_padded(rows))
    last = valid.sum(axis=1)[:, None] - 1  # [B, 1]: of each row's tokens, the last one, which is only predicted
    place = np.arange(length)[None]
    # Position t predicts token t + 1; those of the context and of padding are not scored.
    learned = (place >= last - np.asarray(counts)[:, None]) & (place < last)
    targets = np.where(learned, tokens[:, 1:], -1).astype(np.int32)
    read = valid[:, :-1] & (place < last)
    log_prob, correct = _score(generator.model, tokens[:, :-1], read, targets, dtype=generator.dtype)
    return np.asarray(log_prob), np.asarray(correct)


def _of_width(x: np.ndarray, width: int) -> np.ndarray:
    """Returns rows truncated, or padded with zeros on the right."""
    return np.pad(x, ((0, 0), (0, max(0, width - x.shape[1]))))[:, :width]


@functools.partial(jax.jit, static_argnames="dtype")
def _score(
    model, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"], targets: Int[Array, "B T"], *, dtype
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Sums the log-probabilities of each row's targets, and returns whether all of them are the best tokens."""
    out = model(tokens, valid=valid, dtype=dtype)
    scores = nn.token_log_probs(out.hidden, model.head_weight(), targets, softcap=model.softcap)
    return scores.log_prob.sum(axis=1), (scores.correct | (targets < 0)).all(axis=1)
