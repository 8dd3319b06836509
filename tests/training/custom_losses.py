"""Losses as users write them: unknown to maxlib, and passed to other processes by name."""

import dataclasses

import jax
import jax.numpy as jnp

from maxlib import nn, training
from maxlib.training.losses import score


@dataclasses.dataclass(frozen=True)
class Focal(training.Loss):
    """`-(1 - p)^gamma log p` (arXiv:1708.02002): tokens that are known already weigh less."""

    gamma: float = 2.0

    def from_hidden(self, model, hidden, batch):
        scored = score(model, hidden, batch["targets"], entropy=True)
        loss = -jnp.sum((1 - jnp.exp(scored.log_prob)) ** self.gamma * scored.log_prob)
        sums = {"nll": -jnp.sum(scored.log_prob), "entropy": jnp.sum(scored.entropy)}
        return loss, training.Stats(jnp.sum(batch["targets"] >= 0).astype(jnp.float32), sums)


@dataclasses.dataclass(frozen=True)
class Preferred(training.Loss):
    """DPO (arXiv:2305.18290): each row holds a chosen answer, segment 1, and a rejected one, segment 2; `reference` has
    the log-probabilities of a frozen model. Rows whose `weight` is 0 do not count.
    """

    beta: float = 0.5

    def from_hidden(self, model, hidden, batch):
        scored = score(model, hidden, batch["targets"], temperature=0.8)
        ratio = jnp.where(batch["targets"] >= 0, scored.log_prob - batch["reference"], 0)  # B T
        chosen, rejected = (jnp.sum(ratio * (batch["segment_ids"] == segment), axis=1) for segment in (1, 2))  # B
        margin, weight = self.beta * (chosen - rejected), batch["weight"]
        sums = {"margin": jnp.sum(weight * margin), "accuracy": jnp.sum(weight * (margin > 0))}
        return jnp.sum(weight * jax.nn.softplus(-margin)), training.Stats(jnp.sum(weight), sums)


def contrast(model, batch, key, *, dtype=jnp.float32, remat=None):
    """A plain function that runs the model twice, on answers in two arrays: autodiff divides it, no pipeline can."""

    def log_prob(half):
        out = model(half["tokens"], dtype=dtype, remat=remat)
        scored = nn.token_log_probs(out.hidden, model.head_weight(), half["targets"], softcap=model.softcap)
        return jnp.sum(scored.log_prob, axis=1)

    margin = log_prob(batch["chosen"]) - log_prob(batch["rejected"])
    count = jnp.asarray(margin.shape[0], jnp.float32)
    return jnp.sum(jax.nn.softplus(-margin)), training.Stats(count, {"margin": jnp.sum(margin)})


def pair_shapes(rows, sequence):
    """The arrays that `Preferred` reads besides tokens and targets, for a plan."""
    by_token = (rows, sequence)
    return {
        "segment_ids": jax.ShapeDtypeStruct(by_token, jnp.int32),
        "reference": jax.ShapeDtypeStruct(by_token, jnp.float32),
        "weight": jax.ShapeDtypeStruct((rows,), jnp.float32),
    }


gentle = Focal(gamma=1.0)
