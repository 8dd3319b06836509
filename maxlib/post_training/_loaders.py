"""Loaders that add a frozen model's outputs to the batches of another loader, computed once per batch."""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlib import nn, sharding
from maxlib.inference import Sampler
from maxlib.observability import collect_metrics
from maxlib.post_training._reference import interleaved, log_probs
from maxlib.training import StatefulLoader, follow_layout, shard_batch
from maxlib.training.losses import Batch, run_model


class Scored:
    """A loader that adds `score(model, part)` to each part of a batch that has tokens; otherwise it is `loader`."""

    def __init__(self, loader: StatefulLoader, model: Any, layout: Any, score: Callable[[Any, Batch], Batch]):
        self.loader, self.model, self.layout = loader, model, layout
        self._compiled = jax.jit(lambda model, batch: _over_parts(lambda part: score(model, part), batch))
        self.reset, self.get_state, self.set_state = loader.reset, loader.get_state, loader.set_state
        self.metrics, self.follow = (
            lambda: dict(collect_metrics(loader)),
            getattr(loader, "follow", lambda sharding: None),
        )
        follow_layout(loader, layout)

    def __iter__(self) -> "Scored":
        return self

    def __next__(self) -> Batch:
        batch = shard_batch(next(self.loader), self.layout)
        with contextlib.nullcontext() if self.layout is None else sharding.use(self.layout):
            return self._compiled(self.model, batch)


def add_reference(
    loader: StatefulLoader,
    model: Any,
    *,
    layout: sharding.Layout | None = None,
    temperature: float = 1.0,
    dtype: Any = jnp.bfloat16,
) -> Scored:
    """Adds the log-probabilities under a frozen model to every batch, as `reference_log_probs` next to `targets`.

    Args:
        loader: Batches with `tokens` and `targets`, also nested, such as `chosen` and `rejected`.
        model: The reference.
        layout: Layout of the model and the batches, as in `Trainer`.
        temperature: As in the loss.
        dtype: As in the loss; with another precision the reference differs from the policy at step 0.
    """

    def score(model: Any, batch: Batch) -> Batch:
        scored = log_probs(model, batch, temperature=temperature, dtype=dtype)
        return {"reference_log_probs": scored.log_prob, "reference_sampler": Sampler(temperature)}

    return Scored(loader, model, layout, score)


def add_teacher(
    loader: StatefulLoader,
    model: Any,
    *,
    k: int,
    layout: sharding.Layout | None = None,
    temperature: float = 1.0,
    dtype: Any = jnp.bfloat16,
) -> Scored:
    """Adds a teacher's k most likely tokens at every position, as `teacher_ids` and `teacher_log_probs`, `B T K`.

    Args:
        loader: Batches with `tokens`.
        model: The teacher.
        k: Number of tokens.
        layout: Layout of the model and the batches.
        temperature: As in the loss.
        dtype: Dtype of the computation.
    """

    def score(model: Any, batch: Batch) -> Batch:
        hidden = run_model(model, batch, dtype=dtype).hidden
        values, ids = nn.distillation.token_top_k(
            hidden, model.head_weight(), k, temperature=temperature, softcap=model.softcap
        )
        return {"teacher_ids": ids, "teacher_log_probs": values, "teacher_sampler": Sampler(temperature)}

    return Scored(loader, model, layout, score)


def _over_parts(function: Callable[[Batch], Batch], batch: Batch) -> Batch:
    """Returns the batch with the outputs of `function` for each part; pairs are run together, as in the loss."""
    pair = [name for name in ("chosen", "rejected") if {"chosen", "rejected"} <= batch.keys()]
    parts = [name for name, x in batch.items() if isinstance(x, dict) and name not in pair]
    out = batch | {name: _over_parts(function, batch[name]) for name in parts}
    if pair:
        # [2B, ...] -> [B, 2, ...]
        both = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), function(interleaved(batch)))
        out |= {name: batch[name] | jax.tree.map(lambda x, i=i: x[:, i], both) for i, name in enumerate(pair)}
    return out | function(out) if "tokens" in out else out
