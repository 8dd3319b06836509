"""Facts about one device's part of a training step, from which strategies compute what they cost. Plans state them."""

import dataclasses
import math
from collections.abc import Collection
from typing import Any

Traffic = tuple[str, Collection[str], float]  # kind of collective, mesh axes, bytes on one device


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A parameter in a training step.

    Args:
      split: mesh axes that split it.
      gathered: those of them over which it is gathered to be used, as they split the batch too.
      size: bytes in the compute dtype, once gathered.
      uses: how often it is gathered in a pass: once for each tick of a pipeline and for each microbatch.
      trained: False if it is frozen, so that it has no gradient.
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
      top_k: experts that a token chooses.
      capacity_factor: room of an expert over an even share; None where nothing is dropped.
      layers: layers that it stands for, the idle ticks of a pipeline included.
    """

    top_k: int
    capacity_factor: float | None
    layers: float


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """One device's part of a training step; the argument of `Strategy.traffic` and `Strategy.host_copies`.

    Args:
      layout: the layout.
      platform: "tpu", "cuda" or "cpu".
      sequence: tokens of a sequence.
      tokens: tokens of the batch on this device.
      width: bytes of a number in the compute dtype.
      hidden: bytes of the residual stream of these tokens.
      layers: layers computed for these tokens, the idle ticks of a pipeline included.
      passes: 2 for forward and backward, 3 where layers are computed again.
      ticks: ticks of a pipeline divided by its microbatches; 1 without one.
      weights: the parameters.
      mixers: the layers that mix tokens (`nn.SequenceMixer`), each with the number of layers that it stands for.
      experts: the mixtures of experts.
      moments_on_host: bytes of the optimizer's state that are stored on the host.
      weights_on_host: bytes of trained parameters that are stored on the host.
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
        """Returns the mesh axes of more than one device that split the axis `name`."""
        return self.layout.mesh_axes(name)

    def parts(self, axes: Collection[str]) -> int:
        """Returns the number of devices along mesh axes."""
        return math.prod(self.layout.mesh.shape[axis] for axis in axes)
