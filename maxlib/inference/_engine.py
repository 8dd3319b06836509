"""Engines, which sample completions of prompts locally or on a server."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from jaxtyping import Array, Key

from maxlib.inference._sampling import GREEDY, Sampler

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion of a prompt as token ids, with the data for a policy loss.

    Attributes:
        tokens: Sampled ids, including the one that ended it.
        log_probs: Log-probability of each under the model at the sampler's temperature (1 for greedy), before its
            filters; these are the `old_log_probs` or `sampler_log_probs` of a policy loss.
        finish_reason: "stop" if the last token is one of `stop_token_ids`, "length" if it was truncated.
        sampler: The sampler, if the engine reports it: a policy loss compares its temperature with the sampler's.
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    sampler: Sampler | None = None


@runtime_checkable
class Engine(Protocol):
    """Protocol of engines, which sample completions and accept updated weights."""

    def update(self, weights: Any) -> None:
        """Replaces the weights."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        num_samples: int = 1,
        sampler: Sampler = GREEDY,
        stop_token_ids: Collection[int] = (),
        key: Key[Array, ""] | None = None,
    ) -> list[list[Completion]]:
        """Returns `num_samples` completions of each prompt; without `key`, every call uses a new key."""
        ...
