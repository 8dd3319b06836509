"""Finds where a NaN or an infinity comes from."""

import math
from typing import Any

from jaxtyping import Array

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
