"""Scores of target tokens from hidden states and a head, on the mesh in use: what training losses are made of.

`head_split` decides how the work is divided, `cross_entropy` and `token_log_probs` follow it. The logits of all tokens
exist in neither.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from maxlib import ops, sharding
from maxlib.nn._pytree import pytree
from maxlib.sharding.layers import drop_uneven
from maxlib.sharding.pipelining import is_in_a_stage

Axes = tuple[str, ...]
ROWS_AT_ONCE = 1024
_ROWS = ("batch", "seq")


@pytree
class TokenLogProbs:
    """Per-token results of `token_log_probs`, 0 (False) where the target is ignored.

    log_prob: natural logarithm of the target's probability. correct: whether no token has a higher logit. entropy: of
    the distribution, in nats; None unless asked for.
    """

    log_prob: Float[Array, "B T"]
    correct: Bool[Array, "B T"]
    entropy: Float[Array, "B T"] | None = None


def token_log_probs(
    hidden: Float[Array, "B T D"],
    head_weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> TokenLogProbs:
    """Computes `log_softmax(cap(hidden @ head_weight.T) / temperature)[targets]` for losses that are functions of it.

    On a mesh each device takes its own rows, and its own part of the vocabulary, as in `cross_entropy`; the results are
    laid out as `targets`. Differentiable with respect to `hidden` and `head_weight`; temporary memory is that of
    `chunk` rows of logits, forward and backward. To minimize a sum of log-probabilities whose factors are known in
    advance, `cross_entropy(weights=...)` takes one matmul less.

    Args:
        hidden: the model's `Output.hidden`.
        head_weight: `model.head_weight()`.
        targets: the tokens to score, -1 where there is none.
        temperature: divisor of the logits after the soft-cap; policies take that of their sampler.
        softcap: `model.softcap`.
        entropy: whether to compute the entropies too.
        chunk: rows of logits at once on each device, by default 1024.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"temperature": temperature, "softcap": softcap, "entropy": entropy, "axis_name": split.axis_name}

    def op(hidden, weight, targets):
        return tuple(ops.linear_log_probs(hidden, weight, targets, chunk=chunk or split.chunk, **options))

    names = _ROWS, _ROWS, _ROWS if entropy else None
    out = _on_parts(op, split, hidden, head_weight, targets, out_names=names)
    return TokenLogProbs(*jax.tree.map(lambda x: sharding.constrain(x, *_ROWS), out))


def cross_entropy(
    hidden: Float[Array, "B T D"],
    head_weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    weights: Float[Array, "B T"] | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes `sum(weights * -log_softmax(cap(hidden @ head_weight.T))[targets])` over all tokens, in nats.

    Gradients are formed in the forward pass, so that logits are computed once (`ops.linear_cross_entropy`).

    Args:
        hidden: the model's `Output.hidden`.
        head_weight: `model.head_weight()`.
        targets: the next tokens, -1 where there is none.
        weights: factor of each token, 1 by default.
        softcap: `model.softcap`.
        z_loss: factor of the squared log-sum-exp (PaLM, arXiv:2204.02311).
        label_smoothing: probability mass spread evenly over the vocabulary.

    Returns:
        The sum, and unweighted sums for metrics: `nll` (without smoothing and z-loss) and `accuracy`.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"softcap": softcap, "z_loss": z_loss, "label_smoothing": label_smoothing, "axis_name": split.axis_name}

    def op(hidden, weight, targets, weights):
        out = ops.linear_cross_entropy(hidden, weight, targets, weights=weights, chunk=split.chunk, **options)
        sums = out.loss, -jnp.sum(out.log_prob), jnp.sum(out.correct, dtype=jnp.float32)
        return tuple(x.reshape(1, 1) for x in sums)  # one number for each part of batch and sequence

    out = _on_parts(op, split, hidden, head_weight, targets, weights, out_names=(_ROWS,) * 3)
    loss, nll, correct = (jnp.sum(x) for x in out)
    return loss, {"nll": nll, "accuracy": correct}


class HeadSplit(NamedTuple):
    """How the scores of tokens are divided over a mesh.

    vocab: the mesh axes that split the vocabulary where rows are. more: those over which rows travel, to split it
    further. batch: those that still split the rows then. chunk: rows of logits at once; None for the default.
    """

    vocab: Axes = ()
    more: Axes = ()
    batch: Axes = ()
    chunk: int | None = None

    @property
    def axis_name(self) -> Axes | None:
        """The mesh axes over which the vocabulary is split, None without."""
        return self.vocab + self.more or None


def head_split(hidden: Any, weight: tuple[int, ...]) -> HeadSplit:
    """Decides how `hidden` (an array or its shape, `B T D`) meets a head of the shape `V D` on the mesh in use.

    A head that is split over its width, like a batch over its rows, has to be gathered and its gradient summed. Where
    rows are fewer than the vocabulary is large, the rows travel instead, and each device takes a part of the vocabulary
    for all of them.
    """
    if (layout := sharding.current()) is None:
        return HeadSplit()
    mesh, batch = layout.mesh, layout.mesh_axes("batch")
    parts = lambda axes: math.prod(mesh.shape[axis] for axis in axes)
    vocab = _vocab_axes(weight[0], layout)
    vocab = vocab if weight[0] % parts(vocab) == 0 else ()
    more = tuple(axis for axis in layout.mesh_axes("embed") if axis in batch and axis not in vocab)
    left = tuple(axis for axis in batch if axis not in more)
    width = hidden.dtype.itemsize
    rows = 2 * width * math.prod(hidden.shape) / parts(left)  # bytes there, and of their gradients back
    weights = (width + 4) * math.prod(weight) / parts(vocab)  # there, and a gradient that is made in float32
    if not more or rows >= weights or weight[0] % parts(vocab + more):
        return HeadSplit(vocab, (), batch)
    # As many logits at once as the whole vocabulary would have.
    return HeadSplit(vocab, more, left, ROWS_AT_ONCE * parts(more))


def _vocab_axes(vocab: int, layout: sharding.Layout) -> Axes:
    """The mesh axes of the vocabulary, and those of a pipeline's stages where all of them have the same rows."""
    own = layout.mesh_axes("vocab")
    used = {axis for name in ("vocab", "batch", "embed") for axis in layout.mesh_axes(name)}
    axes = own + tuple(axis for axis in layout.mesh_axes("layers") if axis not in used)
    return axes if vocab % math.prod(layout.mesh.shape[axis] for axis in axes) == 0 else own


def _on_parts(op: Callable, split: HeadSplit, hidden: Array, weight: Array, *rows: Array | None, out_names: Any) -> Any:
    """Runs `op(hidden, weight, *rows)` on each device's part of the rows and of the vocabulary."""
    if sharding.current() is not None and not is_in_a_stage():
        # Over devices the weight travels, and its gradient is summed, in the dtype of `hidden`: as those of layers.
        # In a pipeline this runs once for every microbatch, and gradients stay where they are made until the last.
        hidden, weight = _reduced_first(hidden, weight.astype(hidden.dtype))
    changes = {"vocab": split.vocab + split.more} | ({"batch": split.batch} if split.more else {})
    names = [None if x is None else _ROWS for x in rows]
    mapped = sharding.shard_map_by_name(op, [(*_ROWS, None), ("vocab", None), *names], out_names, changes=changes)
    return mapped(hidden, weight, *rows)


def head_gradient(gradient: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Lays out a head's gradient between the parts of the vocabulary in which it was made and where the head lies.

    That is by width within a stage's part. Left alone, the partitioner gathers all of it on each device.
    """
    if (layout := sharding.current()) is None:
        return gradient
    places = _vocab_axes(gradient.shape[0], layout), layout.mesh_axes("embed")
    to, _ = drop_uneven(PartitionSpec(*places), gradient.shape, layout.mesh)
    return jax.lax.with_sharding_constraint(gradient, to)


@jax.custom_vjp
def _reduced_first(hidden: Float[Array, "B T D"], weight: Float[Array, "V D"]):
    """Returns its arguments. The backward pass goes on to the layers only when the gradient of `weight` is summed and
    split: XLA would put that off to the end, and keep it whole (8 GiB for a large model) while the layers need all
    memory.
    """
    return hidden, weight


def _reduced_backward(_, d):
    return jax.lax.optimization_barrier((d[0], sharding.constrain(d[1], "vocab", "embed")))


_reduced_first.defvjp(lambda hidden, weight: ((hidden, weight), None), _reduced_backward)
