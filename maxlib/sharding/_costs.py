"""Facts about one device's part of a training step, from which strategies compute their costs. Plans provide them."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

Traffic = tuple[str, Collection[str], float]  # kind of collective, mesh axes, bytes on one device


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A parameter in a training step.

    Args:
        split: Mesh axes that split it.
        gathered: Those of them that also split the batch, over which it is gathered for use.
        size: Bytes in the compute dtype, once gathered.
        uses: Number of gathers in a pass: one for each tick of a pipeline and for each microbatch.
        trained: False if it is frozen and has no gradient.
    """

    split: Collection[str]
    gathered: Collection[str]
    size: float
    uses: float
    trained: bool = True


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts.

    Args:
        top_k: Number of experts per token.
        capacity_factor: Capacity of an expert relative to an even share; None if no token is dropped.
        layers: Number of layers that it represents, including idle ticks of a pipeline.
    """

    top_k: int
    capacity_factor: float | None
    layers: float


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """One device's part of a training step; the argument of `Strategy.traffic` and `Strategy.host_copies`.

    Args:
        layout: The layout.
        platform: "tpu", "cuda" or "cpu".
        sequence: Tokens of a sequence.
        tokens: Tokens of the batch on this device.
        width: Bytes of a number in the compute dtype.
        hidden: Bytes of the residual stream of these tokens.
        layers: Number of layers computed for these tokens, including idle ticks of a pipeline.
        passes: 2 for forward and backward, 3 if layers are recomputed.
        ticks: Ticks of a pipeline divided by its microbatches; 1 without one.
        weights: The parameters.
        mixers: The layers that mix tokens (`nn.SequenceMixer`), each with the number of layers that it represents.
        experts: The mixtures of experts.
        moments_on_host: Bytes of the optimizer's state that are stored on the host.
        weights_on_host: Bytes of trained parameters that are stored on the host.
    """

    layout: Any
    platform: str
    sequence: int
    tokens: float
    width: int
    hidden: float
    layers: float
    passes: int
    ticks: float
    weights: tuple[ShardedWeight, ...]
    mixers: tuple[tuple[Any, float], ...]
    experts: tuple[ExpertLayer, ...]
    moments_on_host: float
    weights_on_host: float

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of size above 1 that split the axis `name`."""
        return self.layout.mesh_axes(name)

    def parts(self, axes: Collection[str]) -> int:
        """Returns the number of devices along mesh axes."""
        return math.prod(self.layout.mesh.shape[axis] for axis in axes)
