"""Pipeline parallelism: a stack's layers over the stages, through which microbatches pass."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import Table, mesh_axes_of
from maxlib.sharding._layer_axes import LAYERS
from maxlib.sharding._pipeline_chunks import chunks
from maxlib.sharding._rules import partition, split_further
from maxlib.sharding._strategy import Step, Strategy, Traffic


@dataclasses.dataclass(frozen=True)
class Pipeline(Strategy):
    """Layers over stages (GPipe, arXiv:1811.06965, and interleaved, arXiv:2104.04473).

    Of a pass's `microbatches * repeats + stages - 1` ticks every stage idles in `stages - 1`.

    Args:
        axis: the mesh axis whose devices are the stages.
        microbatches: into how many parts each batch is cut.
        repeats: how often a microbatch goes around, each time through another part of every stage's layers;
            microbatches must then be a multiple of the stages.

    Raises:
        ValueError: for less than one microbatch or repeat.
    """

    slot: ClassVar[str] = "pipeline"
    axis: str = "stage"
    microbatches: int = 8
    repeats: int = 1

    def __post_init__(self):
        if self.microbatches < 1 or self.repeats < 1:
            raise ValueError(
                f"a pipeline needs at least one microbatch and one repeat, got {self.microbatches} and {self.repeats}"
            )

    def apply(self, rules: Table) -> Table:
        return {**rules, LAYERS: self.axis}

    def apply_running(self, rules: Table) -> Table:
        """Splits what is in no stage over the stages by rows, unless a rule gives them something else to split."""
        if any(self.axis in mesh_axes_of(place) for name, place in rules.items() if name != "layers"):
            return rules
        return {**rules, "batch": (*mesh_axes_of(rules.get("batch")), self.axis)}

    def place_parameter(self, own: P, names: tuple[str | None, ...], shape: tuple[int, ...], path: str, mesh: Any) -> P:
        """Puts layers into stages where every stage holds an equal, consecutive part of a stack. Else (`repeats`, or
        layers that the stages do not divide) they stay together, and the stages share the longest dimension that they
        divide. A stack's `lead` belongs to no stage: its axis has another name.
        """
        if names[:1] != (LAYERS,):
            return own
        stages, whole = mesh.shape[self.axis], partition([None, *own[1:]])
        if stages == 1 or chunks(shape[0], stages, self.repeats).in_order:
            return own
        return split_further(whole, shape, (self.axis,), mesh)

    def traffic(self, step: Step) -> Iterator[Traffic]:
        """Counts a microbatch that goes on to the next stage in every tick, and its gradient that comes back."""
        yield "collective-permute", step.axes("layers"), 2 * step.ticks * step.hidden
