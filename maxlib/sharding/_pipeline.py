"""Pipeline parallelism: the layers of a stack are split over stages, and microbatches pass through them."""

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from jax.sharding import PartitionSpec as P

from maxlib._utils.arguments import check_choice
from maxlib.sharding._axes import LAYERS, AxisRules, mesh_axes_of
from maxlib.sharding._pipeline_chunks import chunks
from maxlib.sharding._rules import partition, split_further
from maxlib.sharding._strategy import StepFacts, Strategy, Traffic


@dataclasses.dataclass(frozen=True)
class Pipeline(Strategy):
    """Pipeline parallelism (GPipe, arXiv:1811.06965; 1F1B, arXiv:1806.03377; interleaved, arXiv:2104.04473).

    A pass takes `microbatches * repeats + stages - 1` ticks, and every stage is idle in `stages - 1` of them (the
    bubble). More microbatches or more repeats reduce this share.

    Args:
        axis: The mesh axis whose devices are the stages.
        microbatches: Number of parts into which each batch is split.
        repeats: Number of times that a microbatch passes through all stages, each time through another chunk of their
            layers. If it is more than 1, microbatches must be a multiple of the stages.
        schedule: How a training step orders its passes: "gpipe" runs all microbatches forward, then all backward, and
            takes any loss; "1f1b" (arXiv:1806.03377) starts the backward pass of a microbatch as soon as its forward
            pass has ended, keeps the inputs of at most `2 stages repeats - 1` chunks of layers however many
            microbatches there are, and needs a `training.Loss`.

    Raises:
        ValueError: for less than one microbatch or repeat, and an unknown schedule.
    """

    kind: ClassVar[str] = "pipeline"
    axis: str = "stage"
    microbatches: int = 8
    repeats: int = 1
    schedule: Literal["gpipe", "1f1b"] = "gpipe"

    def __post_init__(self):
        check_choice("schedule", self.schedule, ("gpipe", "1f1b"))
        if self.microbatches < 1 or self.repeats < 1:
            raise ValueError(
                f"a pipeline needs at least one microbatch and one repeat, got {self.microbatches} and {self.repeats}"
            )

    def apply(self, rules: AxisRules) -> AxisRules:
        return {**rules, LAYERS: self.axis}

    def rules_in_jit(self, rules: AxisRules) -> AxisRules:
        """Splits the batch over the stages outside the pipeline, unless another rule uses their mesh axis."""
        # Otherwise all stages would compute embedding, head and loss of the same rows.
        if any(self.axis in mesh_axes_of(place) for name, place in rules.items() if name != "layers"):
            return rules
        return {**rules, "batch": (*mesh_axes_of(rules.get("batch")), self.axis)}

    def parameter_spec(self, spec: P, names: tuple[str | None, ...], shape: tuple[int, ...], path: str, mesh: Any) -> P:
        """Splits layers over stages if every stage holds an equal, consecutive part of the stack.

        Otherwise (with `repeats`, or if stages do not divide the layers) the layer axis is not split, and the stages
        split the longest dimension that they divide.
        """
        # With interleaving, stage 0 has chunks 0, S, 2 S, ..., which no partition spec of the layer axis can express.
        # Splitting another dimension takes as little memory, and one all-to-all per step gives each stage its chunks. A
        # stack's `lead` belongs to no stage, so its axis has another name.
        if names[:1] != (LAYERS,):
            return spec
        stages, unsplit = mesh.shape[self.axis], partition([None, *spec[1:]])
        if stages == 1 or chunks(shape[0], stages, self.repeats).in_order:
            return spec
        return split_further(unsplit, shape, (self.axis,), mesh)

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields one permute per tick of a microbatch to the next stage, and one of its gradient back."""
        yield "collective-permute", step.axes("layers"), 2 * step.ticks * step.hidden
