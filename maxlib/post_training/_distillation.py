"""The training loss of distillation."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.ops import check_vocabulary, is_learned, top_k_divergence
from maxlib.post_training._reference import check_temperature, trained_and_frozen
from maxlib.training.losses import Batch, Loss, Stats, run_model


@dataclasses.dataclass(frozen=True)
class Distillation(Loss):
    """Divergence of the student from the teacher at every target, in nats.

    The gradient is not multiplied by the squared temperature. Metrics: `divergence`, with `hard` also `nll` and
    `accuracy`, with `features` also `features`. For on-policy distillation pass batches of the student's own
    completions. Without a teacher model the batch has `teacher_ids` and `teacher_log_probs` (`B T K`, at the same
    temperature: `add_teacher`). A step raises ValueError when there is no teacher, or it has another vocabulary.

    Args:
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher); values in between as in `ops.divergence`.
        temperature: Divisor of both models' logits.
        hard: Weight of the cross-entropy of the targets; the divergence has the weight `1 - hard`.
        tail: For K tokens instead of the vocabulary, see `top_k_divergence`.
        student_top_k: Number K of the student's likeliest tokens to compare with a teacher model, such as for the
            student's own samples and `beta=1`; None for the whole vocabulary.
        features: Weight of the mean squared difference of the last hidden states, which must have one width.
        teacher: Function from the student to the teacher; None for the frozen model of `WithFrozen`, or stored targets.
    """

    beta: float = 0.0
    temperature: float = 1.0
    hard: float = 0.0
    tail: bool = True
    student_top_k: int | None = None
    features: float = 0.0
    teacher: Callable[[Any], Any] | None = None
    reads: ClassVar[Collection[str]] = ("teacher", "teacher_hidden", "teacher_ids", "teacher_log_probs")
    others: ClassVar[Collection[str]] = ("teacher",)

    def prepare(self, model: Any, batch: Batch, *, dtype: Any, remat: nn.remat.Policy) -> tuple[Any, Batch]:
        """Returns the student, and a batch with the teacher, if there is one, and its hidden states."""
        student, teacher = trained_and_frozen(model, self.teacher)
        if teacher is None:
            check_temperature("teacher", batch, self.temperature)
            return student, batch
        teacher = jax.lax.stop_gradient(teacher)
        hidden = run_model(teacher, batch, dtype=dtype, remat=remat).hidden
        return student, batch | {"teacher": teacher, "teacher_hidden": hidden}

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        mask, weight = is_learned(batch["targets"]), model.head_weight()
        teacher = batch.get("teacher")
        top_k = None if teacher is None else self.student_top_k
        if teacher is not None and top_k is None:
            losses = nn.distillation.token_divergence(
                hidden,
                weight,
                batch["teacher_hidden"],
                teacher.head_weight(),
                mask,
                temperature=self.temperature,
                softcap=model.softcap,
                teacher_softcap=teacher.softcap,
                beta=self.beta,
            )
        elif top_k is not None or "teacher_ids" in batch:
            stored = batch if top_k is None else self._teacher_at_top_k(model, hidden, batch, mask, top_k)
            # What is not learned may hold anything, also numbers whose gradient is NaN.
            learned, ids, theirs = (
                jnp.where(mask[..., None], x, 0) for x in (hidden, stored["teacher_ids"], stored["teacher_log_probs"])
            )
            ours = nn.distillation.token_gather_log_probs(
                learned, weight, ids, temperature=self.temperature, softcap=model.softcap
            )
            losses = top_k_divergence(ours, theirs, beta=self.beta, tail=self.tail)
        else:
            raise ValueError(
                "distillation needs a teacher: train WithFrozen(student, teacher), pass teacher=, or store its most "
                "likely tokens in the batch (add_teacher)"
            )
        total = jnp.sum(jnp.where(mask, losses, 0))
        count, sums = jnp.sum(mask).astype(jnp.float32), {"divergence": total}
        loss = (1 - self.hard) * total
        if self.features:
            if teacher is None or hidden.shape != batch["teacher_hidden"].shape:
                raise ValueError("features need a teacher model whose hidden states have the student's width")
            difference = jnp.where(mask[..., None], hidden - batch["teacher_hidden"], 0).astype(jnp.float32)
            sums["features"] = jnp.sum(difference**2) / hidden.shape[-1]
            loss += self.features * sums["features"]
        if self.hard:
            nll, terms = nn.cross_entropy(hidden, weight, batch["targets"], softcap=model.softcap)
            loss, sums = loss + self.hard * nll, sums | terms
        return loss, jax.lax.stop_gradient(Stats(count, sums))

    def _teacher_at_top_k(self, model: Any, hidden: Array, batch: Batch, mask: Array, k: int) -> Batch:
        """Returns the student's likeliest tokens, and their log-probabilities under the teacher."""
        teacher, hidden_states = batch["teacher"], (hidden, batch["teacher_hidden"])
        ours, theirs = (jnp.where(mask[..., None], jax.lax.stop_gradient(x), 0) for x in hidden_states)
        check_vocabulary(model.head_weight(), teacher.head_weight())
        _, ids = nn.distillation.token_top_k(
            ours, model.head_weight(), k, temperature=self.temperature, softcap=model.softcap
        )
        log_probs = nn.distillation.token_gather_log_probs(
            theirs, teacher.head_weight(), ids, temperature=self.temperature, softcap=teacher.softcap
        )
        return {"teacher_ids": ids, "teacher_log_probs": jax.lax.stop_gradient(log_probs)}
