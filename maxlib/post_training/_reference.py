"""Second models: a frozen reference or teacher beside the trained model, and losses that compare with a reference."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn
from maxlib._utils.paths import dotted
from maxlib.ops import LogProbs, is_learned
from maxlib.post_training._segments import is_filled, token_counts
from maxlib.training.losses import Batch, Loss, run_model, score


class WithFrozen(nn.tree.HasFrozen):
    """A trained model together with a frozen one: the reference of preferences and policies, or a teacher.

    A `Trainer` and `make_state` exclude the frozen model: it has no gradients, moments or weight decay. Your own filter
    decides for both models: begin its patterns with "trained.".

    Args:
        trained: The model to train.
        frozen: The other model, of any architecture; pass `trained` itself for its current state.
    """

    frozen_parts = ("frozen",)

    def __init__(self, trained: Any, frozen: Any):
        # Separate variables (arrays may be shared), so that training never changes the frozen model.
        self.trained, self.frozen = trained, jax.tree.map(lambda x: x, frozen)


def trained_and_frozen(model: Any, other: Callable[[Any], Any] | None) -> tuple[Any, Any]:
    """Returns the model to train and the one to compare with: `other(model)`, that of `WithFrozen`, or None."""
    if other is not None and (not callable(other) or nn.variables(other)):
        raise TypeError(
            "a reference or teacher must be a function from the trained model to the other one, such as "
            f"adapters.base_model, got {type(other).__name__}: put a model of its own beside the trained one, "
            "WithFrozen(trained, frozen)"
        )
    if other is not None:
        return model, other(model)
    return (model.trained, model.frozen) if isinstance(model, WithFrozen) else (model, None)


@dataclasses.dataclass(frozen=True)
class MovingReference:
    """Callback of a `Trainer` that moves the frozen model of `WithFrozen` towards the trained one (arXiv:2404.09656).

        callbacks = [(512, post_training.MovingReference(0.6))]  # of a Trainer

    Args:
        alpha: α in `reference = α policy + (1 - α) reference`.

    Raises:
        ValueError: when the model has no reference of its own architecture, or checkpoints do not have it.
    """

    alpha: float = 0.6

    def __call__(self, trainer: Any) -> None:
        """Replaces the reference in the trainer's state."""
        state, model = trainer.state, trainer.state.model
        if not isinstance(model, WithFrozen) or jax.tree.structure(model.trained) != jax.tree.structure(model.frozen):
            raise ValueError("a moving reference needs WithFrozen(model, reference) with two equal architectures")
        if getattr(trainer.checkpointer, "base", None) is not None:
            raise ValueError(
                "a Checkpointer(base=...) saves no frozen weights, so a moved reference would be lost: omit base"
            )

        def mixed(policy: Array, reference: Array) -> Array:
            if not jnp.issubdtype(reference.dtype, jnp.inexact):
                return reference
            return (self.alpha * policy + (1 - self.alpha) * reference).astype(reference.dtype)

        moved = nn.variables({"frozen": jax.tree.map(mixed, model.trained, model.frozen)})
        values = {path: variable.get_value() for path, variable in moved.items()}
        trainer.state = dataclasses.replace(state, rest=nn.combine(values, state.rest))


def log_probs(
    model: Any,
    batch: Batch,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    dtype: Any = jnp.bfloat16,
    remat: nn.remat.Policy = None,
) -> LogProbs:
    """Computes the log-probabilities of a batch's targets, without storing all logits.

    Args:
        model: Any `nn.Model`.
        batch: `tokens` and `targets` (-1: not scored), and other inputs of the model.
        temperature: Divisor of the logits; for a policy, the temperature of its sampler.
        entropy: True computes entropies too.
        dtype: Dtype of the computation.
        remat: What layers keep for a backward pass.

    Returns:
        One value per token, 0 where it is not scored.
    """
    hidden = run_model(model, batch, dtype=dtype, remat=remat).hidden
    return score(model, hidden, batch["targets"], temperature=temperature, entropy=entropy)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencedLoss(Loss):
    """Base class of losses that may compare with a reference.

    The reference's log-probabilities are `reference_log_probs` in the batch (`add_reference`), or come from
    `reference(model)`, or from the frozen model of `WithFrozen`.

    Args:
        reference: Function from the trained model to the reference, such as `adapters.base_model`.
        temperature: Divisor of the logits; for a policy, the temperature of its sampler.
    """

    reference: Callable[[Any], Any] | None = None
    temperature: float = 1.0
    others: ClassVar[Collection[str]] = ("reference",)

    def prepare(self, model: Any, batch: Batch, *, dtype: Any, remat: nn.remat.Policy) -> tuple[Any, Batch]:
        """Returns the trained model, and the batch with what the loss compares."""

        def frozen_log_probs(model: Any, batch: Batch) -> Float[Array, "B T"]:
            model = jax.lax.stop_gradient(model)
            scored = log_probs(model, batch, temperature=self.temperature, dtype=dtype, remat=remat)
            return jax.lax.stop_gradient(scored.log_prob)

        def with_reference(batch: Batch) -> Batch:
            batch = interleaved(batch) if "chosen" in batch else batch
            if "mismatched" in batch:
                other = with_reference(batch["mismatched"])
                if "reference_log_probs" not in other:
                    raise ValueError(missing_reference("the divergence on batch['mismatched']"))
                ratio = frozen_log_probs(model, other) - other["reference_log_probs"]
                batch = batch | {"kl_baseline": _mean_of_answers(ratio, other, rows=len(batch["tokens"]))}
            check_temperature("reference", batch, self.temperature)
            return batch if frozen is None else batch | {"reference_log_probs": frozen_log_probs(frozen, batch)}

        model, frozen = trained_and_frozen(model, self.reference)
        return model, with_reference(batch)


def check_temperature(what: str, batch: Batch, temperature: float) -> None:
    """Raises ValueError if the reference or the teacher of `add_reference` or `add_teacher` has another temperature."""
    there = getattr(batch.get(f"{what}_sampler"), "temperature", temperature)
    if there != temperature:
        raise ValueError(
            f"the {what} was scored at temperature {there}, the loss has {temperature}: give both the same"
        )


def _mean_of_answers(ratio: Float[Array, "B T"], batch: Batch, *, rows: int) -> Float[Array, " R"]:
    """Returns the mean over a batch's answers of sums over their tokens, for each of `rows`."""
    mask = is_learned(batch["targets"])
    answers = jnp.sum(is_filled(token_counts(mask, batch.get("segment_ids"))))
    return jnp.broadcast_to(jnp.sum(jnp.where(mask, ratio, 0)) / jnp.maximum(answers, 1), rows)


def interleaved(batch: Batch, names: Sequence[str] = ("chosen", "rejected")) -> Batch:
    """Joins the rows of R parts, `B ...` each, to `B R ...` with those that belong together next to each other.

    Rows do not move between devices.
    """
    parts = [batch[name] for name in names]
    shapes = [{dotted(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(part)} for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"{' and '.join(names)} must have the same arrays of the same shapes, got {shapes}")
    # [B, ...] of each -> [B, R, ...] -> [B * R, ...]
    joined = jax.tree.map(lambda *x: jnp.stack(x, axis=1).reshape(-1, *x[0].shape[1:]), *parts)
    return joined | {"interleaved": jnp.zeros((len(joined["tokens"]), len(names)))}


def missing_reference(what: str) -> str:
    """Returns the message of an error for a batch without a reference."""
    return (
        f"{what} compares with a reference: put its log-probabilities into the batch ('reference_log_probs', see "
        "add_reference), pass reference=adapters.base_model for a model with adapters, or train WithFrozen(model, "
        "reference)"
    )
