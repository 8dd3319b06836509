"""Sampled completions as rows of a batch."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np

from maxlib.data._padding import Row, padded
from maxlib.inference._engine import Completion
from maxlib.inference._sampling import Sampler


def completion_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int] | Completion],
    advantages: Any,
    *,
    length: int,
    sampler: Sampler | None = None,
    sampler_log_probs: Sequence[Sequence[float]] | None = None,
    stop_token_ids: Collection[int] = (),
) -> Row:
    """Makes a batch for `policy_loss`: one prompt and one completion in each row.

    A completion includes the token that ended it, as returned by `Generator` and engines, so that the model learns to
    stop.

    Args:
        prompts: Token ids, a prompt for each completion.
        completions: Token ids, or completions of an `inference.Engine`, with its sampler and its log-probabilities.
        advantages: One per completion, in any shape, such as `N G`.
        length: Number of tokens in a row.
        sampler: The sampler of the token ids, stored as `sampler` in the batch; the loss compares its temperature with
            its own.
        sampler_log_probs: Log-probabilities that the sampler reported for each token of the completions.
        stop_token_ids: Ids that end a completion, to check token ids of other samplers: a warning lists completions
            that are shorter than the longest one and do not end with one of them.

    Raises:
        ValueError: when a row is longer than `length`, numbers disagree, or samplers differ.
    """
    drawn = [one for one in completions if isinstance(one, Completion)]
    samplers = ({one.sampler for one in drawn} | {sampler}) - {None}
    if len(samplers) > 1 or len(drawn) not in (0, len(completions)):
        raise ValueError(f"all completions of a batch must come from one engine and one sampler, got {samplers}")
    if drawn:
        completions, sampler_log_probs = [one.tokens for one in drawn], [one.log_probs for one in drawn]
    advantages = np.asarray(advantages, np.float32).reshape(-1)
    if not len(prompts) == len(completions) == len(advantages):
        raise ValueError(
            "there must be a prompt and an advantage for each completion, got "
            f"{len(prompts)} prompts, {len(completions)} completions, {len(advantages)} advantages"
        )
    _check_scores(completions, sampler_log_probs)
    _check_ends(completions, stop_token_ids)
    rows = []
    texts = cast(Sequence[Sequence[int]], completions)
    for i, (prompt, completion) in enumerate(zip(prompts, texts, strict=True)):
        tokens = np.array([*prompt, *completion], np.int32)
        targets = np.append(np.where(np.arange(1, len(tokens)) >= len(prompt), tokens[1:], -1), -1).astype(np.int32)
        row = padded({"tokens": tokens, "targets": targets}, length)
        if sampler_log_probs is not None:
            row["sampler_log_probs"] = np.zeros(length, np.float32)
            row["sampler_log_probs"][len(prompt) - 1 : len(tokens) - 1] = sampler_log_probs[i]
        rows.append(row | {"advantages": np.where(row["targets"] >= 0, advantages[i], 0).astype(np.float32)})
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return batch if (one := next(iter(samplers), None)) is None else batch | {"sampler": one}


def _check_scores(completions: Any, scores: Any) -> None:
    """Raises ValueError unless there is a log-probability for each token of each completion."""
    if scores is None:
        return
    of_scores, of_tokens = list(map(np.size, scores)), list(map(len, completions))
    if of_scores != of_tokens:
        raise ValueError(
            f"sampler_log_probs must have one number for each token of each completion, {of_tokens}, got {of_scores}"
        )


def _check_ends(completions: Any, stop_token_ids: Collection[int]) -> None:
    """Warns about completions that are shorter than the longest one but do not end with a stop id."""
    longest = max(map(len, completions), default=0)
    short = [one for one in completions if len(one) < longest]
    without = sum(not len(one) or one[-1] not in stop_token_ids for one in short)
    if stop_token_ids and without:
        warnings.warn(
            f"{without} of {len(completions)} completions are shorter than the longest one and do not end with one of "
            f"{sorted(stop_token_ids)}: the policy does not learn to stop. Keep the token that ended a completion",
            stacklevel=3,
        )
