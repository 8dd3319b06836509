"""Loaders around loaders: batches with what a frozen model says of them, computed once for each."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import nn, sharding
from maxlib.observability._metrics import reported
from maxlib.post_training._models import hidden_states, log_probs
from maxlib.training import StatefulLoader, place_batch

Batch = dict[str, Any]


class MappedLoader:
    """A loader whose batches went through a function; its state is that of the loader inside.

    Args:
        loader: Any loader of the protocol.
        function: From batch to batch.
    """

    def __init__(self, loader: StatefulLoader, function: Callable[[Batch], Batch]):
        self.loader, self.function = loader, function

    def __iter__(self) -> "MappedLoader":
        return self

    def __next__(self) -> Batch:
        return self.function(next(self.loader))

    def reset(self) -> None:
        """Goes back to the first batch."""
        self.loader.reset()

    def get_state(self) -> dict[str, Any]:
        """Returns the position of the loader inside."""
        return self.loader.get_state()

    def set_state(self, state: Any) -> None:
        """Continues from a position."""
        self.loader.set_state(state)

    def metrics(self) -> dict[str, Any]:
        """Returns the counts of the loader inside."""
        return dict(reported(self.loader))


def add_reference(
    loader: StatefulLoader,
    model: Any,
    *,
    layout: sharding.Layout | None = None,
    temperature: float = 1.0,
    dtype: Any = jnp.bfloat16,
) -> MappedLoader:
    """Adds the log-probabilities under a frozen model to every batch, as `reference` beside `targets`.

    Args:
        loader: Batches with `tokens` and `targets`, also nested, such as `chosen` and `rejected`.
        model: The reference.
        layout: Layout of the model and the batches, as the Trainer's.
        temperature: As in the loss.
        dtype: As in the loss: a reference in another precision is not the policy at step 0.
    """
    score = lambda model, part: {"reference": log_probs(model, part, temperature=temperature, dtype=dtype).log_prob}
    return MappedLoader(loader, _adding(score, model, layout))


def add_teacher(
    loader: StatefulLoader,
    model: Any,
    *,
    k: int,
    layout: sharding.Layout | None = None,
    temperature: float = 1.0,
    dtype: Any = jnp.bfloat16,
) -> MappedLoader:
    """Adds a teacher's k likeliest tokens at every place, as `teacher_ids` and `teacher_log_probs`, `B T K`.

    Args:
        loader: Batches with `tokens`.
        model: The teacher.
        k: Number of tokens.
        layout: Layout of the model and the batches.
        temperature: As in the loss.
        dtype: Dtype of the computation.
    """

    def score(model: Any, part: Batch) -> Batch:
        hidden = hidden_states(model, part, dtype=dtype).hidden
        values, ids = nn.distillation.token_top_k(
            hidden, model.head_weight(), k, temperature=temperature, softcap=model.softcap
        )
        return {"teacher_ids": ids, "teacher_log_probs": values}

    return MappedLoader(loader, _adding(score, model, layout))


def _adding(score: Callable[[Any, Batch], Batch], model: Any, layout: sharding.Layout | None) -> Callable:
    """Makes a function that adds the results of `score(model, part)` to each part of a batch that has tokens."""
    compiled = jax.jit(lambda model, batch: _over_parts(lambda part: score(model, part), batch))

    def add(batch: Batch) -> Batch:
        batch = place_batch(batch, layout)
        if layout is None:
            return compiled(model, batch)
        with sharding.use(layout):
            return compiled(model, batch)

    return add


def _over_parts(function: Callable[[Batch], Batch], batch: Batch) -> Batch:
    out = {name: _over_parts(function, x) if isinstance(x, dict) else x for name, x in batch.items()}
    return out | function(out) if "tokens" in out else out
