"""Losses as users write them: unknown to maxlib, and passed to other processes by name."""

import functools

import jax
import jax.numpy as jnp

from maxlib import nn, training


@training.objective
def focal(model, hidden, batch, *, gamma=2.0):
    """`-(1 - p)^gamma log p` (arXiv:1708.02002): tokens that are known already weigh less."""
    out = nn.token_log_probs(hidden, model.head_weight(), batch["targets"], softcap=model.softcap, entropy=True)
    loss = -jnp.sum((1 - jnp.exp(out.log_prob)) ** gamma * out.log_prob)
    sums = {"nll": -jnp.sum(out.log_prob), "entropy": jnp.sum(out.entropy)}
    return loss, training.Stats(jnp.sum(batch["targets"] >= 0).astype(jnp.float32), sums)


@training.objective
def preferred(model, hidden, batch, *, beta=0.5):
    """DPO (arXiv:2305.18290): each row holds a chosen answer, segment 1, and a rejected one, segment 2; `reference` has
    the log-probabilities of a frozen model. Rows whose `weight` is 0 do not count.
    """
    out = nn.token_log_probs(hidden, model.head_weight(), batch["targets"], softcap=model.softcap, temperature=0.8)
    ratio = jnp.where(batch["targets"] >= 0, out.log_prob - batch["reference"], 0)  # B T
    of = lambda segment: jnp.sum(ratio * (batch["segment_ids"] == segment), axis=1)  # B
    margin, weight = beta * (of(1) - of(2)), batch["weight"]
    sums = {"margin": jnp.sum(weight * margin), "accuracy": jnp.sum(weight * (margin > 0))}
    return jnp.sum(weight * jax.nn.softplus(-margin)), training.Stats(jnp.sum(weight), sums)


def contrast(model, batch, key, *, dtype=jnp.float32, remat=None):
    """A plain function that runs the model twice, on answers in two arrays: autodiff divides it, no pipeline can."""

    def log_prob(half):
        out = model(half["tokens"], dtype=dtype, remat=remat)
        scores = nn.token_log_probs(out.hidden, model.head_weight(), half["targets"], softcap=model.softcap)
        return jnp.sum(scores.log_prob, axis=1)

    margin = log_prob(batch["chosen"]) - log_prob(batch["rejected"])
    count = jnp.asarray(margin.shape[0], jnp.float32)
    return jnp.sum(jax.nn.softplus(-margin)), training.Stats(count, {"margin": jnp.sum(margin)})


def pair_shapes(rows, sequence):
    """The arrays that `preferred` reads besides tokens and targets, for a plan."""
    by_token = lambda dtype: jax.ShapeDtypeStruct((rows, sequence), dtype)
    one = jax.ShapeDtypeStruct((rows,), jnp.float32)
    return {"segment_ids": by_token(jnp.int32), "reference": by_token(jnp.float32), "weight": one}


gentle = functools.partial(focal, gamma=1.0)
