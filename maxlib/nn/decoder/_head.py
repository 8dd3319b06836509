"""Log-probabilities and losses of target tokens from hidden states and a head, on the current mesh.

`head_split` decides how the work is divided; `cross_entropy` and `token_log_probs` follow it. Neither ever stores the
logits of all tokens. Shapes: B rows, T tokens, D width, C numbers of a hidden state, of which a head reads the first D,
V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from maxlib import ops, sharding
from maxlib._xla_workarounds import together
from maxlib.sharding.layers import drop_uneven
from maxlib.sharding.pipelining import is_inside_stage

Axes = tuple[str, ...]
ROWS_AT_ONCE = 1024
_ROWS = ("batch", "seq")


def token_log_probs(
    hidden: Float[Array, "B T C"],
    head_weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    entropy: bool = False,
    chunk: int | None = None,
) -> ops.LogProbs:
    """Computes `log_softmax(cap(hidden @ head_weight.T) / temperature)[targets]`, for losses that are functions of it.

    On a mesh each device computes its own rows and its own part of the vocabulary, as in `cross_entropy`; the results
    are sharded like `targets`. They are differentiable with respect to `hidden` and `head_weight`; temporary memory is
    `chunk` rows of logits, forward and backward. To minimize a sum of log-probabilities with factors known in advance,
    use `cross_entropy(weights=...)`, which needs one matmul less.

    Args:
        hidden: The model's `Output.hidden`.
        head_weight: `model.head_weight()`.
        targets: Tokens to score; -1 (or -100) for none.
        temperature: Divisor of the logits after the soft-cap; policies use the temperature of their sampler.
        softcap: `model.softcap`.
        entropy: True computes the entropies too.
        chunk: Rows of logits at once on each device, by default 1024.

    Returns:
        Log-probabilities, correctness and entropies per token.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"temperature": temperature, "softcap": softcap, "entropy": entropy, "axis_name": split.axis_name}

    def op(hidden, weight, targets):
        return tuple(ops.fused_linear_log_probs(hidden, weight, targets, chunk=chunk or split.chunk, **options))

    names = _ROWS, _ROWS, _ROWS if entropy else None
    out = _on_parts(op, split, hidden, head_weight, targets, out_names=names)
    return ops.LogProbs(*jax.tree.map(lambda x: sharding.constrain(x, *_ROWS), out))


def cross_entropy(
    hidden: Float[Array, "B T C"],
    head_weight: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    *,
    weights: Float[Array, "B T"] | None = None,
    softcap: float | None = None,
    z_loss: float = 0.0,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes `sum(weights * -log_softmax(cap(hidden @ head_weight.T))[targets])` over all tokens, in nats.

    The forward pass also computes the gradients, so logits are computed once (`ops.fused_linear_cross_entropy`).

    Args:
        hidden: The model's `Output.hidden`.
        head_weight: `model.head_weight()`.
        targets: The next tokens; -1 (or -100) for none.
        weights: Factor on each token, 1 by default.
        softcap: `model.softcap`.
        z_loss: Factor on the squared log-sum-exp (PaLM, arXiv:2204.02311).
        label_smoothing: Probability mass spread evenly over the vocabulary.

    Returns:
        The sum, and unweighted sums for metrics: `nll` (without smoothing and z-loss) and `accuracy`.
    """
    split = head_split(hidden, head_weight.shape)
    options = {"softcap": softcap, "z_loss": z_loss, "label_smoothing": label_smoothing, "axis_name": split.axis_name}

    def op(hidden, weight, targets, weights):
        out = ops.fused_linear_cross_entropy(hidden, weight, targets, weights=weights, chunk=split.chunk, **options)
        sums = out.loss, -jnp.sum(out.log_prob), jnp.sum(out.correct, dtype=jnp.float32)
        return tuple(x.reshape(1, 1) for x in sums)  # one number per shard of batch and sequence

    out = _on_parts(op, split, hidden, head_weight, targets, weights, out_names=(_ROWS,) * 3)
    # [parts of the batch, parts of the sequence] -> scalars
    loss, nll, correct = (jnp.sum(x) for x in out)
    return loss, {"nll": nll, "accuracy": correct}


class HeadSplit(NamedTuple):
    """Division of the head's matmul over a mesh.

    Attributes:
        vocab: Mesh axes that split the vocabulary on each device's own rows.
        gathered: Further mesh axes that split the vocabulary; rows are gathered over them.
        batch: Mesh axes that still split the rows after that.
        chunk: Rows of logits at once; None for the default.
    """

    vocab: Axes = ()
    gathered: Axes = ()
    batch: Axes = ()
    chunk: int | None = None

    @property
    def axis_name(self) -> Axes | None:
        """Returns the mesh axes over which the vocabulary is split; None if it is not split."""
        return self.vocab + self.gathered or None


def head_split(hidden: Any, weight: tuple[int, ...]) -> HeadSplit:
    """Decides how `hidden`, as far as the head reads it, and the head are divided on the current mesh.

    Under FSDP the same mesh axes split the head's width and the batch's rows, so the head must be gathered and its
    gradient summed. If the rows are smaller than the head, they are gathered instead, and each device computes a part
    of the vocabulary for all of them.

    Args:
        hidden: An array or its shape and dtype, `B T D`.
        weight: Shape of the head, `(V, D)`.
    """
    if (layout := sharding.current()) is None:
        return HeadSplit()
    mesh, batch = layout.mesh, layout.mesh_axes("batch")

    def parts(axes: Axes) -> int:
        return math.prod(mesh.shape[axis] for axis in axes)

    vocab = _vocab_axes(weight[0], layout)
    vocab = vocab if weight[0] % parts(vocab) == 0 else ()
    # Axes that split both the width of the head and the batch.
    gathered = tuple(axis for axis in layout.mesh_axes("embed") if axis in batch and axis not in vocab)
    left = tuple(axis for axis in batch if axis not in gathered)
    width = hidden.dtype.itemsize
    # Bytes of the rows, and of their gradients.
    rows = 2 * width * math.prod(hidden.shape[:-1]) * weight[1] / parts(left)
    weights = (width + 4) * math.prod(weight) / parts(vocab)  # the head, and its gradient in float32
    # Gather whichever has fewer bytes; the vocabulary must divide over the devices.
    if not gathered or rows >= weights or weight[0] % parts(vocab + gathered):
        return HeadSplit(vocab, (), batch)
    # Process as many logits at once as with the whole vocabulary.
    return HeadSplit(vocab, gathered, left, ROWS_AT_ONCE * parts(gathered))


def _vocab_axes(vocab: int, layout: sharding.Layout) -> Axes:
    """Returns the mesh axes that split the vocabulary.

    In a pipeline they include the axis of its stages, if all stages have the same rows.
    """
    by_rule = layout.mesh_axes("vocab")
    # An axis can split only one dimension.
    used = {axis for name in ("vocab", "batch", "embed") for axis in layout.mesh_axes(name)}
    axes = by_rule + tuple(axis for axis in layout.mesh_axes("layers") if axis not in used)
    return axes if vocab % math.prod(layout.mesh.shape[axis] for axis in axes) == 0 else by_rule


def _on_parts(
    op: Callable,
    split: HeadSplit,
    hidden: Array,
    weight: Array,
    *others: Array | None,
    other_names: Sequence[Any] | None = None,
    out_names: Any,
) -> Any:
    """Runs `op(hidden, weight, *others)` on each device's part of the rows and of the vocabulary.

    The arrays of `others` are `B T`, unless `other_names` gives the names of their axes. What follows the first D
    numbers of a hidden state is for prediction modules.
    """
    hidden = hidden[..., : weight.shape[1]]
    if sharding.current() is not None and not is_inside_stage():
        # The weight is gathered, and its gradient summed, in the dtype of `hidden`, as for layers.
        # In a pipeline this runs for every microbatch; gradients are only exchanged after the last one.
        hidden, weight = _reduced_first(hidden, weight.astype(hidden.dtype))
    changes = {"vocab": split.vocab + split.gathered} | ({"batch": split.batch} if split.gathered else {})
    names = [None if x is None else _ROWS for x in others] if other_names is None else other_names
    mapped = sharding.shard_map_by_name(op, [(*_ROWS, None), ("vocab", None), *names], out_names, changes=changes)
    return mapped(hidden, weight, *others)


def head_gradient(gradient: Float[Array, "V D"]) -> Float[Array, "V D"]:
    """Reshards a head's gradient from the vocabulary parts in which it was computed to the sharding of the head.

    The width is split within a stage's part. Without this constraint the partitioner gathers all of it on each device.

    Args:
        gradient: The gradient of the head's weight.
    """
    if (layout := sharding.current()) is None:
        return gradient
    places = _vocab_axes(gradient.shape[0], layout), layout.mesh_axes("embed")
    to, _ = drop_uneven(PartitionSpec(*places), gradient.shape, layout.mesh)
    return jax.lax.with_sharding_constraint(gradient, to)


@jax.custom_vjp
def _reduced_first(hidden: Float[Array, "B T D"], weight: Float[Array, "V D"]):
    """Returns its arguments; in the backward pass, reduces the gradient of `weight` before the layers run.

    Otherwise XLA postpones the reduction to the end of the step (`together`).
    """
    return hidden, weight


def _reduced_backward(_, d):
    """Ties the gradient of `hidden` to the reduced gradient of `weight`."""
    return together(d[0], sharding.constrain(d[1], "vocab", "embed"))


_reduced_first.defvjp(lambda hidden, weight: ((hidden, weight), None), _reduced_backward)
