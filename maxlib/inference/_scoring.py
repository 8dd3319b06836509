"""Scores of given continuations, for evaluation.

Shapes: B rows, T tokens of the longest row with padding.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn
from maxlib._utils.text import check_texts
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


Metrics = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Cloze:
    """A task whose answer is one of several continuations of a text.

    Args:
        context: The text, for example a question.
        choices: Continuations, which usually begin with a space.
        answer: Index of the right one.

    Raises:
        ValueError: when `choices` is a single text, or has no `answer`.
    """

    context: str
    choices: Sequence[str]
    answer: int = 0

    def __post_init__(self):
        check_texts("choices", self.choices)
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(f"answer must be the index of one of {len(self.choices)} choices, got {self.answer}")


def rolling_windows(tokens: Sequence[int], *, prefix: int, max_length: int) -> Iterator[Pair]:
    """Yields pairs of context and continuation whose continuations are all tokens of a document, each once.

    A window has up to `max_length` tokens; its context is the token before it, and in the last window all that fits.
    These are the windows of lm-evaluation-harness.

    Args:
        tokens: The document's ids.
        prefix: Id before the document.
        max_length: Maximum number of tokens that the model reads at once.
    """
    row = [prefix, *tokens]  # token i of the document is row[i + 1]
    for begin in range(0, len(tokens), max_length):
        end = min(begin + max_length, len(tokens))
        start = 0 if begin == 0 else end - max_length  # the model reads row[start:end]
        yield row[start : begin + 1], row[begin + 1 : end + 1]


def score_documents(
    generator: Generator,
    documents: Sequence[Sequence[int]],
    *,
    prefix: int,
    batch_size: int = 8,
    max_length: int = 2048,
) -> list[float]:
    """Returns the log-probability of each document, computed in `rolling_windows`.

    Args:
        generator: The model.
        documents: Ids of each document.
        prefix: Id before a document, usually that which begins or ends texts.
        batch_size: Number of windows computed at once; the result does not depend on it.
        max_length: Maximum number of tokens that the model reads at once.
    """
    windows = [
        (n, window)
        for n, document in enumerate(documents)
        for window in rolling_windows(document, prefix=prefix, max_length=max_length)
    ]
    totals = [0.0] * len(documents)
    scores = score(generator, [pair for _, pair in windows], batch_size=batch_size, max_length=max_length)
    for i, (log_prob, _) in sorted(scores):
        totals[windows[i][0]] += log_prob
    return totals


def evaluation_callback(model: Any, evaluate: Callable[[Any], Metrics]) -> Callable[[Any], None]:
    """Returns a callback of a `Trainer` that writes the metrics of its newest weights as `eval/...`.

    Args:
        model: Made from the trained model, with a method `update`.
        evaluate: Function from `model` to the metrics.
    """

    def run(trainer: Any) -> None:
        with trainer.sharded():
            model.update(trainer.state.trainable)
            metrics = evaluate(model)
        trainer.writers.write(trainer.step, {f"eval/{name}": value for name, value in metrics.items()})

    return run


@dataclasses.dataclass(frozen=True)
class BitsPerByte:
    """Evaluation of a model on texts, in bits per byte: -log2 p(text) / bytes(text).

        evaluation = inference.BitsPerByte(tokenizer, prefix=1, documents={"wiki": ["one two three"]})
        callback = evaluation.callback(inference.Generator(model))  # evaluation(generator) computes them at once
        trainer = training.Trainer(model, optimizer, loader, callbacks=[(1000, callback)])

    Metrics are `NAME/bits_per_byte` of each set of documents (all their bits over all their bytes, as
    lm-evaluation-harness computes `bits_per_byte`) and of each set of tasks (the mean over the tasks' right
    continuations), `NAME/accuracy` of tasks (how often the right continuation has the fewest bits per byte),
    `micro_bits_per_byte` of all documents together, and `macro_bits_per_byte`, the mean over the sets of documents.

    Args:
        tokenizer: A `tokenizers.Tokenizer`, or a Hugging Face one.
        prefix: Id before a text, usually that which begins or ends texts.
        documents: Texts by the name of their set.
        tasks: Cloze tasks by the name of their set.
        batch_size: Number of rows computed at once; the result does not depend on it.
        max_length: Maximum number of tokens that the model reads at once.

    Raises:
        ValueError: when a set of documents is a single text.
    """

    tokenizer: Any
    prefix: int
    documents: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    tasks: Mapping[str, Sequence[Cloze]] = dataclasses.field(default_factory=dict)
    batch_size: int = 8
    max_length: int = 2048

    def __post_init__(self):
        for name, texts in self.documents.items():
            check_texts(f"documents[{name!r}]", texts)

    def __call__(self, generator: Generator) -> Metrics:
        """Computes the metrics."""
        return self._document_metrics(generator) | self._task_metrics(generator)

    def callback(self, generator: Generator) -> Callable[[Any], None]:
        """Returns a callback for `Trainer(callbacks=[(1000, callback)])`, which writes the metrics as `eval/...`.

        Args:
            generator: Made from the trained model; it gets the newest weights.
        """
        return evaluation_callback(generator, self)

    def _document_metrics(self, generator: Generator) -> Metrics:
        if not self.documents:
            return {}
        options = {"prefix": self.prefix, "batch_size": self.batch_size, "max_length": self.max_length}
        bits, sizes = {}, {}
        for name, texts in self.documents.items():
            log_probs = score_documents(generator, [self._ids(text) for text in texts], **options)
            bits[name], sizes[name] = -sum(log_probs) / math.log(2), sum(len(text.encode()) for text in texts)
        means = {name: bits[name] / sizes[name] for name in bits}
        metrics = {f"{name}/bits_per_byte": mean for name, mean in means.items()}
        metrics["micro_bits_per_byte"] = sum(bits.values()) / sum(sizes.values())
        metrics["macro_bits_per_byte"] = sum(means.values()) / len(means)
        return metrics

    def _task_metrics(self, generator: Generator) -> Metrics:
        metrics = {}
        for name, tasks in self.tasks.items():
            pairs = [self._pair(task.context, choice) for task in tasks for choice in task.choices]
            scores = dict(score(generator, pairs, batch_size=self.batch_size, max_length=self.max_length))
            log_probs = iter(scores[i][0] for i in range(len(pairs)))
            right, correct = 0.0, 0
            for task in tasks:
                bits = [-next(log_probs) / math.log(2) / len(choice.encode()) for choice in task.choices]
                right, correct = right + bits[task.answer], correct + (min(bits) == bits[task.answer])
            metrics |= {f"{name}/bits_per_byte": right / len(tasks), f"{name}/accuracy": correct / len(tasks)}
        return metrics

    def _ids(self, text: str) -> list[int]:
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return list(getattr(encoded, "ids", encoded))

    def _pair(self, context: str, choice: str) -> Pair:
        """Returns ids of a context and its continuation, tokenized together; a context's last spaces move on."""
        stripped = context.rstrip()
        both, before = self._ids(context + choice), self._ids(stripped)
        return [self.prefix, *both[: len(before)]], both[len(before) :]
