"""The training loss of distillation."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.ops import is_learned, top_k_divergence
from maxlib.training._objectives.objective import Batch, Stats, objective, run
from maxlib.training._objectives.second_model import trained_and_frozen


def _with_teacher(model: Any, batch: Batch, *, teacher: Any = None, **how: Any) -> tuple[Any, Batch]:
    """Returns the student, and a batch with the teacher, if there is one, and its hidden states."""
    student, teacher = trained_and_frozen(model, teacher)
    if teacher is None:
        return student, batch
    teacher = jax.lax.stop_gradient(teacher)
    return student, batch | {"teacher": teacher, "teacher_hidden": run(teacher, batch, **how).hidden}


_READS = "teacher", "teacher_hidden", "teacher_ids", "teacher_log_probs"


@objective(prepare=_with_teacher, reads=_READS)
def distillation_loss(
    head: Any,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    *,
    beta: float = 0.0,
    temperature: float = 1.0,
    hard: float = 0.0,
    tail: bool = True,
) -> tuple[Float[Array, ""], Stats]:
    """Computes the divergence of the student from the teacher at every target, summed, in nats.

    Call it as `distillation_loss(model, batch, key, *, teacher, dtype, remat, **options)`. The gradient is not
    multiplied by the squared temperature. Metrics: `divergence`, and with `hard` also `nll` and `accuracy`. For
    on-policy distillation pass batches of the student's own completions.

    Args:
        head: The student.
        hidden: Its last hidden states.
        batch: `tokens`, `targets` (-1: not learned), and without a teacher model `teacher_ids`, `teacher_log_probs` (`B
            T K`, at the same temperature: `add_teacher`).
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher); values in between as in `ops.divergence`.
        temperature: Divisor of both models' logits.
        hard: Weight of the cross-entropy of the targets; the divergence has the weight `1 - hard`.
        tail: For stored targets, see `top_k_divergence`.

    Raises:
        ValueError: when there is no teacher, or it has another vocabulary.
    """
    mask, weight = is_learned(batch["targets"]), head.head_weight()
    options: Any = {"temperature": temperature, "softcap": head.softcap}
    if (teacher := batch.get("teacher")) is not None:
        theirs = batch["teacher_hidden"], teacher.head_weight(), mask
        options |= {"teacher_softcap": teacher.softcap, "beta": beta}
        losses = nn.distillation.token_divergence(hidden, weight, *theirs, **options)
    elif "teacher_ids" in batch:
        # What is not learned may hold anything, also numbers whose gradient is NaN.
        learned, ids, theirs = (
            jnp.where(mask[..., None], x, 0) for x in (hidden, batch["teacher_ids"], batch["teacher_log_probs"])
        )
        ours = nn.distillation.token_gather_log_probs(learned, weight, ids, **options)
        losses = top_k_divergence(ours, theirs, beta=beta, tail=tail)
    else:
        raise ValueError(
            "distillation needs a teacher: train WithFrozen(student, teacher), pass teacher=, or store its most likely "
            "tokens in the batch (add_teacher)"
        )
    total = jnp.sum(jnp.where(mask, losses, 0))
    count, sums = jnp.sum(mask).astype(jnp.float32), {"divergence": total}
    loss = (1 - hard) * total
    if hard:
        nll, terms = nn.cross_entropy(hidden, weight, batch["targets"], softcap=head.softcap)
        loss, sums = loss + hard * nll, sums | terms
    return loss, jax.lax.stop_gradient(Stats(count, sums))
