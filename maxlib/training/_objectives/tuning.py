"""Losses of supervised tuning."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.training._objectives.objective import Batch, Stats, objective, scores


@objective(reads=())
def dft_loss(head: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
    """Computes dynamic fine-tuning (arXiv:2508.05629): the cross-entropy of each target times its probability.

    Call it as `dft_loss(model, batch, key, *, dtype, remat)`. The factor has no gradient: -Σ sg(p) log p. Its metrics
    are those of `next_token_loss`.

    Args:
        head: The model.
        hidden: Its last hidden states.
        batch: Has `targets`, -1 where nothing is learned.
    """
    scored = scores(head, hidden, batch["targets"])
    loss = -jnp.sum(jax.lax.stop_gradient(jnp.exp(scored.log_prob)) * scored.log_prob)  # 0 for ignored targets
    sums = {"nll": -jnp.sum(scored.log_prob), "accuracy": jnp.sum(scored.correct, dtype=jnp.float32)}
    count = jnp.sum(ops.is_learned(batch["targets"])).astype(jnp.float32)
    return loss, jax.lax.stop_gradient(Stats(count, sums))


def with_embedding_noise(loss: Any, *, alpha: float = 5.0) -> Any:
    """Makes a loss that adds noise to token vectors (NEFTune, arXiv:2310.05914): uniform in ±alpha / √(L D).

    L is the number of real tokens of a document: of its segment in rows with `segment_ids`, of the row in rows with
    `valid`, and of all tokens of a row with neither. So a document has the same noise alone, padded and packed.

    Args:
        loss: Any training loss; the model needs `embed_inputs` and `embed_tokens`, like `nn.Decoder`.
        alpha: Size of the noise.

    Returns:
        A loss with the same arguments, which draws the noise with its `key`. `make_eval_step`, and so the `evaluation`
        of a `Trainer`, omits the noise.
    """
    return functools.partial(noisy_loss, loss=loss, alpha=alpha)


def noisy_loss(model: Any, batch: Batch, key: Array, *, loss: Any, alpha: float, **options: Any) -> Any:
    """Runs `loss` on a model whose token vectors are noisy."""
    if not (hasattr(model, "embed_tokens") and hasattr(model, "embed_inputs")):
        raise TypeError(
            "embedding noise needs a model with embed_tokens and embed_inputs, such as an nn.Decoder, got "
            f"{type(model).__name__}"
        )
    noisy = jax.tree.map(lambda x: x, model)  # another object with the same arrays
    embed_inputs, embed_tokens = noisy.embed_inputs, noisy.embed_tokens
    documents = {}

    def noting_documents(tokens: Array, **inputs: Any) -> Any:
        documents.update({name: inputs.get(name) for name in ("segment_ids", "valid")})
        return embed_inputs(tokens, **inputs)

    def with_noise(tokens: Array, dtype: Any) -> Array:
        x = embed_tokens(tokens, dtype)
        bounds = nn.context(*tokens.shape, **documents)
        length = jnp.maximum(bounds.stop - bounds.start, 1)[..., None]  # B T 1; padding has none
        size = (alpha / jnp.sqrt(length * x.shape[2])).astype(x.dtype)
        return x + size * jax.random.uniform(key, x.shape, x.dtype, -1, 1)

    noisy.embed_inputs, noisy.embed_tokens = noting_documents, with_noise
    return loss(noisy, batch, key, **options)
