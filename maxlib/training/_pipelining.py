"""Training a decoder in a 1F1B pipeline: computes gradients for `make_train_step` without autodiff through the whole
batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jax.interpreters.partial_eval import dce_jaxpr_consts
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.nn.decoder._head import head_gradient
from maxlib.sharding import pipelining
from maxlib.training._gradients import divisor
from maxlib.training._objectives.batch_names import INPUTS
from maxlib.training._objectives.next_token import next_token_loss
from maxlib.training._objectives.objective import Batch, Loss, Stats, own_losses, split_options, with_reports


@dataclasses.dataclass(frozen=True)
class OneFOneB:
    """Loss whose gradient a 1F1B pipeline computes; `one_f_one_b` makes it."""

    loss: Loss

    def __call__(self, model: Any, batch: Batch, key: Array) -> tuple[Array, Stats]:
        """Computes the loss by a forward pass of the pipeline, as evaluation does."""
        return self.loss(model, batch, key)

    def gradients(
        self, trainable: dict[str, Any], rest: Any, batch: Batch, key: Array
    ) -> tuple[dict[str, Any], Array, Stats]:
        """Returns the gradient of the mean loss, the mean loss, and the statistics of the batch."""
        goal, options = split_options(self.loss)
        dtype, remat = options.pop("dtype", jnp.bfloat16), options.pop("remat", None)
        _check_model(rest)
        goal.check_names(batch)
        _check_rows(batch)
        body, outer, inside = _split(trainable, rest)
        from_hidden = lambda model, hidden, batch: goal.from_hidden(model, hidden, batch, **options)
        parts = _Parts(rest, batch, from_hidden, dtype, remat)

        (x, more), pull, (ctx, targets, first) = jax.vjp(parts.before, outer, has_aux=True)
        sums_over_rows = goal.sums_over_rows and not _reports(nn.combine(trainable, rest).layers, x, ctx)
        (loss, (stats, last, microbatches), aux), (d_body, d_outer, d_x) = pipelining.one_f_one_b(
            parts.stage,
            parts.after,
            body,
            rest.layers.groups[rest.layers.staged],
            outer,
            x,
            (ctx, targets, _without_inputs(batch)),
            sums_over_rows=sums_over_rows,
        )
        d_before = pull((d_x, jnp.ones_like(more)))[0]
        d_outer = jax.tree.map(jnp.add, _head_gradients(d_outer, rest), d_before)
        grads = {inside + path: g for path, g in d_body.items()} | d_outer
        count = divisor(stats.num_targets)
        mean = lambda g, p: (g / count).astype(p.dtype)  # sums are float32
        aux = rest.layers.in_layer_order([*first, aux, *jax.tree.map(lambda a: a / microbatches, last)])
        return jax.tree.map(mean, grads, trainable), (loss + more) / count, with_reports(stats, aux)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of a model before its pipeline, in a stage, and after it.

    Attributes:
      rest: the model without the trained arrays.
      batch: the whole batch, with its images, for `before`; `after` gets a microbatch without.
      from_hidden: `(model, hidden, batch) -> (loss, Stats)`.
      dtype: dtype of the computation.
      remat: policy of the layers before and after the pipeline.
    """

    rest: Any
    batch: Batch
    from_hidden: Callable[..., tuple[Array, Stats]]
    dtype: Any
    remat: Any

    def before(self, outer: dict[str, Any]) -> Any:
        """Embeds the tokens, runs the layers before the pipeline, and sums their own losses."""
        model, batch = nn.combine(outer, self.rest), self.batch
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        x, inputs = model.embed_inputs(batch["tokens"], dtype=self.dtype, remat=self.remat, **inputs)
        x, ctx = model.enter(x, **inputs)
        layers = model.layers
        layer_inputs = layers.inputs_by_group(model.layer_inputs(_activations(x), ctx))
        nn.stack.check_no_inputs(layer_inputs[layers.staged :])
        ctx = dataclasses.replace(ctx, features=None)  # layers that use them have them as inputs
        auxes = []
        for n in range(layers.staged):
            x, _, aux = layers.run_group(n, x, ctx, remat=self.remat, inputs=layer_inputs[n])
            auxes.append(aux)
        targets = _targets_by_row(self.from_hidden, model, _activations(x), _without_inputs(batch))
        return (x, jnp.sum(targets) * _own(auxes)), (ctx, targets, auxes)

    def stage(self, layers: dict[str, Any], fixed: Any, active: Any, x: Any, data: Any) -> Any:
        """Runs the layers of a stage; `layers` are trained parameters and `fixed` are not."""
        ctx, targets, _ = data
        x, _, aux = nn.stack.scan_group(nn.combine(layers, fixed), x, ctx, active=active)
        return x, jnp.sum(targets) * _own([aux]), aux

    def after(self, outer: dict[str, Any], x: Any, data: Any) -> Any:
        """Runs the layers after the pipeline, and computes the loss of a microbatch."""
        model, (ctx, targets, batch) = nn.combine(outer, self.rest), data
        auxes = []
        for n in range(model.layers.staged + 1, len(model.layers.groups)):
            x, _, aux = model.layers.run_group(n, x, ctx, remat=self.remat)
            auxes.append(aux)
        loss, stats = self.from_hidden(model, model.leave(x, ctx), batch)
        # The 1 counts microbatches, to average the layers' reports.
        return loss + jnp.sum(targets) * _own(auxes), jax.lax.stop_gradient((stats, auxes, jnp.ones(())))


def _check_model(model: Any) -> None:
    """Raises an error for a model whose layers cannot run in a pipeline."""
    if not isinstance(model, nn.stack.SupportsPipelining) or model.layers.staged is None:
        raise TypeError(
            "a 1F1B pipeline needs a model with the methods of nn.stack.SupportsPipelining, such as an nn.Decoder, whose "
            f"layers repeat; got {type(model).__name__}"
        )
    if getattr(model, "layers_take_tokens", False):
        raise ValueError(
            f"the layers of {type(model).__name__} take token ids or per-layer inputs, which are not passed through "
            "the stages of a pipeline: use a layout without a Pipeline"
        )


def _split(trainable: dict[str, Any], rest: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Returns the trained layers inside the pipeline, all other parameters (embedding, first and last layers, norm,
    head), and the path prefix of the pipeline's layers.
    """
    inside = nn.tree.path_of(rest, rest.layers.groups[rest.layers.staged]) + "."
    body = {path.removeprefix(inside): w for path, w in trainable.items() if path.startswith(inside)}
    outer = {path: w for path, w in trainable.items() if not path.startswith(inside)}
    return body, outer, inside


def one_f_one_b(loss: Loss = next_token_loss) -> OneFOneB:
    """Makes a loss for `make_train_step` and `Trainer` whose gradient a 1F1B pipeline computes (arXiv:1806.03377).

    For S stages and V repeats it keeps the layer inputs of at most `2 S V - 1` chunks (periods of the stack), not the
    residuals of every microbatch, and recomputes one chunk at a time, as remat "full" does.

    Args:
        loss: an `objective`, or `functools.partial` of it; `remat` applies to layers before and after the pipeline.

    Raises:
        TypeError: for another function; when called, if the model is not a `nn.stack.SupportsPipelining` with repeated
            layers.
        ValueError: when called, for an array without the batch's rows, or without a pipeline.
    """
    split_options(loss)  # raises for a loss that cannot be split
    return OneFOneB(loss)


def _activations(x: Any) -> Float[Array, "B T D"]:
    """Returns the residual stream among what passes from layer to layer."""
    return x.x if isinstance(x, nn.stack.Carry) else x


def _without_inputs(batch: Batch) -> Batch:
    """Returns what microbatches get: images and sound are used up before them, but a loss sees that there were some."""
    return batch | {name: None for name in ("images", "audio") if name in batch}


def _check_rows(batch: Batch) -> None:
    rows = batch["tokens"].shape[0]
    for path, x in jax.tree_util.tree_leaves_with_path(_without_inputs(batch)):
        if x.shape[:1] != (rows,):
            raise ValueError(
                f"a pipeline splits the batch into microbatches by rows: batch{jax.tree_util.keystr(path)} must have "
                f"the {rows} rows of batch['tokens'] as its first axis, got the shape {x.shape}. Store it by row, or "
                "pass the loss without one_f_one_b, for GPipe by autodiff"
            )


def _targets_by_row(from_hidden: Callable, model: Any, x: Array, batch: Batch) -> Float[Array, " B"]:
    """Counts each row's targets as the loss does, to weight the layers' own losses of its microbatch.

    The loss is traced for one row, and only the part of its program that computes the count is run.
    """
    row = jax.tree.map(lambda a: a[:1], batch)
    count = lambda hidden, batch: from_hidden(model, hidden, batch)[1].num_targets
    traced = jax.make_jaxpr(count)(x[:1], row)  # [1, T, D], and [1, T] for arrays with tokens
    jaxpr, consts, (of_hidden, *of_batch) = dce_jaxpr_consts(traced.jaxpr, [True])
    if of_hidden:
        raise ValueError("Stats.num_targets must be a function of the batch alone, but this loss uses `hidden` for it")
    consts = [const for const, used in zip(traced.consts, consts, strict=True) if used]
    run = lambda *rows: eval_jaxpr(jaxpr, consts, *(a[None] for a in rows))[0]
    rows = [a for a, used in zip(jax.tree.leaves(batch), of_batch, strict=True) if used]
    # [T] of each array -> [] for a row; [B, T] -> [B]
    return jax.vmap(run)(*rows) if rows else jnp.full(len(x), run())


def _head_gradients(gradients: dict[str, Array], model: Any) -> dict[str, Array]:
    """Reshards the gradients of heads and embeddings, computed in parts of the vocabulary, like the parameters."""
    names = nn.tree.axes(model)
    heads = [path for path in gradients if names[path] == ("vocab", "embed")]
    with pipelining.inside_stage():  # as the loss was
        return gradients | {path: head_gradient(gradients[path]) for path in heads}


def _own(auxes: list[list[dict[str, Array]]]) -> Array:
    """Sums the layers' own losses of groups."""
    return sum((own_losses(aux) for slots in auxes for aux in slots), start=jnp.zeros(()))


def _reports(layers: nn.Stack, x: Any, ctx: Any) -> bool:
    """Returns True if layers report statistics of a whole microbatch, such as a router's balance."""
    groups = range(len(layers.groups))[layers.staged :]
    auxes = lambda x: [layers.run_group(n, x, ctx)[2] for n in groups]
    return bool(jax.tree.leaves(jax.eval_shape(auxes, x)))
