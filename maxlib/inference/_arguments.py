"""Checks of the arguments that generators and engines share. Each returns plain Python values."""

import math
import operator
from collections.abc import Collection, Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np

Ids = Sequence[SupportsIndex] | np.ndarray | jax.Array
Prompts = Sequence[Ids] | np.ndarray | jax.Array
StopIds = Collection[SupportsIndex] | jax.Array
_ARRAYS = np.ndarray | jax.Array
_BOOLS = {bool, np.bool_}
_INT32 = 1 << 31


def integer(name: str, value: Any, *, least: int | None = 1) -> int:
    """Returns an integer of Python, numpy or JAX as Python's.

    Args:
        name: Name of the argument, for the error.
        value: The argument.
        least: Smallest value; None for no limit.

    Raises:
        ValueError: when it is no integer or too small. A bool and a float such as 2.0 are no integers.
    """
    number = _index(value)
    if number is None or (least is not None and number < least):
        limit = "" if least is None else f" of at least {least}"
        raise ValueError(f"{name} must be an integer{limit}, got {value!r}")
    return number


def number(name: str, value: Any) -> float:
    """Returns a finite number of Python, numpy or JAX as a float; raises ValueError for anything else."""
    try:
        real = math.nan if isinstance(value, str | bool | np.bool_) or np.ndim(value) else float(value)
    except (TypeError, ValueError, OverflowError):
        real = math.nan
    if not math.isfinite(real):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return real


def check_prompts(prompts: Prompts, vocab: int | None = None) -> list[list[int]]:
    """Returns prompts as lists of ids.

    Args:
        prompts: A list of prompts, each a list or an array of ids, or a 2D array.
        vocab: Number of ids in the vocabulary; None if it is not known.

    Raises:
        ValueError: when there is no prompt, a prompt is empty, or its ids are not integers in the vocabulary.
    """
    if not (prompts.ndim == 2 if isinstance(prompts, _ARRAYS) else isinstance(prompts, Sequence)):
        raise ValueError(f"prompts must be a list of prompts or an array of shape [B, T], got {_described(prompts)}")
    if not len(prompts):
        raise ValueError("there must be at least one prompt, got none")
    return [_check_prompt(row, prompt, vocab) for row, prompt in enumerate(prompts)]


def check_limits(max_new_tokens: SupportsIndex | Ids, count: int) -> list[int]:
    """Returns the maximum number of new tokens of each of `count` prompts.

    Raises:
        ValueError: when they are not integers of at least 1, one for all or one per prompt.
    """
    several = isinstance(max_new_tokens, Sequence) or (isinstance(max_new_tokens, _ARRAYS) and max_new_tokens.ndim)
    values: Any = max_new_tokens if several and not isinstance(max_new_tokens, str) else [max_new_tokens] * count
    limits = [integer("max_new_tokens", limit) for limit in values]
    if len(limits) != count:
        raise ValueError(
            f"max_new_tokens must be one for all or one per prompt, got {len(limits)} of them for {count} prompts"
        )
    return limits


def check_stop(stop_token_ids: StopIds, vocab: int | None = None) -> frozenset[int]:
    """Returns the ids as a set; raises ValueError for texts, None, and ids outside a vocabulary of `vocab` tokens."""
    listed = isinstance(stop_token_ids, Collection | jax.Array)
    wrong = [x for x in stop_token_ids if not is_id(_index(x), vocab)] if listed else [stop_token_ids]
    if wrong:
        below = "" if vocab is None else f" below the vocabulary of {vocab}"
        raise ValueError(
            f"stop_token_ids must be a list of ids, integers from 0{below}, got {wrong[0]!r}: for a text use "
            "tokenizer.token_to_id(text), for a model's end-of-text ids inference.stop_tokens(directory)"
        )
    return frozenset(map(int, stop_token_ids))


def is_id(value: Any, vocab: int | None = None) -> bool:
    """Returns whether a value is an id of a vocabulary, as Python's integer."""
    return type(value) is int and 0 <= value < (_INT32 if vocab is None else vocab)


def _index(value: Any) -> int | None:
    """Returns an integer as Python's, or None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _check_prompt(row: int, prompt: Any, vocab: int | None) -> list[int]:
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths
        ids = np.asarray(None)
    integers = np.issubdtype(ids.dtype, np.integer) and not (
        isinstance(prompt, Sequence) and _BOOLS & {*map(type, prompt)}
    )
    if ids.ndim != 1 or not ids.size or not integers:
        raise ValueError(
            f"prompt {row} must consist of integer ids, got {_described(prompt)}: encode text first, with "
            "tokenizer.encode(text).ids, put the ids of one prompt in a list, and begin an empty one with the "
            "tokenizer's BOS id"
        )
    limit = _INT32 if vocab is None else vocab
    if ids.min() < 0 or ids.max() >= limit:
        raise ValueError(
            f"prompt {row} holds the id {ids.min() if ids.min() < 0 else ids.max()}, the model's vocabulary is "
            f"[0, {limit}); is this the tokenizer the model was trained with?"
        )
    return ids.tolist()


def _described(value: Any) -> str:
    if isinstance(value, _ARRAYS):
        return f"an array of shape {list(value.shape)} and dtype {value.dtype}"
    return "text" if isinstance(value, str) else f"{value!r:.60}"
