"""Training losses of preferences, for models.

Pairs come in one of two forms. `{"chosen": {...}, "rejected": {...}}` has an array of rows for each; the loss puts
the two rows of a pair next to each other and runs the model once. A single batch has the answers of a pair as
consecutive segments of a row (1 chosen, 2 rejected, 3 chosen, ...), which trains in a 1F1B pipeline too.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib._utils.paths import dotted
from maxlib.ops import is_learned
from maxlib.post_training._models import frozen_log_probs
from maxlib.post_training._segments import is_filled, segment_sums, token_counts
from maxlib.post_training.preferences import DPO, KTO, Answers, Mixture, Preference
from maxlib.training._objectives.objective import Batch, Quotient, Stats, objective, scores
from maxlib.training._objectives.second_model import trained_and_frozen


def _compared(
    model: Any, batch: Batch, *, reference: Any = None, temperature: float = 1.0, **how: Any
) -> tuple[Any, Batch]:
    """Returns the trained model, and the batch with what the loss compares."""
    model, frozen = trained_and_frozen(model, reference)
    return model, _with_reference(model, frozen, batch, temperature=temperature, **how)


def _with_reference(model: Any, frozen: Any, batch: Batch, **options: Any) -> Batch:
    """Returns a batch with the reference's log-probabilities, if there is a reference model."""
    batch = interleaved(batch) if "chosen" in batch else batch
    if "mismatched" in batch:
        batch = _with_divergence(model, frozen, batch, **options)
    return batch if frozen is None else batch | {"reference_log_probs": frozen_log_probs(frozen, batch, **options)}


referenced = functools.partial(objective, prepare=_compared)


def interleaved(batch: Batch) -> Batch:
    """Joins chosen and rejected rows, `B ...` each, to `2B ...` with the two rows of a pair next to each other.

    Rows do not move between devices.
    """
    chosen, rejected = batch["chosen"], batch["rejected"]
    shapes_of = lambda part: {dotted(path): x.shape for path, x in jax.tree_util.tree_leaves_with_path(part)}
    if (ours := shapes_of(chosen)) != (theirs := shapes_of(rejected)):
        raise ValueError(f"chosen and rejected must have the same arrays of the same shapes, got {ours} and {theirs}")
    # [B, ...] and [B, ...] -> [B, 2, ...] -> [2B, ...]
    join = lambda c, r: jnp.stack([c, r], axis=1).reshape(-1, *c.shape[1:])
    joined = jax.tree.map(join, chosen, rejected)
    return joined | {"interleaved": jnp.zeros(len(joined["tokens"]))}


def _check_kind(kind: Any) -> None:
    if not isinstance(kind, Preference | Mixture):
        raise TypeError(f"kind must be a preference loss, such as post_training.DPO(beta=0.1), got {kind!r:.80}")


@referenced(reads=("chosen", "rejected", "interleaved", "reference_log_probs"))
def preference_loss(
    head: Any,
    hidden: Float[Array, "B T D"],
    batch: Batch,
    *,
    kind: Preference | Mixture = DPO(),
    temperature: float = 1.0,
) -> tuple[Float[Array, ""], Stats]:
    """Computes a preference loss, summed over pairs.

    Call it as `preference_loss(model, batch, key, *, kind, reference, temperature, dtype, remat)`. In packed pairs the
    segments of one number in both halves belong together. Metrics: `rewards/chosen`, `rewards/rejected`,
    `rewards/margins`, `rewards/accuracies`, `logps/chosen`, `logps/rejected`, and `nll` if the loss has it.

    The likelihood of ORPO and `ChosenNLL` is a mean over tokens of the (micro)batch, as TRL computes it; all other
    terms are exact over any number of microbatches.

        loss = functools.partial(preference_loss, kind=DPO(0.1), reference=adapters.base_model)
        trainer = training.Trainer(tuned, optimizer=training.adamw(1e-5), loader=loader, loss=loss)

    Args:
        head: The model.
        hidden: Its last hidden states.
        batch: Pairs in one of the forms above, with `reference_log_probs` unless there is a reference model.
        kind: The loss of pairs.
        temperature: Divisor of the logits.

    Raises:
        TypeError: when `kind` is no preference loss.
        ValueError: when `kind` needs a reference and there is none, or the batch does not define pairs.
    """
    _check_kind(kind)
    if kind.needs_reference and "reference_log_probs" not in batch:
        raise ValueError(no_reference(type(kind).__name__))
    if "interleaved" not in batch and "segment_ids" not in batch:
        raise ValueError(
            f"preference_loss finds no pairs in a batch of {sorted(batch)}: pass {{'chosen': {{...}}, 'rejected': "
            "{...}} with the rows of each (split rows of both that are stacked in one array), or 'segment_ids' with the "
            "answers of a pair as consecutive segments of a row"
        )
    segment_ids, mask = batch.get("segment_ids"), is_learned(batch["targets"])
    targets = _with_prompt(batch) if kind.nll_of_prompt else batch["targets"]
    scored = scores(head, hidden, targets, temperature=temperature).log_prob
    of_answers = lambda x: _answers(segment_sums(jnp.where(mask, x, 0), segment_ids), batch)
    counts = _answers(token_counts(mask, segment_ids), batch)
    is_pair = is_filled(counts[0]) * is_filled(counts[1])
    log_p = of_answers(scored)
    ratios = of_answers(scored - batch["reference_log_probs"]) if kind.needs_reference else log_p
    answers, pairs = Answers(*ratios, *counts), jnp.sum(is_pair)
    loss, rewards = jnp.sum(is_pair * kind(answers)), kind.rewards(answers)
    metrics = {"rewards/margins": rewards[0] - rewards[1], "rewards/accuracies": rewards[0] > rewards[1]}
    for i, name in enumerate(("chosen", "rejected")):
        metrics |= {f"rewards/{name}": rewards[i], f"logps/{name}": log_p[i]}
    sums = {name: jnp.sum(is_pair * value) for name, value in metrics.items()}
    if kind.nll:
        rows = jnp.arange(len(targets))[:, None]
        chosen = is_learned(targets) & (rows % 2 == 0 if "interleaved" in batch else batch["segment_ids"] % 2 == 1)
        sums["nll"] = -pairs * jnp.sum(jnp.where(chosen, scored, 0)) / jnp.maximum(jnp.sum(chosen), 1)
        loss += kind.nll * sums["nll"]
    return loss, jax.lax.stop_gradient(Stats(pairs, sums))


@referenced(reads=("desirable", "mismatched", "kl_baseline", "reference_log_probs"))
def kto_loss(
    head: Any, hidden: Float[Array, "B T D"], batch: Batch, *, kind: KTO = KTO(), temperature: float = 1.0
) -> tuple[Float[Array, ""], Stats]:
    """Computes KTO, summed over answers that are desirable or not; answers may be packed.

    Call it as `kto_loss(model, batch, key, *, kind, reference, temperature, dtype, remat)`. Metrics: `rewards`, `kl`
    (z), the means `rewards/desirable` and `rewards/undesirable` over one kind, and `desirable`, the share of that kind.

    Args:
        head: The model.
        hidden: Its last hidden states.
        batch: `tokens`, `targets`, `desirable` (`B`, or `B T` for packed rows), `reference_log_probs` as for
            `preference_loss`, and either `mismatched`, a nested batch of prompts with answers to other prompts (and its
            `reference_log_probs`), or `kl_baseline` by row, `B`, a precomputed z: then results do not depend on
            microbatches.
        kind: β and the weights of desirable and undesirable answers.
        temperature: Divisor of the logits.

    Raises:
        ValueError: when there is no reference, or nothing to estimate z from.
    """
    if "reference_log_probs" not in batch:
        raise ValueError(no_reference("KTO"))
    if "kl_baseline" not in batch:
        raise ValueError(
            "KTO needs batch['mismatched'], prompts with answers to other prompts, or batch['kl_baseline'], the "
            "divergence from the reference that was estimated on them"
        )
    segment_ids, mask = batch.get("segment_ids"), is_learned(batch["targets"])
    scored = scores(head, hidden, batch["targets"], temperature=temperature).log_prob
    ratio = segment_sums(jnp.where(mask, scored - batch["reference_log_probs"], 0), segment_ids)  # B S
    counts = token_counts(mask, segment_ids)
    desirable = batch["desirable"][:, None] if batch["desirable"].ndim == 1 else batch["desirable"]
    # [B, T] -> [B, S]: an answer is desirable if its tokens are marked so.
    desirable = segment_sums(jnp.where(mask, desirable, 0).astype(jnp.float32), segment_ids) > counts / 2
    is_answer = is_filled(counts)
    losses = kind(ratio, desirable, batch["kl_baseline"][:, None])
    rewards = is_answer * kind.beta * ratio
    of_kind = lambda kind: Quotient(jnp.sum(rewards * kind), jnp.sum(is_answer * kind))
    sums = {
        "kl": jnp.sum(is_answer * jnp.maximum(batch["kl_baseline"][:, None], 0)),
        "rewards": jnp.sum(rewards),
        "rewards/desirable": of_kind(desirable),
        "rewards/undesirable": of_kind(~desirable),
        "desirable": jnp.sum(is_answer * desirable),
    }
    return jnp.sum(is_answer * losses), jax.lax.stop_gradient(Stats(jnp.sum(is_answer), sums))


def no_reference(kind: str) -> str:
    return (
        f"{kind} compares with a reference: put its log-probabilities into the batch ('reference_log_probs', see add_reference), "
        "pass reference=adapters.base_model for a model with adapters, or train WithFrozen(model, reference)"
    )


def _answers(sums: Float[Array, "B S"], batch: Batch) -> tuple[Array, Array]:
    """Splits sums over segments into those of chosen and of rejected answers."""
    if "interleaved" in batch:
        pairs = sums.reshape(-1, 2, sums.shape[1])  # [2B, S] -> [B, 2, S]
        return pairs[:, 0], pairs[:, 1]
    pairs = jnp.pad(sums, ((0, 0), (0, sums.shape[1] % 2))).reshape(len(sums), -1, 2)  # [B, S] -> [B, S/2, 2]
    return pairs[..., 0], pairs[..., 1]


def _with_prompt(batch: Batch) -> Int[Array, "B T"]:
    """Returns the targets of prompts too: the next token of the same text."""
    following = lambda x: jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)
    targets, tokens, segment_ids = batch["targets"], batch["tokens"], batch.get("segment_ids")
    if segment_ids is not None:
        inside = (segment_ids > 0) & (following(segment_ids) == segment_ids)
    else:  # up to the last target of the row
        inside = jnp.flip(jnp.cumsum(jnp.flip(is_learned(targets), 1), axis=1), 1) > 0
    return jnp.where(is_learned(targets), targets, jnp.where(inside, following(tokens), -1))


def _with_divergence(model: Any, frozen: Any, batch: Batch, **options: Any) -> Batch:
    """Returns a batch with `kl_baseline`, the mean ratio of the answers in `mismatched`, for each row."""
    other = _with_reference(model, frozen, batch["mismatched"], **options)
    if "reference_log_probs" not in other:
        raise ValueError(no_reference("the divergence on batch['mismatched']"))
    ratio = frozen_log_probs(model, other, **options) - other["reference_log_probs"]
    mask = is_learned(other["targets"])
    answers = jnp.sum(is_filled(token_counts(mask, other.get("segment_ids"))))
    z = jnp.sum(jnp.where(mask, ratio, 0)) / jnp.maximum(answers, 1)
    return batch | {"kl_baseline": jnp.broadcast_to(z, len(batch["tokens"]))}
