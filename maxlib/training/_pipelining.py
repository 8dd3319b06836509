"""Training a decoder in a 1F1B pipeline: the gradients that `make_train_step` follows, without autodiff through the
whole batch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib import nn
from maxlib.sharding import pipelining
from maxlib.training._losses import Batch, Stats, cross_entropy, head_gradient

Gradients = Callable[[dict[str, Any], Any, Batch, Array], tuple[dict[str, Any], Array, Stats]]


def one_f_one_b(
    *, dtype: Any = jnp.bfloat16, remat: nn.remat.Policy = None, z_loss: float = 0.0, label_smoothing: float = 0.0
) -> Gradients:
    """For `make_train_step(gradients=...)`: `next_token_loss` of an `nn.Decoder` in the pipeline of the layout in use
    (arXiv:1806.03377).

    Where autodiff keeps what the backward pass needs of every microbatch, this keeps the inputs of at most `2 S V - 1`
    chunks' layers (periods of the stack, where it has some) for S stages and V repeats, and computes one of them at a
    time again: as much arithmetic as with "full". remat: what layers before and after the pipeline keep. The options
    are those of `next_token_loss`. Raises TypeError for a model that is no `nn.SupportsPipelining`, ValueError for a
    batch with images and where the layout has no pipeline.
    """
    options = {"z_loss": z_loss, "label_smoothing": label_smoothing, "one_of_many": True}

    def gradients(trainable: dict[str, Any], rest: Any, batch: Batch, key: Array):
        if not isinstance(rest, nn.SupportsPipelining) or not len(rest.layers.body):
            raise TypeError(
                "a 1F1B pipeline needs a model with the methods of nn.SupportsPipelining, such as an nn.Decoder, whose "
                f"layers repeat; got {type(rest).__name__}"
            )
        inside = nn.tree.path_of(rest, rest.layers.body) + "."
        body = {path.removeprefix(inside): w for path, w in trainable.items() if path.startswith(inside)}
        outer = {path: w for path, w in trainable.items() if not path.startswith(inside)}
        names, tokens = nn.tree.axes(rest), jnp.sum(batch["targets"] >= 0).astype(jnp.float32)

        def before(outer):
            model = nn.combine(outer, rest)
            x, ctx = model.enter(model.embed_tokens(batch["tokens"], dtype), **_inputs(batch))
            x, _, lead = nn.scan_segment(model.layers.lead, x, ctx, remat=remat)
            x, _, aux = nn.run_segment(model.layers.prefix, x, ctx, remat=remat)
            return (x, tokens * _own(lead + aux)), ctx

        def stage(layers, fixed, works, x, data):
            x, _, aux = nn.scan_segment(nn.combine(layers, fixed), x, data[0], works=works)
            return x, _count(data) * _own(aux), _reported(aux)

        def after(outer, x, data):
            model, (ctx, targets) = nn.combine(outer, rest), data
            x, _, aux = nn.run_segment(model.layers.suffix, x, ctx, remat=remat)
            hidden = model.leave(x, ctx)
            loss, sums = cross_entropy(hidden, model.head_weight(), targets, **options, softcap=model.softcap)
            return loss + _count(data) * _own(aux), jax.lax.stop_gradient(sums)

        (x, more), pull, ctx = jax.vjp(before, outer, has_aux=True)
        (loss, sums, aux), (d_body, d_outer, d_x) = pipelining.one_f_one_b(
            stage,
            after,
            body,
            rest.layers.body,
            outer,
            x,
            (ctx, batch["targets"]),
            by_row=not _reports(nn.combine(trainable, rest).layers, x, ctx),
        )
        heads = (path for path in d_outer if names[path] == ("vocab", "embed"))
        with pipelining.in_a_stage():  # as the loss was
            d_outer |= {path: head_gradient(d_outer[path]) for path in heads}
        d_before = pull((d_x, jnp.ones_like(more)))[0]
        grads = {inside + path: g for path, g in d_body.items()} | jax.tree.map(jnp.add, d_outer, d_before)
        count = jnp.maximum(tokens, 1)
        reported = {name: value.astype(jnp.float32) * tokens for name, value in aux.items()}
        return jax.tree.map(lambda g: g / count, grads), (loss + more) / count, Stats(tokens, sums | reported)

    return gradients


def _inputs(batch: Batch) -> dict[str, Any]:
    if "images" in batch:
        raise ValueError(
            "a 1F1B pipeline takes text only, this batch has images: leave `gradients` out, for GPipe by autodiff"
        )
    return {name: batch[name] for name in ("positions", "segment_ids", "valid") if name in batch}


def _count(data) -> Array:
    return jnp.sum(data[1] >= 0).astype(jnp.float32)


def _own(auxes: list[dict[str, Array]]) -> Array:
    """What layers add to the loss, per target."""
    values = [jnp.sum(v) for aux in auxes for name, v in aux.items() if name.startswith("loss/")]
    return sum(values, start=jnp.zeros(()))


def _reports(layers: nn.Stack, x: Array, ctx: Any) -> bool:
    """Whether layers say anything of all rows of a microbatch, such as how even a router is."""
    auxes = lambda x: (nn.scan_segment(layers.body, x, ctx)[2], nn.run_segment(layers.suffix, x, ctx)[2])
    return bool(jax.tree.leaves(jax.eval_shape(auxes, x)))


def _reported(auxes: list[dict[str, Array]]) -> dict[str, Array]:
    """One row per repeat and place in the period."""
    names = dict.fromkeys(name for aux in auxes for name in aux)
    return {name: jnp.stack([aux[name] for aux in auxes if name in aux], axis=1) for name in names}
