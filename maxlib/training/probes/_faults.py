"""Finds where a NaN or an infinity comes from, and silent data corruption: hardware that computes wrong numbers."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from maxlib import nn
from maxlib.checkpoint import checksums
from maxlib.training.losses import Batch, LossFunction
from maxlib.training.probes._layers import Observation, observe


def find_nonfinite(model: Any, batch: Batch, loss: LossFunction, key: Array | None = None) -> str | None:
    """Finds the first layer and tensor that is not finite in the forward and in the backward pass of `loss`.

    It computes one gradient, so call it after a failure: with the model before the bad step and the batch of that step.
    Call it inside `sharding.use` if the model is sharded.

    Args:
        model: The model before the bad step.
        batch: The batch of the bad step.
        loss: The training loss.
        key: Random key of the step.

    Returns:
        A description, or None if everything is finite.
    """
    observation = observe(model, batch, loss, key)
    lines = _parameters(observation), _forward(observation), _backward(observation), _gradients(observation)
    return "\n".join(line for line in lines if line) or None


def _parameters(observation: Observation) -> str | None:
    bad = [name for name, norm in observation.parameters.items() if not math.isfinite(norm)]
    return f"parameters: {_some(bad)} not finite before the pass" if bad else None


def _forward(observation: Observation) -> str | None:
    bad = [name for name, seen in observation.outputs.items() if seen["nonfinite"]]
    if not bad:
        return (
            None
            if math.isfinite(observation.loss)
            else f"forward: the loss is {observation.loss}, all layers' outputs are finite"
        )
    names = list(observation.outputs)
    before = names[: names.index(bad[0])]
    sizes = f"; before it, {before[-1]} has values up to {observation.outputs[before[-1]]['max']:.3g}" if before else ""
    return f"forward: first the output of {bad[0]} ({observation.outputs[bad[0]]['nonfinite']:.0f} values){sizes}"


def _backward(observation: Observation) -> str | None:
    bad = [name for name, seen in observation.outputs.items() if seen["gradient_nonfinite"]]
    if not bad:
        return None
    names = list(observation.outputs)  # in the order of the forward pass; the backward pass reverses it
    after = names[names.index(bad[-1]) + 1 :]
    made_by = (
        f"created between it and {after[0]}, which comes next in the forward pass" if after else "created by the loss"
    )
    return f"backward: first the gradient of the output of {bad[-1]}, {made_by}"


def _gradients(observation: Observation) -> str | None:
    bad = [name for name, norm in observation.gradients.items() if not math.isfinite(norm)]
    return f"gradients: {_some(bad)} not finite" if bad else None


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more + (" is" if len(names) == 1 else " are")


class Corrupted(RuntimeError):
    """Raised when a computation gave two different results."""


class Recompute:
    """Callback that computes the gradients of a microbatch twice and compares them bit by bit, to find faulty hardware.

    Use it as `callbacks=[(1000, Recompute())]`. It also compares the copies of replicated parameters. GPUs need
    `XLA_FLAGS=--xla_gpu_deterministic_ops=true`, because sums in a random order differ by themselves.

    Args:
        rows: Number of rows of the last batch to use, over all processes; None uses all.

    Raises:
        Corrupted: in a call, with the names of the arrays that differ.
    """

    def __init__(self, *, rows: int | None = None):
        self._rows = rows

    def __call__(self, trainer: Any) -> None:
        batch = jax.tree.map(lambda x: x[: self._rows], trainer.batch)
        state = trainer.state
        with trainer.sharded():
            first, second = (gradient_digests(state.model, batch, trainer.loss, state.key) for _ in range(2))
        wrong = [f"gradient of {path}" for path in first if first[path] != second[path]]
        wrong += [f"copies of {path}" for path in replicas_that_differ(state.trainable)]
        if wrong:
            raise Corrupted(
                f"step {trainer.step}, process {jax.process_index()}: computed twice and different: {wrong[:10]}. Some "
                "hardware of this process computes wrong numbers, or an op is not deterministic; test the host alone"
            )


def gradient_digests(model: Any, batch: Batch, loss: LossFunction, key: Array | None = None) -> dict[str, str]:
    """Computes a hash of the bits of every parameter's gradient, and of the loss; equal runs have equal hashes.

    Args:
        model: The model.
        batch: The batch.
        loss: The training loss.
        key: Random key of the loss.
    """
    key = jax.random.key(0) if key is None else key
    value, grads = _gradient(loss)(model, batch, key)
    return checksums(grads | {"loss": value})


def replicas_that_differ(params: dict[str, Array]) -> list[str]:
    """Finds the arrays whose copies on this process's devices differ in any bit.

    Args:
        params: Arrays by path.
    """
    return [path for path, array in params.items() if _differ(array)]


def _differ(array: Array) -> bool:
    copies: dict[str, list[Array]] = {}
    for shard in array.addressable_shards:
        copies.setdefault(str(shard.index), []).append(shard.data)
    return any(len({checksums({"": x})[""] for x in same}) > 1 for same in copies.values() if len(same) > 1)


@functools.lru_cache(maxsize=4)
def _gradient(loss: LossFunction) -> Callable[..., Any]:
    @jax.jit
    def run(model: Any, batch: Batch, key: Array) -> Any:
        trainable, rest = nn.partition(model, nn.tree.default_filter(model))
        return jax.value_and_grad(lambda params: loss(nn.combine(params, rest), batch, key)[0])(trainable)

    return run
