"""Masked diffusion: noise on a batch, and the loss of the tokens behind it.

Shapes: B rows, T tokens.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from maxlib import nn, ops
from maxlib.nn.mixer import block_mask
from maxlib.nn.mtp import shift_left
from maxlib.training.losses import Batch, Loss, Quotient, Stats


@dataclasses.dataclass(frozen=True)
class MaskedDiffusion(Loss):
    """Loss of masked diffusion language models (MDLM, arXiv:2406.07524; LLaDA, arXiv:2502.09992).

    Each document gets a noise level t, drawn between `levels`; in a model whose mask is `ops.BlockCausal`, each of its
    blocks does (block diffusion, arXiv:2503.09573). Each target becomes `mask_token` with probability t, and the model
    predicts it in its place. The loss is the sum of -log p / t over the masked targets; divided by the number of all
    targets, it is on average an upper bound of the text's negative log-likelihood per token, in nats.

    Batches are those of `NextToken`. A token is a target if the token before it has it as its target, so prompts and
    the first tokens of documents stay as they are. If the model's mask has pairs, the model gets each row twice, the
    text and its noisy copy.

        model = nn.with_mask(model, ops.BlockCausal(32, pairs=True))
        step = training.make_train_step(training.MaskedDiffusion(mask_token=3), optimizer)

    Metrics are `nll`, which is this bound, `accuracy` on masked targets, and the layers' reports.

    Args:
        mask_token: Id that stands for a masked token.
        levels: The lowest and the highest noise level.
        shifted: True if the token before a masked one predicts it, as decoders that become diffusion models do (Dream,
            arXiv:2508.15487); only for models without blocks.

    Raises:
        ValueError: when the levels are not 0 < lowest <= highest <= 1.
    """

    mask_token: int
    levels: tuple[float, float] = (1e-3, 1.0)
    shifted: bool = False
    reads: ClassVar[Collection[str]] = ("noise_weights",)

    def __post_init__(self):
        lowest, highest = self.levels
        if not 0 < lowest <= highest <= 1:
            raise ValueError(f"levels must be two probabilities, 0 < lowest <= highest <= 1, got {self.levels}")

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: Key[Array, ""] | None = None,
        *,
        dtype: Any = jnp.bfloat16,
        remat: nn.remat.Policy = None,
    ) -> tuple[Float[Array, ""], Stats]:
        """Draws noise, unless the batch comes from `corrupt`, and returns `(loss sum, Stats)`; see `Loss`."""
        if "noise_weights" not in batch:
            if key is None:
                raise ValueError(
                    "masked diffusion draws noise: give a random key, loss(model, batch, jax.random.key(0))"
                )
            self.check_names(batch)
            batch = self.corrupt(model, batch, key)
        return super().__call__(model, batch, key, dtype=dtype, remat=remat)

    def corrupt(self, model: Any, batch: Batch, key: Key[Array, ""]) -> Batch:
        """Returns a batch with noise.

        Its `targets` are the tokens behind masks, and its `noise_weights` are 1 / t at each target, masked or not, else
        0. A 1F1B pipeline, which draws none, takes such a batch.

        Args:
            model: The model, whose masks say whether there are blocks and pairs.
            batch: A batch for `NextToken`.
            key: Random key of the noise.

        Raises:
            ValueError: for layers with blocks of several sizes; for pairs with images or audio; for `shifted` with
                blocks.
        """
        mask = block_mask(model)
        if mask is not None and self.shifted:
            raise ValueError("shifted=True is for models without blocks: the first token of a block has none before it")
        batch = jax.tree.map(jnp.asarray, batch)
        tokens, rows = batch["tokens"], {name: batch.get(name) for name in ("segment_ids", "valid")}
        ctx = nn.make_context(*tokens.shape, **rows)
        # [B, T]: the first token of each token's document or block, whose draw they share.
        first = ctx.start if mask is None else ctx.key_intervals(ops.Chunked(mask.block))[0]
        of_levels, of_tokens = jax.random.split(key)
        draws = jnp.take_along_axis(jax.random.uniform(of_levels, tokens.shape), first, axis=1)
        lowest, highest = self.levels
        level = lowest + (highest - lowest) * draws
        before = jnp.pad(ops.is_learned(batch["targets"])[:, :-1], ((0, 0), (1, 0)))
        is_target = before & ~ctx.is_start  # a document cut at the end of a row has a target there, of the next row
        is_masked = is_target & (jax.random.uniform(of_tokens, tokens.shape) < level)
        targets, weights = jnp.where(is_masked, tokens, -1), jnp.where(is_target, 1 / level, 0)
        if self.shifted:
            targets, weights = shift_left(targets, 1, fill=-1), jnp.pad(weights[:, 1:], ((0, 0), (0, 1)))
        changes = {
            "tokens": jnp.where(is_masked, self.mask_token, tokens),
            "targets": targets,
            "noise_weights": weights,
        }
        return _pairs(batch, changes) if mask is not None and mask.pairs else batch | changes

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if "noise_weights" not in batch:
            raise ValueError("a 1F1B pipeline draws no noise: give it loss.corrupt(model, batch, key)")
        targets, weights = batch["targets"], batch["noise_weights"]
        loss, sums = nn.cross_entropy(hidden, model.head_weight(), targets, weights=weights, softcap=model.softcap)
        count = jnp.sum(weights > 0).astype(jnp.float32)
        accuracy = Quotient(sums["accuracy"], jnp.sum(ops.is_learned(targets)).astype(jnp.float32))
        return loss, jax.lax.stop_gradient(Stats(count, {"nll": loss, "accuracy": accuracy}))


def _pairs(batch: Batch, noisy: Batch) -> Batch:
    """Returns rows in pairs: a text, of which nothing is learned, and its noisy copy."""
    if media := [name for name in ("images", "audio", "source") if name in batch]:
        raise ValueError(f"pairs of a text and its noisy copy support text only, but this batch has {media[0]}")
    texts = batch | {
        "targets": jnp.full_like(noisy["targets"], -1),
        "noise_weights": jnp.zeros_like(noisy["noise_weights"]),
    }

    def interleaved(text: Array, noisy: Array) -> Array:
        return jnp.stack([text, noisy], axis=1).reshape(-1, *text.shape[1:])

    return jax.tree.map(interleaved, texts, batch | noisy)
