"""The protocol of a training loss.

A loss is any function `loss(model, batch, key) -> (sum over targets, Stats)`. A loss made by `objective` is a function
of the last hidden states, so it can be split into the model's layers and the rest, which a pipeline runs in its last
stage (`one_f_one_b`).
"""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.training._objectives.batch_names import (
    INPUTS,
    check_batch,
    check_batch_names,
    check_has_targets,
    warn_of_unread,
)

Batch = dict[str, Any]
Loss = Callable[..., tuple[Array, "Stats"]]
Prepare = Callable[..., tuple[Any, Batch]]
COUNTS = "moe/counts"  # report of MoE layers for expert balancing; not a metric


class Quotient(NamedTuple):
    """A metric with its own divisor, such as a mean over some of the targets; both are summed over microbatches."""

    sum: Float[Array, ""]
    count: Float[Array, ""]


@nn.pytree
class Stats:
    """Counts and metrics of a loss.

    num_targets: divisor of the loss sum and weight of this batch: the number of target tokens, pairs or sequences. It
        must only depend on the batch. sums: metrics, each summed over these targets, or a `Quotient`. Both are summed
        over microbatches (and batches, in evaluation) before metrics are divided by the number of targets.
        expert_counts: how often each expert of each layer was chosen, `L E`, for expert balancing; `Objective` adds
        them.
    """

    num_targets: Float[Array, ""]
    sums: dict[str, Any]
    expert_counts: Any = None


class Objective:
    """A training loss written as a function of the last hidden states; `objective` makes one.

    Called as `loss(model, batch, key, *, dtype, remat, **options)`, it runs the model on the batch and adds the layers'
    reports: `loss/...` times the number of targets to the loss, and all of them to the metrics. `key` is not used. Pass
    options with `functools.partial`.

    Attributes:
        from_hidden: `(model, hidden, batch, **options) -> (sum, Stats)`.
        sums_over_rows: True if the loss and its reports are sums of independent contributions of the rows.
        reads: names in the batch besides tokens, targets and the model's inputs; None for any.
        prepare: changes the model and the batch before the model runs; None for no change.
    """

    def __init__(
        self,
        from_hidden: Callable[..., tuple[Array, Stats]],
        *,
        sums_over_rows: bool = True,
        reads: Collection[str] | None = None,
        prepare: Prepare | None = None,
    ):
        self.from_hidden, self.sums_over_rows, self.reads, self.prepare = from_hidden, sums_over_rows, reads, prepare
        self.__name__, self.__qualname__ = from_hidden.__name__, from_hidden.__qualname__
        self.__module__, self.__doc__ = from_hidden.__module__, from_hidden.__doc__
        self.__signature__ = _signature(from_hidden, prepare)

    def __call__(
        self,
        model: Any,
        batch: Batch,
        key: Array | None = None,
        *,
        dtype: Any = jnp.bfloat16,
        remat: nn.remat.Policy = None,
        **options: Any,
    ) -> tuple[Float[Array, ""], Stats]:
        """Runs `model` on the batch and returns `(loss sum, Stats)`, including the reports of its layers."""
        check_batch(batch)
        self.check_names(batch)
        if self.prepare is not None:
            own, theirs = _options(self.from_hidden), _options(self.prepare)
            given = {name: x for name, x in options.items() if name in theirs}
            model, batch = self.prepare(model, batch, dtype=dtype, remat=remat, **given)
            options = {name: x for name, x in options.items() if name in own or name not in theirs}
        out = run(model, batch, dtype=dtype, remat=remat)
        loss, stats = self.from_hidden(model, out.hidden, batch, **options)
        return loss + stats.num_targets * own_losses(out.aux), with_reports(stats, out.aux)

    def check_names(self, batch: Batch) -> None:
        """Raises ValueError for another library's name of an input that the loss reads, and without targets."""
        if self.reads is not None:
            check_batch_names(self.__name__, batch, self.reads)
            check_has_targets(self.__name__, batch)

    def __repr__(self) -> str:
        return f"<objective {self.__module__}.{self.__qualname__}>"


@overload
def objective(from_hidden: Callable[..., tuple[Array, Stats]]) -> Objective: ...
@overload
def objective(
    *, sums_over_rows: bool = True, reads: Collection[str] | None = None, prepare: Prepare | None = None
) -> Callable[[Callable[..., tuple[Array, Stats]]], Objective]: ...
def objective(
    from_hidden: Any = None,
    *,
    sums_over_rows: bool = True,
    reads: Collection[str] | None = None,
    prepare: Prepare | None = None,
) -> Any:
    """Makes a training loss of `from_hidden(model, hidden, batch, **options) -> (sum, Stats)`; a decorator.

    The loss works wherever `next_token_loss` does, which is made in the same way: with autodiff, with microbatches, on
    any mesh, in a 1F1B pipeline, and in plans. Write it with `nn.token_log_probs` or `nn.cross_entropy`, which never
    store all logits and follow the current mesh.

    Args:
        from_hidden: takes `model`, of which only `head_weight()`, `softcap`, `logits` and parts outside of its layers
            may be used; `hidden`, `B T D` after the final norm; `batch`, whose `tokens`, `positions`, `segment_ids`,
            `valid`, `images` and `audio` were the model's inputs; and its options, by keyword. It returns the loss
            summed over the targets, and `Stats`.
        sums_over_rows: True if the loss of a batch, including its reports, is the sum of the losses of its rows. Then
            the devices of a pipeline sum gradients only once. Use False for a loss with its own layers whose reports
            depend on all rows. Microbatches always change a loss that compares rows: put related sequences into one
            row.
        reads: names that the loss reads in the batch besides `tokens`, `targets` and the model's inputs. If given,
            masks and other libraries' names of these inputs raise an error, and unread names a warning. None (the
            default) accepts any batch.
        prepare: `(model, batch, *, dtype, remat, **options) -> (model, batch)`, applied before the model runs, such as
            to add the outputs of a second model. A 1F1B pipeline does not apply it. Its options are the loss's too.
    """
    make = functools.partial(Objective, sums_over_rows=sums_over_rows, reads=reads, prepare=prepare)
    return make if from_hidden is None else make(from_hidden)


def split_options(loss: Loss) -> tuple[Objective, dict[str, Any]]:
    """Returns the objective inside `loss`, which may be a `functools.partial` of it, and its options.

    Raises:
      TypeError: for any other function, which cannot be split.
    """
    if isinstance(loss, functools.partial) and not loss.args:
        inner, options = split_options(loss.func)
        return inner, options | loss.keywords
    if not isinstance(loss, Objective):
        raise TypeError(
            "a 1F1B pipeline needs a loss that is a function of the last hidden states, decorated with "
            f"training.objective, or functools.partial of one; got {loss!r}. Any other loss trains without "
            "one_f_one_b, where autodiff makes the pipeline GPipe"
        )
    return loss, {}


def unwrap(loss: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the innermost loss, an `Objective` or another function, and the options from all of its wrappers."""
    if isinstance(loss, functools.partial):
        given = dict(loss.keywords)
        inner, options = unwrap(given.pop("loss", loss.func))
        return inner, options | given
    return unwrap(loss.loss) if hasattr(loss, "loss") else (loss, {})


def check_read(loss: Any, batch: Batch) -> None:
    """Warns about unread names in a batch; skipped if a function of the user's wraps the objective, which may
    read any.
    """
    inner, _ = unwrap(loss)
    if isinstance(inner, Objective) and inner.reads is not None:
        warn_of_unread(inner.__name__, batch, inner.reads)


def run(model: Any, batch: Batch, **options: Any) -> nn.Output:
    """Runs a model on a batch's tokens and other model inputs; `options` are dtype and remat."""
    return model(batch["tokens"], **options, **{name: batch[name] for name in INPUTS if name in batch})


def scores(head: Any, hidden: Float[Array, "B T D"], targets: Any, **options: Any) -> nn.TokenLogProbs:
    """Computes a head's log-probabilities of targets."""
    return nn.token_log_probs(hidden, head.head_weight(), targets, softcap=head.softcap, **options)


def own_losses(aux: dict[str, Array]) -> Float[Array, ""]:
    """Sums the layers' own losses per target: reports named `loss/...`."""
    values = [jnp.sum(value) for name, value in aux.items() if name.startswith("loss/")]
    return sum(values, start=jnp.zeros(()))


def with_reports(stats: Stats, aux: dict[str, Array]) -> Stats:
    """Adds the layers' reports, times the number of targets, to the metrics.

    Rows that the loss itself reports under the same name, such as those of MTP modules, are appended.
    """
    sums = dict(stats.sums)
    counts = [rows for rows in (aux.get(COUNTS), stats.expert_counts) if rows is not None]
    for name, value in ((name, value) for name, value in aux.items() if name != COUNTS):
        rows = value.astype(jnp.float32) * stats.num_targets
        sums[name] = jnp.concatenate([rows, sums[name]]) if name in sums else rows
    return jax.lax.stop_gradient(Stats(stats.num_targets, sums, jnp.concatenate(counts) if counts else None))


def _options(function: Callable | None) -> dict[str, inspect.Parameter]:
    """Returns the parameters by keyword, by name."""
    parameters = {} if function is None else inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}


def _signature(from_hidden: Callable, prepare: Callable | None) -> inspect.Signature:
    """Builds the signature of `Objective.__call__`, with the options of both functions by name."""
    own = dict(inspect.signature(Objective.__call__).parameters)
    del own["self"], own["options"]
    return inspect.Signature([*(own | _options(from_hidden) | _options(prepare) | own).values()])
