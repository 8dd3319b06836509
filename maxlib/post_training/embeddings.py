"""Contrastive training of embeddings (`nn.EmbeddingHead`)."""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.post_training._reference import interleaved
from maxlib.sharding import constrain
from maxlib.training.losses import Batch, Loss, Stats

ROLES = ("anchor", "positive", "negative")
ABSENT = -1e30  # score of a row without tokens; finite, so that gradients are


@dataclasses.dataclass(frozen=True)
class InfoNCE(Loss):
    """-log softmax of s(a, p) / τ over all positives and negatives of the batch (arXiv:1807.03748); s is the cosine.

    The batch is `{"anchor": {...}, "positive": {...}}`, and maybe `"negative"`, a hard one for each anchor, with arrays
    of the same shapes and one text in a row; targets are not read. Candidates are those of the whole batch, on all
    devices; microbatches have fewer. Rows without tokens do not count. Metrics: `accuracy`, how often the own positive
    is the nearest, and `similarity`, its cosine.

        loss = post_training.InfoNCE(temperature=0.05, dims=(768, 256, 128))

    Args:
        temperature: τ.
        symmetric: True adds the loss of finding the anchor of each positive, and halves the sum.
        dims: Matryoshka (arXiv:2205.13147): the loss is the sum over vectors of these leading sizes; () for the whole
            vectors only. Metrics are those of the first.
    """

    temperature: float = 0.05
    symmetric: bool = False
    dims: tuple[int, ...] = ()
    reads: ClassVar[Collection[str]] = (*ROLES, "interleaved")
    reads_targets: ClassVar[bool] = False
    sums_over_rows: ClassVar[bool] = False

    def prepare(self, model: Any, batch: Batch, *, dtype: Any, remat: nn.remat.Policy) -> tuple[Any, Batch]:
        """Returns the model, and the rows of each anchor, its positive and its negative next to each other."""
        if not {"anchor", "positive"} <= batch.keys():
            raise ValueError(f"InfoNCE needs batch['anchor'] and batch['positive'], got {sorted(batch)}")
        return model, interleaved(batch, [name for name in ROLES if name in batch])

    def from_hidden(self, model: Any, hidden: Float[Array, "N T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        R = batch["interleaved"].shape[1]
        masks = {name: batch[name] for name in ("segment_ids", "valid") if name in batch}
        is_token = next(iter(masks.values()), jnp.ones(hidden.shape[:2], bool)) > 0
        filled = jnp.any(is_token, axis=1).reshape(-1, R)
        is_pair = filled[:, 0] & filled[:, 1]
        losses, metrics = jnp.zeros(len(is_pair)), []
        for dim in self.dims or (None,):
            vectors = model.head.embed(hidden, **masks, dim=dim)[:, 0]  # [N, 1, E] -> [N, E]
            loss, terms = self._of_vectors(vectors.reshape(*filled.shape, -1), filled)
            losses, metrics = losses + loss, [*metrics, terms]
        sums = {name: jnp.sum(jnp.where(is_pair, value, 0)) for name, value in metrics[0].items()}
        count = jnp.sum(is_pair).astype(jnp.float32)
        return jnp.sum(jnp.where(is_pair, losses, 0)), jax.lax.stop_gradient(Stats(count, sums))

    def _of_vectors(self, x: Float[Array, "B R E"], filled: Any) -> tuple[Float[Array, " B"], dict[str, Array]]:
        """Computes the loss and the metrics of each anchor."""
        # [B, R - 1, E] -> [(R - 1) * B, E]: all positives, then all negatives.
        candidates, exist = jnp.moveaxis(x[:, 1:], 1, 0).reshape(-1, x.shape[-1]), filled[:, 1:].T.reshape(-1)
        # Cosines, as vectors may have any length: [B, C]
        anchors, candidates = nn.unit_vectors(x[:, 0]), nn.unit_vectors(candidates)
        cosines = jnp.einsum("BE,CE->BC", anchors, candidates, precision=jax.lax.Precision.HIGHEST)
        scores = jnp.where(exist[None], constrain(cosines, "batch", None) / self.temperature, ABSENT)
        positive = jnp.diagonal(scores)
        loss = jax.nn.logsumexp(scores, axis=1) - positive
        if self.symmetric:
            B = len(x)
            backward = jnp.where(filled[:, :1], scores[:, :B], ABSENT)  # anchors of each positive
            loss = (loss + jax.nn.logsumexp(backward, axis=0) - positive) / 2
        nearest = jnp.argmax(scores, axis=1) == jnp.arange(len(x))
        return loss, {"accuracy": nearest.astype(jnp.float32), "similarity": jnp.diagonal(cosines)}
