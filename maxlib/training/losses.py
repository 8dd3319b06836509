"""Training losses: the base class `Loss`, and the losses of language models.

A loss is any function `loss(model, batch, key) -> (sum over targets, Stats)`. A subclass of `Loss` is a function of the
last hidden states, so it can be split into the model's layers and the rest, which a 1F1B pipeline runs in its last
stage.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable, Collection
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.nn.mtp import shift_left
from maxlib.training._batch_checks import (
    INPUTS,
    check_batch,
    check_batch_names,
    check_has_targets,
    trained_model,
    warn_of_unread,
)

Batch = dict[str, Any]
LossFunction = Callable[..., tuple[Array, "Stats"]]
EXPERT_COUNTS = "moe/counts"  # report of MoE layers for expert balancing; not a metric


class Quotient(NamedTuple):
    """A metric with its own divisor, such as a mean over some of the targets; both are summed over microbatches."""

    sum: Float[Array, ""]
    count: Float[Array, ""]


class MacroMean(NamedTuple):
    """A metric that is the unweighted mean of several quotients, of those with a divisor above 0.

    Sums and counts are added over microbatches and batches.
    """

    sums: Float[Array, " S"]
    counts: Float[Array, " S"]


@nn.pytree
class Stats:
    """Counts and metrics of a loss, summed over microbatches (and batches, in evaluation).

    Args:
        num_targets: Divisor of the loss sum and weight of this batch: the number of target tokens, pairs or sequences.
            It must only depend on the batch.
        sums: Metrics, each summed over these targets, or a `Quotient`, or a `MacroMean`.
        expert_counts: How often each expert of each layer was chosen, `L E`, for expert balancing; `Loss` adds them.
    """

    num_targets: Float[Array, ""]
    sums: dict[str, Any]
    expert_counts: Any = None


@dataclasses.dataclass(frozen=True)
class Loss:
    """Base class of losses that are functions of the last hidden states; a subclass defines `from_hidden`.

    Such a loss works with autodiff, with microbatches, on any mesh, in a 1F1B pipeline, and in plans. Its options are
    the fields of a frozen dataclass. Write it with `nn.token_log_probs` or `nn.cross_entropy`, which never store all
    logits and follow the current mesh.

        @dataclasses.dataclass(frozen=True)
        class Focal(training.Loss):
            gamma: float = 2.0

            def from_hidden(self, model, hidden, batch):
                log_prob = training.losses.score(model, hidden, batch["targets"]).log_prob
                loss = -jnp.sum((1 - jnp.exp(log_prob)) ** self.gamma * log_prob)
                return loss, training.Stats(jnp.sum(batch["targets"] >= 0), {"nll": -jnp.sum(log_prob)})

    Attributes:
        reads: Names that the loss reads in the batch besides `tokens`, `targets` and the model's inputs. If set, a
            mask, or another library's name for one of these inputs, raises an error, and a name that is not read gives
            a warning. None accepts any batch.
        sums_over_rows: True if the loss of a batch and its reports are the sums of those of its rows; the devices of a
            pipeline then sum gradients only once. Set it to False if the loss runs layers of its own (as `MTP` does)
            that report values computed from all rows together, such as expert loads. A loss that compares rows gives a
            different result with microbatches in any case: put related sequences into one row.
        reads_targets: False if the loss does not need `targets`.
        others: Fields that are functions from the model to another one, such as a reference; dropout and noise are
            only in the model itself.
    """

    reads_targets: ClassVar[bool] = True
    reads: ClassVar[Collection[str] | None] = None
    sums_over_rows: ClassVar[bool] = True
    others: ClassVar[Collection[str]] = ()

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        """Returns the loss summed over the targets, and `Stats`.

        Args:
            model: The model. Use only its `head_weight()`, `softcap`, `logits`, and modules outside of its layers.
            hidden: Its last hidden states, after the final norm.
            batch: The batch, whose `tokens`, `positions`, `segment_ids`, `valid`, `images`, `audio` and `source` were
                the model's inputs.
        """
        raise NotImplementedError(f"{type(self).__name__} must define from_hidden(model, hidden, batch)")

    def prepare(self, model: Any, batch: Batch, *, dtype: Any, remat: nn.remat.Policy) -> tuple[Any, Batch]:
        """Returns the model to run and its batch, for losses that add the outputs of a second model.

        A 1F1B pipeline refuses a loss that changes anything here.
        """
        return model, batch

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: Array | None = None,
        *,
        dtype: Any = jnp.bfloat16,
        remat: nn.remat.Policy = None,
    ) -> tuple[Float[Array, ""], Stats]:
        """Runs the model on a batch and returns `(loss sum, Stats)`.

        Reports of layers named `loss/...` are added to the loss, times the number of targets. All reports become
        metrics.

        Args:
            model: The model.
            batch: Its inputs and the loss's.
            key: Not used.
            dtype: Dtype of the computation.
            remat: What the layers keep for the backward pass.

        Raises:
            ValueError: when the batch has another library's name of an input that the loss reads, or no targets.
        """
        check_batch(batch)
        self.check_names(batch)
        model, batch = self.prepare(model, batch, dtype=dtype, remat=remat)
        output = run_model(model, batch, dtype=dtype, remat=remat)
        loss, stats = self.from_hidden(model, output.hidden, batch)
        return loss + stats.num_targets * layer_losses(output.aux), with_reports(stats, output.aux)

    def check_names(self, batch: Batch) -> None:
        """Raises ValueError if the batch has another library's name for an input of the loss, or no targets."""
        if self.reads is not None:
            check_batch_names(type(self).__name__, batch, self.reads)
            if self.reads_targets:
                check_has_targets(type(self).__name__, batch)

    def warn_of_unread(self, batch: Batch) -> None:
        """Warns about names in the batch that the loss does not read."""
        if self.reads is not None:
            warn_of_unread(type(self).__name__, batch, self.reads)


@dataclasses.dataclass(frozen=True)
class NextToken(Loss):
    """Cross-entropy of `batch["targets"]` (-1: ignored) given `batch["tokens"]`, in nats.

    If the batch has `loss_weights`, `B T` (`data.pack(loss_weights=True)`), the loss is the mean with these weights of
    the targets, Σ wᵢ lossᵢ / Σ wᵢ, and `num_targets` is the sum of the weights. Metrics are `nll` (without weights,
    smoothing, z-loss and the layers' own losses), `accuracy`, and the layers' reports.

    Args:
        z_loss: Factor of the squared log-sum-exp (PaLM, arXiv:2204.02311).
        label_smoothing: Probability mass spread evenly over the vocabulary.
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0
    reads: ClassVar[Collection[str]] = ("loss_weights",)

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        weights = batch.get("loss_weights")
        loss, sums = nn.cross_entropy(
            hidden,
            model.head_weight(),
            batch["targets"],
            weights=weights,
            softcap=model.softcap,
            z_loss=self.z_loss,
            label_smoothing=self.label_smoothing,
        )
        return loss, _weighted_stats(batch, sums)


def _weighted_stats(batch: Batch, sums: dict[str, Array]) -> Stats:
    """Returns the statistics of a mean over targets with the batch's `loss_weights`, if any; `sums` have no weights."""
    count = num_learned(batch)
    if "loss_weights" not in batch:
        return Stats(count, sums)
    total = jnp.sum(jnp.where(ops.is_learned(batch["targets"]), batch["loss_weights"], 0), dtype=jnp.float32)
    return Stats(total, {name: Quotient(value, count) for name, value in sums.items()})


@dataclasses.dataclass(frozen=True)
class BySource(Loss):
    """Cross-entropy as `NextToken`, with metrics for each source of the text, for evaluation.

    Reads `batch["sources"]`, the number of each token's source, as `data.pack(sources=)` writes it; without names of
    sources it is not needed. `nll`, `accuracy` and `bits_per_byte` are means over all targets (micro). For each source
    there are `NAME/nll`, `NAME/bits_per_byte` and `NAME/share`, its share of the targets, so `nll` is the sum of all
    `NAME/share` times `NAME/nll`. `macro_nll` and `macro_bits_per_byte` are the means over the sources that have
    targets.

    Bits per byte, Σ nll / (ln 2 Σ bytes), do not depend on how a tokenizer divides a text, so they compare models with
    different tokenizers.

    Args:
        sources: Names of the sources, in the order of their numbers.
        byte_lengths: Bytes of each token (`tokenization.byte_lengths`), for bits per byte; None computes none.
    """

    sources: tuple[str, ...] = ()
    byte_lengths: Any = dataclasses.field(default=None, repr=False, compare=False)
    reads: ClassVar[Collection[str]] = ("sources",)

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        targets = batch["targets"]
        scored = score(model, hidden, targets)
        values = {"nll": (-scored.log_prob, ops.is_learned(targets).astype(jnp.float32))}
        if self.byte_lengths is not None:
            sizes = jnp.asarray(self.byte_lengths, jnp.float32)
            values["bits_per_byte"] = (-scored.log_prob / math.log(2), values["nll"][1] * sizes[targets])
        stats = Stats(num_learned(batch), {"accuracy": jnp.sum(scored.correct, dtype=jnp.float32)})
        for name, (value, weight) in values.items():
            stats.sums[name] = Quotient(jnp.sum(value), jnp.sum(weight))
        for name, (value, weight) in values.items() if self.sources else ():
            # [B, T] -> [sources]
            sums, weights = self._sums(value, batch["sources"]), self._sums(weight, batch["sources"])
            stats.sums[f"macro_{name}"] = MacroMean(sums, weights)
            for i, source in enumerate(self.sources):
                stats.sums[f"{source}/{name}"] = Quotient(sums[i], weights[i])
                if name == "nll":
                    stats.sums[f"{source}/share"] = weights[i]
        return -jnp.sum(scored.log_prob), jax.lax.stop_gradient(stats)

    def _sums(self, values: Float[Array, "B T"], sources: Int[Array, "B T"]) -> Float[Array, " S"]:
        """Sums the values of each source."""
        return jnp.stack([jnp.sum(jnp.where(sources == i, values, 0)) for i in range(len(self.sources))])


@dataclasses.dataclass(frozen=True)
class DFT(Loss):
    """Dynamic fine-tuning (arXiv:2508.05629): the cross-entropy of each target times its probability.

    The factor has no gradient: -Σ sg(p) log p. Metrics, and `loss_weights`, are those of `NextToken`.
    """

    reads: ClassVar[Collection[str]] = ("loss_weights",)

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        scored = score(model, hidden, batch["targets"])
        losses = -jax.lax.stop_gradient(jnp.exp(scored.log_prob)) * scored.log_prob  # 0 for ignored targets
        sums = {"nll": -jnp.sum(scored.log_prob), "accuracy": jnp.sum(scored.correct, dtype=jnp.float32)}
        loss = jnp.sum(losses * batch.get("loss_weights", 1.0))
        return loss, jax.lax.stop_gradient(_weighted_stats(batch, sums))


@dataclasses.dataclass(frozen=True)
class MTP(Loss):
    """`NextToken` plus the losses of multi-token prediction modules (DeepSeek V3, arXiv:2412.19437).

    The modules of `model.predict_ahead` (`nn.mtp.predict_ahead` has the details) add `weight` times their
    cross-entropy, summed over targets and averaged over modules, and the losses of their blocks; `loss_weights` of the
    batch are those of their targets too. Additional metrics are
    `mtp1/nll` and `mtp1/accuracy` of the first module, and so on; the modules' rows are appended to the layers'
    reports. Batches with images or audio raise ValueError.

    Args:
        weight: Factor of the modules' loss; DeepSeek V3 begins with 0.3 and ends with 0.1.
        z_loss: As in `NextToken`, for the model's own prediction.
        label_smoothing: As in `NextToken`, for the model's own prediction.
        remat_modules: What the modules keep for the backward pass.
    """

    weight: float = 0.3
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    remat_modules: nn.remat.Policy = None
    reads: ClassVar[Collection[str]] = ("loss_weights",)
    sums_over_rows: ClassVar[bool] = False

    def from_hidden(self, model: Any, hidden: Float[Array, "B T D"], batch: Batch) -> tuple[Float[Array, ""], Stats]:
        if media := [name for name in ("images", "audio") if name in batch]:
            raise ValueError(
                f"multi-token prediction modules support text only, but this batch has {media[0]}: train with NextToken"
            )
        loss, stats = NextToken(self.z_loss, self.label_smoothing).from_hidden(model, hidden, batch)
        inputs = {name: batch[name] for name in ("positions", "segment_ids", "valid") if name in batch}
        modules = model.predict_ahead(hidden, batch["tokens"], remat=self.remat_modules, **inputs)
        sums = dict(stats.sums)
        for depth, module in enumerate(modules, start=1):
            targets = jnp.where(module.valid, shift_left(batch["targets"], depth, fill=-1), -1)
            weights = shift_left(batch["loss_weights"], depth, fill=0) if "loss_weights" in batch else None
            added, terms = nn.cross_entropy(
                module.hidden, model.head_weight(), targets, weights=weights, softcap=model.softcap
            )
            loss += self.weight / len(modules) * added + stats.num_targets * layer_losses(module.aux)
            count = jnp.sum(ops.is_learned(targets))
            sums |= {f"mtp{depth}/{name}": Quotient(value, count) for name, value in terms.items()}
        reports = _stacked_reports(modules)
        counts = reports.pop(EXPERT_COUNTS, None)
        sums |= {name: rows * stats.num_targets for name, rows in reports.items()}
        return loss, jax.lax.stop_gradient(Stats(stats.num_targets, sums, counts))


def _stacked_reports(modules: list[nn.mtp.MTPOutput]) -> dict[str, Array]:
    """Returns the reports of the modules' blocks, with a row for each module."""
    names = [name for name in (modules[0].aux if modules else ()) if all(name in module.aux for module in modules)]
    return {name: jnp.stack([module.aux[name] for module in modules]).astype(jnp.float32) for name in names}


def run_model(model: Any, batch: Batch, **options: Any) -> nn.Output:
    """Runs a model on a batch's tokens and other model inputs.

    Args:
        model: The model.
        batch: The batch.
        options: The model's `dtype` and `remat`.
    """
    return model(batch["tokens"], **options, **{name: batch[name] for name in INPUTS if name in batch})


def score(
    model: Any, hidden: Float[Array, "B T D"], targets: Any, *, temperature: float = 1.0, entropy: bool = False
) -> ops.LogProbs:
    """Computes the log-probabilities of targets from the last hidden states, without storing all logits.

    Args:
        model: The model.
        hidden: Its last hidden states.
        targets: Token ids, -1 where nothing is scored.
        temperature: Divisor of the logits, above 0.
        entropy: True computes entropies too.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, the one that tokens are drawn at, got {temperature}")
    return nn.token_log_probs(
        hidden, model.head_weight(), targets, softcap=model.softcap, temperature=temperature, entropy=entropy
    )


def num_learned(batch: Batch) -> Float[Array, ""]:
    """Counts the targets that are learned."""
    return jnp.sum(ops.is_learned(batch["targets"])).astype(jnp.float32)


def layer_losses(aux: dict[str, Array]) -> Float[Array, ""]:
    """Sums the layers' own losses per target: reports named `loss/...`."""
    values = [jnp.sum(value) for name, value in aux.items() if name.startswith("loss/")]
    return sum(values, start=jnp.zeros(()))


def with_reports(stats: Stats, aux: dict[str, Array]) -> Stats:
    """Adds the layers' reports, times the number of targets, to the metrics.

    Rows that the loss itself reports under the same name, such as those of MTP modules, are appended.
    """
    sums = dict(stats.sums)
    for name, value in aux.items():
        if name != EXPERT_COUNTS:
            rows = value.astype(jnp.float32) * stats.num_targets
            sums[name] = jnp.concatenate([rows, sums[name]]) if name in sums else rows
    counts = [rows for rows in (aux.get(EXPERT_COUNTS), stats.expert_counts) if rows is not None]
    return jax.lax.stop_gradient(Stats(stats.num_targets, sums, jnp.concatenate(counts) if counts else None))


def check_remat_names(remat: nn.remat.Policy, params: dict[str, Any], rest: Any, batch: Batch) -> None:
    """Raises ValueError if `remat` has a name that no layer marks, which would silently keep nothing.

    Names of maxlib's layers are known. Other names need an additional trace of the forward and backward pass.

    Args:
        remat: The policy.
        params: Trained parameters by path.
        rest: The rest of the model.
        batch: Arrays or their shapes.
    """
    if remat is None or isinstance(remat, str) or callable(remat) or set(remat) <= set(nn.remat.INTERMEDIATES):
        return
    marked = _marked_names(params, rest, batch)
    if unknown := sorted(set(remat) - set(nn.remat.INTERMEDIATES) - marked):
        known = [name for name in nn.remat.INTERMEDIATES if name in marked]
        known += sorted(marked - set(known))
        near = difflib.get_close_matches(unknown[0], known, 1)
        raise ValueError(
            f"remat names {', '.join(map(repr, unknown))}, which no layer marks; this model's layers mark "
            f"{', '.join(known)}" + (f": did you mean {near[0]!r}?" if near else "")
        )


def _marked_names(params: dict[str, Any], rest: Any, batch: Batch) -> set[str]:
    """Returns the names that the model's layers give to intermediates with `checkpoint_name`."""
    names = set()

    def note(primitive: Any, *_: Any, **params: Any) -> bool:
        if primitive.name == "name":
            names.add(params["name"])
        return False

    def total(params: dict[str, Any], batch: Batch) -> Array:
        return run_model(trained_model(nn.combine(params, rest)), batch, remat=note).hidden.sum()

    while "tokens" not in batch and (parts := [x for x in batch.values() if isinstance(x, dict)]):
        batch = parts[0]  # such as the chosen answers of pairs
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (params, batch))
    jax.eval_shape(jax.grad(total), *shapes)
    return names
