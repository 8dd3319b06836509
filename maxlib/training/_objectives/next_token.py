"""The next-token loss of language models."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.training._objectives.objective import Batch, Stats, objective


@objective(reads=())
def next_token_loss(
    model: Any, hidden: Float[Array, "B T D"], batch: Batch, *, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> tuple[Float[Array, ""], Stats]:
    """Computes the cross-entropy of `batch["targets"]` (-1: ignored) given `batch["tokens"]`, summed, in nats.

    Call it as `next_token_loss(model, batch, key, *, dtype, remat, z_loss, label_smoothing)` (`Objective`). Its metrics
    are `nll` (without smoothing, z-loss and the model's own losses), `accuracy`, and the model's reports.

    Args:
        model: the model.
        hidden: its last hidden states.
        batch: with `targets`, `B T`.
        z_loss: factor of the squared log-sum-exp (PaLM, arXiv:2204.02311).
        label_smoothing: probability mass spread evenly over the vocabulary.
    """
    loss, sums = nn.cross_entropy(
        hidden,
        model.head_weight(),
        batch["targets"],
        softcap=model.softcap,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
    )
    return loss, Stats(jnp.sum(ops.is_learned(batch["targets"])).astype(jnp.float32), sums)
