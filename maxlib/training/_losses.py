"""Losses. Any function `loss(model, batch, key) -> (loss_sum, Stats)` trains; this is the one for language models."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from maxlib import nn, ops, sharding
from maxlib.sharding.layers import drop_uneven

Batch = dict[str, Any]
Extra = Callable[[Any, nn.Output, Batch], tuple[Array, dict[str, Array]]]
Axes = tuple[str, ...]
ROWS_AT_ONCE = 1024
_INPUTS = ("positions", "segment_ids", "valid", "images")


@nn.pytree
class Stats:
    """What a loss tells besides its value.

    tokens: how many targets the sum ran over, the weight of this batch. sums: metrics, each summed over these targets;
    they are divided by the number of tokens of all microbatches (and batches, in evaluation) at the end.
    """

    tokens: Float[Array, ""]
    sums: dict[str, Any]


def next_token_loss(
    model: Any,
    batch: Batch,
    key: Array | None = None,
    *,
    dtype: Any = jnp.bfloat16,
    remat: nn.remat.Policy = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
    extra: Extra | None = None,
) -> tuple[Float[Array, ""], Stats]:
    """The cross-entropy of `batch["targets"]` (-1: ignored) given `batch["tokens"]`, summed over the targets, in nats.

    Also hands `positions`, `segment_ids`, `valid` and `images` of the batch to the model, where there are any. What
    the model reports as `loss/...` is added, times the number of targets; it is a mean over its microbatch. `key` is
    not used. extra: `(model, output, batch) -> (loss sum, more sums)` adds a loss on the same forward pass, such as
    `mtp_loss`. Stats: `nll` (without smoothing, z-loss and the model's own losses), `accuracy`, and what the model
    reports.
    """
    inputs = {name: batch[name] for name in _INPUTS if name in batch}
    out = model(batch["tokens"], dtype=dtype, remat=remat, **inputs)
    loss, terms = cross_entropy(
        out.hidden,
        model.head_weight(),
        batch["targets"],
        softcap=model.softcap,
        z_loss=z_loss,
        label_smoothing=label_smoothing,
    )
    tokens = jnp.sum(batch["targets"] >= 0).astype(jnp.float32)
    own = sum((jnp.sum(value) for name, value in out.aux.items() if name.startswith("loss/")), start=jnp.zeros(()))
    reported = {name: value.astype(jnp.float32) * tokens for name, value in out.aux.items()}
    added, more = (0.0, {}) if extra is None else extra(model, out, batch)
    return loss + tokens * own + added, Stats(tokens, jax.lax.stop_gradient(terms | reported | more))


def cross_entropy(
    hidden: Float[Array, "B T D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    one_of_many: bool = False,
    **options: Any,
) -> tuple[Array, dict[str, Array]]:
    """Each device takes its own rows, and its own part of the vocabulary where the layout splits that.

    A head that is split over its width, like a batch over its rows, has to be gathered and its gradient summed; where
    rows are fewer than the vocabulary is large, the rows travel instead, and each device takes a part of the
    vocabulary for all of them. one_of_many: whether gradients of several calls are added up, which can then stay where
    they are made until the end.
    """
    axes, more, changes, chunk = (), (), None, None
    if (layout := sharding.current()) is not None:
        split = {name: layout.mesh_axes(name) for name in ("vocab", "batch", "embed")}
        split["vocab"] = with_stages(split, weight.shape[0], layout)
        axes, more = vocab_axes(hidden, weight.shape, layout.mesh, **split)
        changes = {"vocab": axes}
        if more:  # with as many logits at once as the whole vocabulary would have
            changes = {"vocab": axes + more, "batch": tuple(axis for axis in split["batch"] if axis not in more)}
            chunk = ROWS_AT_ONCE * math.prod(layout.mesh.shape[axis] for axis in more)

    def op(hidden, weight, targets):
        out = ops.linear_cross_entropy(hidden, weight, targets, axis_name=axes + more or None, chunk=chunk, **options)
        sums = out.loss, -jnp.sum(out.log_prob), jnp.sum(out.correct, dtype=jnp.float32)
        return tuple(x.reshape(1, 1) for x in sums)

    if not one_of_many:
        # Over devices the weight travels, and its gradient is summed, in the dtype of `hidden`: as those of layers.
        weight = weight if layout is None else weight.astype(hidden.dtype)
        hidden, weight = _reduced_first(hidden, weight)
    rows = ("batch", "seq")
    mapped = sharding.shard_map_by_name(op, [(*rows, None), ("vocab", None), rows], (rows, rows, rows), changes=changes)
    loss, nll, correct = (jnp.sum(x) for x in mapped(hidden, weight, targets))
    return loss, {"nll": nll, "accuracy": correct}


def with_stages(split: dict[str, Axes], vocab: int, layout: sharding.Layout) -> Axes:
    """The mesh axes of the vocabulary, and those of a pipeline's stages: all have the same rows."""
    used = {axis for axes in split.values() for axis in axes}
    axes = split["vocab"] + tuple(axis for axis in layout.mesh_axes("layers") if axis not in used)
    return axes if vocab % math.prod(layout.mesh.shape[axis] for axis in axes) == 0 else split["vocab"]


def head_gradient(gradient: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """The gradient of a head, on its way from the parts of the vocabulary in which `cross_entropy` made it to where the
    head lies: by width within a stage's part. Left alone, the partitioner gathers all of it on each device.
    """
    if (layout := sharding.current()) is None:
        return gradient
    split = {name: layout.mesh_axes(name) for name in ("vocab", "batch", "embed")}
    places = with_stages(split, gradient.shape[0], layout), split["embed"]
    to, _ = drop_uneven(PartitionSpec(*places), gradient.shape, layout.mesh)
    return jax.lax.with_sharding_constraint(gradient, to)


@jax.custom_vjp
def _reduced_first(hidden: Float[Array, "B T D"], weight: Float[Array, "V D"]):
    """The same. The backward pass goes on to the layers only when the gradient of `weight` is summed and split: XLA
    would put that off to the end, and keep it whole (8 GiB for a large model) while the layers need all memory.
    """
    return hidden, weight


def _reduced_backward(_, d):
    return jax.lax.optimization_barrier((d[0], sharding.constrain(d[1], "vocab", "embed")))


_reduced_first.defvjp(lambda hidden, weight: ((hidden, weight), None), _reduced_backward)


def vocab_axes(
    hidden: Any, weight: tuple[int, ...], mesh: Any, *, vocab: Axes, batch: Axes, embed: Axes
) -> tuple[Axes, Axes]:
    """The mesh axes that split the vocabulary by the layout, and those over which rows had better travel to split it
    further.

    vocab, batch, embed: the mesh axes that split these; `hidden` and `weight` are shapes.
    """
    parts = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
    axes = vocab if weight[0] % parts(vocab) == 0 else ()
    more = tuple(axis for axis in embed if axis in batch and axis not in axes)
    width, others = hidden.dtype.itemsize, parts(tuple(axis for axis in batch if axis not in more))
    rows = 2 * width * math.prod(hidden.shape) / others  # there, and their gradients back
    weights = (width + 4) * math.prod(weight) / parts(axes)  # there, and a gradient that is made in float32
    return axes, more if rows < weights and weight[0] % parts(axes + more) == 0 else ()
