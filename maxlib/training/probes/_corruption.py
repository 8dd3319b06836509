"""Detection of silent data corruption: hardware that computes wrong numbers."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from maxlib import nn
from maxlib.checkpoint import checksums
from maxlib.training.losses import Batch, LossFunction


class Corrupted(RuntimeError):
    """Raised when a computation gave two different results."""


class Recompute:
    """Callback that computes the gradients of a microbatch twice and compares them bit by bit, to find faulty hardware.

    Use it as `callbacks=[(1000, Recompute())]`. It also compares the copies of replicated parameters. GPUs need
    `XLA_FLAGS=--xla_gpu_deterministic_ops=true`, because sums in a random order differ by themselves.

    Args:
        rows: Number of rows of the last batch to use, over all processes.
        stop: True raises `Corrupted` with the names of the parameters; False only warns.
    """

    def __init__(self, *, rows: int | None = None, stop: bool = True):
        self._rows, self._stop = rows, stop

    def __call__(self, trainer: Any) -> None:
        batch = jax.tree.map(lambda x: x[: self._rows], trainer.batch)
        with trainer.sharded():
            once, again = (gradient_digests(trainer.state.model, batch, trainer.loss, trainer.state.key) for _ in "12")
        wrong = [f"gradient of {path}" for path in once if once[path] != again[path]]
        wrong += [f"copies of {path}" for path in replicas_that_differ(trainer.state.trainable)]
        if wrong:
            self._report(
                f"step {trainer.step}, process {jax.process_index()}: computed twice and different: {wrong[:10]}"
            )

    def _report(self, text: str) -> None:
        text += (
            ". Some hardware of this process computes wrong numbers, or an op is not deterministic; test the host alone"
        )
        if self._stop:
            raise Corrupted(text)
        warnings.warn(text, stacklevel=3)


def gradient_digests(
    model: Any, batch: Batch, loss: LossFunction, key: Array | None = None, *, filter: nn.tree.Filter | None = None
) -> dict[str, str]:
    """Computes a hash of the bits of every parameter's gradient, and of the loss; equal runs have equal hashes.

    Args:
        model: The model.
        batch: The batch.
        loss: The training loss.
        key: Random key of the loss.
        filter: The parameters to differentiate; None takes what a `Trainer` trains by default.
    """
    key = jax.random.key(0) if key is None else key
    value, grads = _gradient(loss, filter)(model, batch, key)
    return checksums(grads | {"loss": value})


def replicas_that_differ(params: dict[str, Array]) -> list[str]:
    """Finds the arrays whose copies on this process's devices differ in any bit.

    Args:
        params: Arrays by path.
    """
    return [path for path, array in params.items() if _differ(array)]


def _differ(array: Array) -> bool:
    if array.sharding.is_fully_addressable and not _replicated(array):
        return False
    copies: dict[str, set[str]] = {}
    for shard in array.addressable_shards:
        copies.setdefault(str(shard.index), set()).update(checksums({"": shard.data}).values())
    return any(len(sums) > 1 for sums in copies.values())


def _replicated(array: Array) -> bool:
    return len({str(shard.index) for shard in array.addressable_shards}) < len(array.addressable_shards)


@functools.lru_cache(maxsize=4)
def _gradient(loss: LossFunction, filter: nn.tree.Filter | None) -> Callable[..., Any]:
    @jax.jit
    def run(model: Any, batch: Batch, key: Array) -> Any:
        trainable, rest = nn.partition(model, filter or nn.tree.default_filter(model))
        return jax.value_and_grad(lambda params: loss(nn.combine(params, rest), batch, key)[0])(trainable)

    return run
