"""A task that small models learn in seconds: ids that count up from a random start."""

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import training


def batch(step: int, vocab: int, *, rows: int = 8, length: int) -> dict:
    start = np.random.default_rng(step).integers(0, vocab, (rows, 1))
    ids = (start + np.arange(length + 1)) % vocab
    return {"tokens": jnp.asarray(ids[:, :-1], jnp.int32), "targets": jnp.asarray(ids[:, 1:], jnp.int32)}


def loss(model, batch, key=None):
    return training.NextToken()(model, batch, dtype=jnp.float32, remat="full")


@jax.jit
def copied(model):
    return jax.tree.map(jnp.copy, model)


def trained(model, batches):
    """State and losses after a step on each of the batches; the model itself stays."""
    optimizer = training.adamw(3e-2, mask=training.decay_mask(model))
    state = training.make_state(copied(model), optimizer)
    step, losses = training.jit_step(training.make_train_step(loss, optimizer)), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["nll"]))
    return state, losses
