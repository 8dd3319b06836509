"""The gradient of a decoder in a 1F1B pipeline (arXiv:1806.03377), without autodiff through the whole batch."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.sharding import pipelining
from maxlib.training._batch_checks import INPUTS
from maxlib.training._gradients import check_rows, divisor, with_embedding_noise
from maxlib.training.losses import Batch, Loss, LossFunction, Stats, layer_losses, with_reports


def pipelined_gradient(
    loss: LossFunction,
    trainable: dict[str, Any],
    rest: Any,
    batch: Batch,
    key: Array,
    *,
    dtype: Any = None,
    remat: nn.remat.Policy = None,
    neftune_alpha: float | None = None,
) -> tuple[dict[str, Any], Array, Stats]:
    """Computes the gradient of the mean loss, the mean loss, and the statistics of a batch by the 1F1B schedule.

    For S stages and V repeats it keeps the layer inputs of at most `2 S V - 1` chunks (periods of the stack), not the
    residuals of every microbatch, and recomputes one chunk at a time, as remat "full" does.

    Args:
        loss: A `Loss`.
        trainable: Trained parameters by path.
        rest: The rest of the model.
        batch: The batch.
        key: Random key of the noise.
        dtype: Dtype of the computation; None for bfloat16.
        remat: Policy of the layers before and after the pipeline.
        neftune_alpha: Size of the noise of embeddings, as in `make_train_step`.

    Raises:
        TypeError: for another loss, or if the model is not a `nn.stack.SupportsPipelining` with repeated layers.
        ValueError: for an array without the batch's rows, or a loss that adds the outputs of a second model.
    """
    if not isinstance(loss, Loss):
        raise TypeError(
            "a 1F1B pipeline needs a loss that is a function of the last hidden states, a subclass of training.Loss; got "
            f"{loss!r}. Any other loss trains with sharding.Pipeline(schedule='gpipe')"
        )
    dtype = jnp.bfloat16 if dtype is None else dtype
    _check_model(rest)
    loss.check_names(batch)
    model = nn.combine(trainable, rest)
    prepared = loss.prepare(model, batch, dtype=dtype, remat=remat)
    if prepared[0] is not model or prepared[1] is not batch:
        raise ValueError(
            f"a 1F1B pipeline runs one model on one array of tokens, but {loss} compares with a second model or array: put "
            "the second model's outputs into the batch (post_training.add_reference, add_teacher), and pairs as segments "
            "of a row, or use sharding.Pipeline(schedule='gpipe')"
        )
    check_rows(_without_inputs(batch))
    body, outer, inside = _split(trainable, rest)
    parts = _Parts(rest, batch, loss.from_hidden, dtype, remat, neftune_alpha, key)

    (x, added), pull, (ctx, targets, first) = jax.vjp(parts.before, outer, has_aux=True)
    _check_context(parts.before, outer, ctx)
    sums_over_rows = loss.sums_over_rows and not _reports(model.layers, x, ctx)
    (total, (stats, last, microbatches), aux), (d_body, d_outer, d_x) = pipelining.one_f_one_b(
        parts.stage,
        parts.after,
        body,
        rest.layers.groups[rest.layers.staged],
        outer,
        x,
        (ctx, targets, _without_inputs(batch)),
        sums_over_rows=sums_over_rows,
    )
    d_before = pull((d_x, jnp.ones_like(added)))[0]
    d_outer = jax.tree.map(jnp.add, _head_gradients(d_outer, rest), d_before)
    grads = {inside + path: g for path, g in d_body.items()} | d_outer
    count = divisor(stats.num_targets)
    aux = rest.layers.in_layer_order([*first, aux, *jax.tree.map(lambda a: a / microbatches, last)])
    means = jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, trainable)  # sums are float32
    return means, (total + added) / count, with_reports(stats, aux)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a model before its pipeline, in a stage, and after it.

    Args:
        rest: The model without the trained arrays.
        batch: The whole batch, with its images, for `before`; `after` gets a microbatch without.
        from_hidden: `(model, hidden, batch) -> (loss, Stats)`.
        dtype: Dtype of the computation.
        remat: Policy of the layers before and after the pipeline.
        neftune_alpha: Size of the embeddings' noise, or None.
        key: Its random key.
    """

    rest: Any
    batch: Batch
    from_hidden: Callable[..., tuple[Array, Stats]]
    dtype: Any
    remat: Any
    neftune_alpha: float | None
    key: Array

    def before(self, outer: dict[str, Any]) -> Any:
        """Embeds the tokens, runs the layers before the pipeline, and sums their own losses."""
        model, batch = nn.combine(outer, self.rest), self.batch
        if self.neftune_alpha:
            model = with_embedding_noise(model, self.key, self.neftune_alpha)
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        embedded, inputs = model.embed_inputs(batch["tokens"], dtype=self.dtype, remat=self.remat, **inputs)
        x, ctx = model.enter(embedded, **inputs)
        _check_activations(x, model)
        layers = model.layers
        layer_inputs = layers.inputs_by_group(model.layer_inputs(_activations(x), ctx))
        nn.stack.check_no_inputs(layer_inputs[layers.staged :])
        ctx = dataclasses.replace(ctx, features=None)  # layers that use them have them as inputs
        auxes = []
        for n in range(layers.staged):
            x, _, aux = layers.run_group(n, x, ctx, remat=self.remat, inputs=layer_inputs[n])
            auxes.append(aux)
        targets = _targets_by_row(self.from_hidden, model, embedded, _without_inputs(batch))
        return (x, jnp.sum(targets) * _sum_losses(auxes)), (ctx, targets, auxes)

    def stage(self, layers: dict[str, Any], fixed: Any, active: Any, x: Any, data: Any) -> Any:
        """Runs the layers of a stage; `layers` are trained parameters and `fixed` are not."""
        ctx, targets, _ = data
        x, _, aux = nn.stack.scan_group(nn.combine(layers, fixed), x, ctx, active=active)
        return x, jnp.sum(targets) * _sum_losses([aux]), aux

    def after(self, outer: dict[str, Any], x: Any, data: Any) -> Any:
        """Runs the layers after the pipeline, and computes the loss of a microbatch."""
        model, (ctx, targets, batch) = nn.combine(outer, self.rest), data
        auxes = []
        for n in range(model.layers.staged + 1, len(model.layers.groups)):
            x, _, aux = model.layers.run_group(n, x, ctx, remat=self.remat)
            auxes.append(aux)
        loss, stats = self.from_hidden(model, model.leave(x, ctx), batch)
        # The 1 counts microbatches, to average the layers' reports.
        return loss + jnp.sum(targets) * _sum_losses(auxes), jax.lax.stop_gradient((stats, auxes, jnp.ones(())))


def _check_model(model: Any) -> None:
    """Raises an error for a model whose layers cannot run in a pipeline."""
    if getattr(model, "is_patched", False):
        raise ValueError(
            "a 1F1B pipeline calls the parts of a model, so it would leave out what nn.patch replaces: use a layout "
            "without a pipeline"
        )
    if not isinstance(model, nn.stack.SupportsPipelining) or model.layers.staged is None:
        raise TypeError(
            "a 1F1B pipeline needs a model with the methods of nn.stack.SupportsPipelining, such as an nn.Decoder, whose "
            f"layers repeat; got {type(model).__name__}"
        )


def _check_activations(x: Any, model: Any) -> None:
    """Raises ValueError for integers among what passes from layer to layer, which have no gradient to send back."""
    if not all(jnp.issubdtype(a.dtype, jnp.inexact) for a in jax.tree.leaves(x)):
        raise ValueError(
            f"the layers of {type(model).__name__} pass integers on, such as chosen keys, but a 1F1B pipeline sends back a "
            "gradient of all that passes: use sharding.Pipeline(schedule='gpipe')"
        )


def _check_context(before: Callable[..., Any], outer: dict[str, Any], ctx: Any) -> None:
    """Raises ValueError for a context that rows cannot share out, or through which parameters would get no gradient."""

    def read(outer: dict[str, Any]) -> list[Array]:
        context = before(outer)[1][0]
        return [a for a in jax.tree.leaves(context) if jnp.issubdtype(a.dtype, jnp.inexact)]

    traced = jax.make_jaxpr(read)(outer)
    reached = dce_jaxpr_consts(traced.jaxpr, [True] * len(traced.out_avals))[2]
    learned = [path for path, is_reached in zip(sorted(outer), reached, strict=True) if is_reached]
    if learned or getattr(ctx, "position_bias", None) is not None:
        what = f"{learned[0]} is learned through what" if learned else "a position bias is the same for all rows, but"
        raise ValueError(
            f"{what} layers read beside x, which a 1F1B pipeline splits by rows and sends no gradient to: use "
            "sharding.Pipeline(schedule='gpipe')"
        )


def _split(trainable: dict[str, Any], rest: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns the trained layers inside the pipeline, all other parameters (embedding, first and last layers, norm,
    head), and the path prefix of the pipeline's layers.
    """
    inside = nn.tree.path_of(rest, rest.layers.groups[rest.layers.staged]) + "."
    body = {path.removeprefix(inside): w for path, w in trainable.items() if path.startswith(inside)}
    outer = {path: w for path, w in trainable.items() if not path.startswith(inside)}
    return body, outer, inside


def _activations(x: Any) -> Array:
    """Returns the residual stream among what passes from layer to layer, `B T D`, or `B T n D` in n streams."""
    return x.x if isinstance(x, nn.stack.Carry) else x


def _without_inputs(batch: Batch) -> Batch:
    """Returns what microbatches get: images, sound and sources are used up before, but a loss sees that they were."""
    return batch | {name: None for name in ("images", "audio", "source") if name in batch}


def _targets_by_row(from_hidden: Callable, model: Any, x: Array, batch: Batch) -> Float[Array, " B"]:
    """Counts each row's targets as the loss does, to weight the layers' own losses of its microbatch.

    The loss is traced for one row, and only the part of its program that computes the count is run.
    """
    row = jax.tree.map(lambda a: a[:1], batch)

    def count(hidden: Array, batch: Batch) -> Array:
        return from_hidden(model, hidden, batch)[1].num_targets

    def run(*rows: Array) -> Any:  # a literal if the count is constant
        return eval_jaxpr(jaxpr, consts, *(a[None] for a in rows))[0]

    traced = jax.make_jaxpr(count)(x[:1], row)  # [1, T, D], and [1, T] for arrays with tokens
    jaxpr, consts, (of_hidden, *of_batch) = dce_jaxpr_consts(traced.jaxpr, [True])
    if of_hidden:
        raise ValueError("Stats.num_targets must be a function of the batch alone, but this loss uses `hidden` for it")
    consts = [const for const, used in zip(traced.consts, consts, strict=True) if used]
    rows = [a for a, used in zip(jax.tree.leaves(batch), of_batch, strict=True) if used]
    # [T] of each array -> [] for a row; [B, T] -> [B]
    return jax.vmap(run)(*rows) if rows else jnp.full(len(x), run())


def _head_gradients(gradients: dict[str, Array], model: Any) -> dict[str, Array]:
    """Reshards the gradients of heads and embeddings, computed in parts of the vocabulary, like the parameters."""
    names = nn.tree.axes(model)
    heads = [path for path in gradients if names[path] == ("vocab", "embed")]
    with pipelining.inside_stage():  # as the loss was
        return gradients | {path: nn.head_gradient(gradients[path]) for path in heads}


def _sum_losses(auxes: list[list[dict[str, Array]]]) -> Array:
    """Sums the layers' own losses of groups, per target."""
    return sum((layer_losses(aux) for slots in auxes for aux in slots), start=jnp.zeros(()))


def _reports(layers: nn.Stack, x: Any, ctx: Any) -> bool:
    """Returns True if layers report statistics of a whole microbatch, such as a router's balance."""
    groups = range(len(layers.groups))[layers.staged :]

    def reports(x: Any) -> Any:
        return [layers.run_group(n, x, ctx)[2] for n in groups]

    return bool(jax.tree.leaves(jax.eval_shape(reports, x)))
