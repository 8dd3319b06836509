"""The gradient of a loss: autodiff of the whole batch, or of one microbatch after the other."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib import nn, sharding
from maxlib.training._objectives.objective import Batch, Loss, Stats
from maxlib.training._placement import place_like_parameters

Params = dict[str, Any]


@runtime_checkable
class HasGradients(Protocol):
    """Protocol of losses that compute their own gradient instead of using autodiff of the whole batch."""

    def gradients(self, trainable: Params, rest: Any, batch: Batch, key: Array) -> tuple[Params, Array, Stats]:
        """Returns the gradient of the mean loss, the mean loss, and the statistics of the batch."""
        ...


@dataclasses.dataclass(frozen=True)
class Accumulated:
    """Loss whose gradient is summed over microbatches; `accumulate` makes it."""

    loss: Loss
    microbatches: int

    def __call__(self, model: Any, batch: Batch, key: Array) -> tuple[Array, Stats]:
        """Computes the loss of a batch as a whole, as evaluation does."""
        return self.loss(model, batch, key)

    def gradients(self, trainable: Params, rest: Any, batch: Batch, key: Array) -> tuple[Params, Array, Stats]:
        """Returns the gradient of the mean loss over all microbatches, that mean, and the sums of their statistics."""
        if self.microbatches == 1:
            return _autodiff(self.loss, trainable, rest, batch, key)
        _check_rows(batch)

        def add(total, xs):
            (loss, stats), grads = _gradient(self.loss, trainable, rest, *xs, mean=False)
            new = _place(jax.tree.map(lambda g: g.astype(jnp.float32), grads)), loss, stats
            return jax.tree.map(jnp.add, total, new), None

        _place = lambda tree: place_like_parameters(tree, trainable, rest)
        rows = jax.tree.map(lambda x: _microbatches(x, self.microbatches), batch)
        xs = rows, jax.random.split(key, self.microbatches)
        first = jax.tree.map(lambda x: x[0], xs)
        (_, stats), _ = jax.eval_shape(lambda t: _gradient(self.loss, t, rest, *first, mean=False), trainable)
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable)
        start = (_place(zeros), jnp.zeros(()), jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats))
        (grads, loss, stats), _ = jax.lax.scan(add, start, xs)
        # Weighting microbatches by their numbers of targets gives the mean of the whole batch.
        count = divisor(stats.num_targets)
        return jax.tree.map(lambda g, p: (g / count).astype(p.dtype), grads, trainable), loss / count, stats


def divisor(count: Array) -> Array:
    """Returns the divisor for a number of targets, or for a sum of weights that may be below 1; 1 if it is zero."""
    return jnp.where(count > 0, count, 1)


def accumulate(loss: Loss, microbatches: int) -> Accumulated:
    """Makes a loss whose gradient is accumulated over microbatches, which takes less memory.

    If the loss is a sum over targets, the step equals that of the whole batch. Terms that depend on a whole batch, such
    as a router's balance loss, are computed per microbatch, and each microbatch draws its own random numbers.

    Args:
      loss: `(model, batch, key) -> (sum over targets, Stats)`; pass options with `functools.partial`.
      microbatches: number of parts of a batch; each takes every `microbatches`-th row and is weighted by its number of
          targets.

    Raises:
      ValueError: for less than one microbatch; in a step, for arrays whose number of rows differs from that of the
          tokens, such as images without rows.
      TypeError: for a loss that computes its own gradient, such as `one_f_one_b`.
    """
    if isinstance(loss, HasGradients):
        raise TypeError(
            f"accumulate takes a loss that autodiff differentiates; {loss!r} computes its own gradient from the whole "
            "batch. Omit accumulate: a pipeline already has microbatches"
        )
    if microbatches < 1:
        raise ValueError(f"a batch needs at least one microbatch, got {microbatches}")
    return Accumulated(loss, microbatches)


def gradients_of(loss: Loss) -> Any:
    """Returns the function `(trainable, rest, batch, key) -> (gradient of the mean, mean, Stats)` of a loss."""
    if isinstance(loss, HasGradients):
        return loss.gradients
    return lambda trainable, rest, batch, key: _autodiff(loss, trainable, rest, batch, key)


def _autodiff(loss: Loss, trainable: Params, rest: Any, batch: Batch, key: Array) -> tuple[Params, Array, Stats]:
    (mean, stats), grads = _gradient(loss, trainable, rest, batch, key, mean=True)
    return grads, mean, stats


def _gradient(loss: Loss, trainable: Params, rest: Any, batch: Batch, key: Array, *, mean: bool) -> Any:
    """Returns `((loss, Stats), gradient)` by autodiff, of the mean over the targets or of their sum."""

    def loss_of(trainable):
        total, stats = _checked(loss(nn.combine(trainable, rest), batch, key))
        return total / divisor(stats.num_targets) if mean else total, stats

    value, grads = jax.value_and_grad(loss_of, has_aux=True)(trainable)
    return value, sharding.memory.to_device(grads)  # gradients of parameters in host memory are created there


def _checked(result: Any) -> tuple[Array, Stats]:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Stats):
        kinds = ", ".join(type(x).__name__ for x in (result if isinstance(result, tuple) else (result,)))
        raise TypeError(f"a loss must return its sum over the targets and a training.Stats, got ({kinds})")
    return result


def _check_rows(batch: Batch) -> None:
    """Raises ValueError for arrays without a row for each row of tokens, which a split would mix up."""
    arrays = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(batch)
    }
    tokens = next((name for name in arrays if name.rpartition(".")[2] == "tokens"), next(iter(arrays)))
    if odd := [f"{name} {x.shape}" for name, x in arrays.items() if x.shape[:1] != arrays[tokens].shape[:1]]:
        raise ValueError(
            f"accumulate splits a batch by its {arrays[tokens].shape[0]} rows of {tokens}, but these have other "
            f"numbers of rows: {', '.join(odd)}. "
            "Images (nn.vision.Patches) and audio (nn.audio.Clips) must have a row for each row of tokens, as data.pack makes "
            "them"
        )


def _microbatches(x: Array, count: int) -> Array:
    """Splits a batch: each microbatch takes every `count`-th row, so that rows stay evenly spread over devices."""
    if x.shape[0] % count:
        raise ValueError(
            f"{count} accumulated microbatches must divide the batch's {x.shape[0]} rows; change one of them"
        )
    # [B, ...] -> [B / count, count, ...] -> [count, B / count, ...]
    return jnp.swapaxes(x.reshape(x.shape[0] // count, count, *x.shape[1:]), 0, 1)
