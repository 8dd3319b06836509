"""Functions for evaluation: scores of given continuations, and generation up to given texts.

Shapes: B rows, T tokens of the longest row with padding.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from maxlib import nn
from maxlib.inference._arguments import Prompts, check_prompts, integer
from maxlib.inference._generate import Generator, right_padded, shared_capacity
from maxlib.inference._sampling import GREEDY, Sampler
from maxlib.inference._text import StopTexts

Pair = tuple[Sequence[int], Sequence[int]]  # ids of a context, and of its continuation
Score = tuple[float, bool]
Decode = Callable[..., str]


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


def continue_until(
    generator: Generator,
    prompts: Prompts,
    *,
    decode: Decode,
    until: Sequence[str],
    stop_token_ids: Sequence[int],
    max_new_tokens: int,
    sampler: Sampler = GREEDY,
    key: Key[Array, ""] | None = None,
) -> list[str]:
    """Returns the text that follows each prompt, before the first of `until` or `stop_token_ids`.

    Decoding stops when every row has one of them.

    Args:
        generator: The model.
        prompts: Token ids of each prompt.
        decode: Converts ids to text, with `special=True` including special tokens, of which answers have none.
        until: Texts that end a row and are not part of it; also those of special tokens.
        stop_token_ids: Ids that end a row.
        max_new_tokens: Maximum number of new tokens per prompt.
        sampler: Draws tokens.
        key: Random key for sampling.
    """
    stop = StopTexts(functools.partial(decode, special=True), until)
    rows: list[list[int]] = [[] for _ in prompts]
    running = set(range(len(rows)))
    options = {"sampler": sampler, "stop_token_ids": stop_token_ids, "key": key}
    for tokens in generator.stream(prompts, max_new_tokens=max_new_tokens, **options):
        for n in tuple(running):
            token = tokens[n]
            assert token is not None  # ended rows do not run
            if token in stop_token_ids:
                running.discard(n)
                continue
            rows[n].append(token)
            if stop.end(rows[n]):
                running.discard(n)
        if not running:
            break
    return [_before(decode(row), stop.texts) for row in rows]


def _before(text: str, until: Iterable[str]) -> str:
    """Cuts a text at each of `until` in order, as lm-eval does: of overlapping texts the first one counts."""
    for end in until:
        text = text.split(end)[0]
    return text


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
