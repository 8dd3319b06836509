"""Losses and scores of models whose head gives numbers (`nn.ScoreHead`): rewards of answers, and labels of tokens.

Shapes: B rows, T tokens, L numbers of the head.
"""

import dataclasses
from collections.abc import Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.nn import softplus
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.ops import is_learned
from maxlib.post_training._reference import interleaved
from maxlib.post_training._segments import segment_sums
from maxlib.post_training.preferences import check_pairs, split_pairs
from maxlib.training.losses import Batch, Loss, Stats, num_learned, run_model


def token_scores(
    model: Any, batch: Batch, *, dtype: Any = jnp.bfloat16, remat: nn.remat.Policy = None
) -> Float[Array, "B T L"]:
    """Computes the scores of each token, such as a critic's values.

    Args:
        model: A model with an `nn.ScoreHead`.
        batch: Its `tokens` and other inputs.
        dtype: Dtype of the computation.
        remat: What layers keep for a backward pass.
    """
    return model.logits(run_model(model, batch, dtype=dtype, remat=remat).hidden)


def text_scores(
    model: Any, batch: Batch, *, dtype: Any = jnp.bfloat16, remat: nn.remat.Policy = None
) -> Float[Array, "B L"]:
    """Computes the scores of texts, one in each row, at their last tokens: rewards, or logits of classes.

    Args:
        model: A model with an `nn.ScoreHead`.
        batch: Its `tokens` and other inputs; `valid` or `segment_ids` tell padding.
        dtype: Dtype of the computation.
        remat: What layers keep for a backward pass.
    """
    scores = token_scores(model, batch, dtype=dtype, remat=remat)
    return nn.pool(scores, "last", segment_ids=batch.get("segment_ids"), valid=batch.get("valid"))[:, 0]


@dataclasses.dataclass(frozen=True)
class BradleyTerry(Loss):
    """Loss of a reward model on pairs of answers: -log σ(r_c - r_r - m) + c (r_c + r_r)² (arXiv:2203.02155).

    A reward r is the score of an answer's last token, which `segment_ids` or `valid` tell from padding; targets are not
    read. Pairs come in the two forms of preference losses: `{"chosen": {...}, "rejected": {...}}`, or consecutive
    segments of a row (1 chosen, 2 rejected, 3 chosen, ...). `margin` m, how much better the chosen answer is, has a
    number for each pair, `B`; for pairs in segments it is `B T`, read at the last token of the chosen answer. Metrics:
    `rewards/chosen`, `rewards/rejected`, `rewards/margins`, `rewards/accuracies`.

        reward_model = nn.with_head(model, nn.ScoreHead(model.cfg.dim, 1, rngs=nnx.Rngs(0)))
        trainer = training.Trainer(reward_model, optimizer=training.adamw(1e-5), loader=loader, loss=BradleyTerry())

    Args:
        center: c, which holds rewards near 0 (arXiv:2312.09244), usually 0.01.
    """

    center: float = 0.0
    reads: ClassVar[Collection[str]] = ("chosen", "rejected", "interleaved", "margin")
    reads_targets: ClassVar[bool] = False

    def prepare(self, model: Any, batch: Batch, *, dtype: Any, remat: nn.remat.Policy) -> tuple[Any, Batch]:
        """Returns the model, and the two rows of each pair next to each other."""
        if "chosen" not in batch:
            return model, batch
        margin = {"margin": batch["margin"]} if "margin" in batch else {}
        return model, interleaved(batch) | margin

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        check_pairs(self, batch)
        segment_ids = batch.get("segment_ids")
        if segment_ids is None and "valid" in batch:
            segment_ids = batch["valid"].astype(jnp.int32)
        is_last = nn.is_last_token(segment_ids, hidden.shape[:2])

        def of_answers(x: Float[Array, "B T"]) -> tuple[Array, Array]:
            return split_pairs(segment_sums(jnp.where(is_last, x, 0.0), segment_ids), batch)

        chosen, rejected = of_answers(model.logits(hidden)[..., 0])
        is_pair = jnp.multiply(*of_answers(jnp.ones(hidden.shape[:2])))
        margin = batch.get("margin", 0.0)
        if jnp.ndim(margin):
            margin = margin[:, None] if jnp.ndim(margin) == 1 else of_answers(margin)[0]
        losses = softplus(-(chosen - rejected - margin)) + self.center * (chosen + rejected) ** 2
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": chosen > rejected,
        }
        sums = {name: jnp.sum(is_pair * value) for name, value in metrics.items()}
        return jnp.sum(is_pair * losses), jax.lax.stop_gradient(Stats(jnp.sum(is_pair), sums))


@dataclasses.dataclass(frozen=True)
class TokenClassification(Loss):
    """Cross-entropy of the labels of tokens, `batch["targets"]`, -1 where there is none.

    With labels at the last token of each step of a solution it trains a process reward model (arXiv:2305.20050), with
    one at the last token of each text a classifier of texts. Labels are not shifted: a target is the label of the token
    at its own position. Metrics: `nll`, `accuracy`.
    """

    reads: ClassVar[Collection[str]] = ()

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        targets = batch["targets"]
        learned = is_learned(targets)
        log_probs = jax.nn.log_softmax(jnp.where(learned[..., None], model.logits(hidden), 0))
        labels = jnp.where(learned, targets, 0)
        # [B, T, L] -> [B, T]; NaN for a label that the head does not have.
        log_prob = jnp.take_along_axis(log_probs, labels[..., None], axis=-1, mode="fill")[..., 0]
        nll = -jnp.sum(jnp.where(learned, log_prob, 0))
        correct = learned & (jnp.argmax(log_probs, axis=-1) == targets)
        sums = {"nll": nll, "accuracy": jnp.sum(correct).astype(jnp.float32)}
        return nll, jax.lax.stop_gradient(Stats(num_learned(batch), sums))
