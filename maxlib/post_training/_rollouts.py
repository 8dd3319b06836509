"""Sampled completions as rows of a batch, and a loader of such batches."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import jax
import numpy as np

from maxlib import data, nn
from maxlib.inference import Completion, Sampler

Row = dict[str, Any]


class Rollouts:
    """A loader whose batches a function samples by number, such as completions by the newest weights.

    Its position is the number of the next batch, so a resumed run goes on with the same prompts and keys.

        def sample(number):
            engine.update(trainer.state.trainable)
            ...
            return post_training.completion_batch(...), post_training.reward_metrics(rewards)

        rollouts = post_training.Rollouts(sample)
        trainer = training.Trainer(model, optimizer=optimizer, loader=rollouts, loss=loss)

    Args:
        sample: Takes the number of a batch, from 0, and returns this host's rows and metrics, which are written with
            those of the step.
    """

    def __init__(self, sample: Callable[[int], tuple[Row, Mapping[str, Any]]]):
        self.sample, self._next, self._metrics = sample, 0, {}

    def __iter__(self) -> "Rollouts":
        return self

    def __next__(self) -> Row:
        batch, self._metrics = self.sample(self._next)
        self._next += 1
        return batch

    def metrics(self) -> dict[str, Any]:
        """Returns the metrics of the last batch."""
        return dict(self._metrics)

    def reset(self) -> None:
        """Returns to the first batch."""
        self._next = 0

    def get_state(self) -> dict[str, Any]:
        """Returns the position."""
        return {"0": {"next": self._next}}

    def set_state(self, state: Any) -> None:
        """Continues from a position."""
        self._next = state["0"]["next"]


def completion_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int] | Completion],
    advantages: Any,
    *,
    length: int,
    sampler: Sampler | None = None,
    sampler_log_probs: Sequence[Sequence[float]] | None = None,
    stop_token_ids: Collection[int] = (),
    images: Sequence[Any] | None = None,
    blank: nn.vision.Patches | None = None,
) -> Row:
    """Makes a batch for a `PolicyLoss`: one prompt and one completion in each row.

    A completion includes the token that ended it, as returned by `Generator` and engines, so that the model learns to
    stop.

    Args:
        prompts: Token ids, a prompt for each completion.
        completions: Token ids, or what an `inference.Engine` returns, with its sampler and its log-probabilities.
        advantages: One per completion, in any shape, such as `N G`.
        length: Number of tokens in a row.
        sampler: The sampler of the token ids, stored as `sampler` in the batch for the loss to check.
        sampler_log_probs: Log-probabilities that the sampler reported for each token of the completions.
        stop_token_ids: Ids that end a completion, to check token ids of other samplers: a warning lists completions
            that are shorter than the longest one and do not end with one of them.
        images: For vision models whose images are patches: the images of the prompt of each completion, as
            `LocalEngine.generate` takes them; None for a prompt without. Each row then has its own `images`.
        blank: With `images`, an empty row with the capacity for images that every row has (`ImageProcessor.blank`).

    Raises:
        ValueError: when a row is longer than `length` or has more images than `blank`, numbers disagree, samplers
            differ, ids are no integers from 0 to 2147483647, or an advantage is not finite.
    """
    drawn = [completion for completion in completions if isinstance(completion, Completion)]
    samplers = ({completion.sampler for completion in drawn} | {sampler}) - {None}
    if len(samplers) > 1 or len(drawn) not in (0, len(completions)):
        raise ValueError(f"all completions of a batch must come from one engine and one sampler, got {samplers}")
    if drawn:
        completions = [completion.tokens for completion in drawn]
        sampler_log_probs = [completion.log_probs for completion in drawn]
    advantages = np.asarray(advantages, np.float32).reshape(-1)
    if not len(prompts) == len(completions) == len(advantages):
        counts = f"{len(prompts)} prompts, {len(completions)} completions, {len(advantages)} advantages"
        raise ValueError(f"there must be a prompt and an advantage for each completion, got {counts}")
    if not np.isfinite(advantages).all():
        at = int(np.flatnonzero(~np.isfinite(advantages))[0])
        raise ValueError(
            f"advantages must be finite, got {advantages[at]} for completion {at}: give 0 to learn nothing"
        )
    texts = cast(Sequence[Sequence[int]], completions)
    rows = data.completion_rows(
        prompts,
        texts,
        length=length,
        log_probs=sampler_log_probs,
        stop_token_ids=stop_token_ids,
        images=images,
        blank=blank,
    )
    batch = jax.tree.map(lambda *x: np.stack(x), *rows)
    batch["advantages"] = np.where(batch["targets"] >= 0, advantages[:, None], 0)
    return batch | {"sampler": samplers.pop()} if samplers else batch
