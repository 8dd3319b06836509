"""Parallelism over the batch: data parallelism, fully sharded parameters (FSDP), and a sharded optimizer (ZeRO-1)."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import AxisRules, IfFree
from maxlib.sharding._costs import StepFacts, Traffic
from maxlib.sharding._mesh import check_mesh_axes
from maxlib.sharding._rules import split_further
from maxlib.sharding._strategy import Strategy


@dataclasses.dataclass(frozen=True)
class DataParallel(Strategy):
    """Data parallelism: rows of the batch are split over devices, each with a copy of all parameters.

    Args:
        axes: The mesh axes that split the rows.
    """

    kind: ClassVar[str] = "batch"
    axes: tuple[str, ...] = ("data", "fsdp")

    def apply(self, rules: AxisRules) -> AxisRules:
        return {**rules, "batch": self.axes}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the sums of gradients over devices with different tokens and the same part of a weight."""
        # Devices that split a sequence, and stages that split rows, have different tokens too.
        others = {*step.axes("batch"), *step.axes("seq"), *step.axes("layers")}
        for weight in step.weights:
            if weight.trained:
                yield "all-reduce", others - {*weight.split}, weight.size / step.parts(weight.gathered)


@dataclasses.dataclass(frozen=True)
class FullyShard(Strategy):
    """FSDP (ZeRO-3, arXiv:1910.02054): parameters are split over devices that also split the batch.

    A weight is all-gathered when it is used, and its gradient is reduce-scattered. Parameters are replicated over
    `replicate_axis`; if that axis has more than one device, this is hybrid sharding (HSDP).

    Args:
        shard_axis: The mesh axis that splits the batch, and parameters along the width of the residual stream.
        replicate_axis: The mesh axis that splits the batch only.
        by_expert: True splits the matrices of a mixture by expert instead of by width.
    """

    kind: ClassVar[str] = "fsdp"
    shard_axis: str = "fsdp"
    replicate_axis: str = "data"
    by_expert: bool = False

    def apply(self, rules: AxisRules) -> AxisRules:
        # Nearly every matrix of a layer has one axis "embed", so one rule splits them all. MLA's up-projections have
        # "rank" instead, which uses the mesh axis only there.
        axis = self.shard_axis
        experts = {"expert" if self.by_expert else "expert_embed": axis}
        return {**rules, "batch": (self.replicate_axis, axis), "embed": axis, "rank": IfFree(axis), **experts}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the all-gathers of weights for the forward and backward passes, and the reduce-scatters of
        gradients.
        """
        for weight in step.weights:
            yield "all-gather", weight.gathered, 2 * weight.size * weight.uses
            yield "reduce-scatter", weight.gathered, weight.size * weight.uses * weight.trained


@dataclasses.dataclass(frozen=True)
class ShardOptimizer(Strategy):
    """ZeRO-1 (arXiv:1910.02054): the optimizer's moments are split further than the parameters.

    The mesh axis splits the longest dimension that it divides.

    Args:
        axis: A mesh axis over which parameters are replicated.
    """

    kind: ClassVar[str] = "optimizer"
    axis: str = "data"

    def check(self, mesh: Any, others: tuple[Strategy, ...]) -> None:
        check_mesh_axes([self.axis], str(self), mesh.axis_names)

    def optimizer_spec(self, spec: P, shape: tuple[int, ...], mesh: Any) -> P:
        return split_further(spec, shape, (self.axis,), mesh)
