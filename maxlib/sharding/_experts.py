"""Expert parallelism: experts are split over devices, and tokens are sent to them and back."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from maxlib.sharding._axes import AxisRules, IfFree, mesh_axes_of
from maxlib.sharding._costs import StepFacts, Traffic
from maxlib.sharding._strategy import Strategy

BEST_RAGGED = ("tpu",)  # platforms on which exchanges without padding are faster
ROOM = 2  # padded messages have room for this many times an even share


@dataclasses.dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Expert parallelism (GShard, arXiv:2006.16668): experts are split over a mesh axis of their own.

    The rest of the model uses that axis for more data parallelism, and for more FSDP if parameters are fully sharded.

    Args:
        axis: The mesh axis.
        exchange: "ragged" sends each device exactly its tokens (ragged all-to-all); "dense" pads all messages to one
            size; None chooses by device.

    Raises:
        ValueError: for another `exchange`.
    """

    kind: ClassVar[str] = "experts"
    axis: str = "expert"
    exchange: str | None = None

    def __post_init__(self):
        if self.exchange not in (None, "ragged", "dense"):
            raise ValueError(f"exchange must be 'ragged', 'dense', or None to choose by device; got {self.exchange!r}")

    def apply(self, rules: AxisRules) -> AxisRules:
        # Outside the experts every device of the axis has different rows, so no work is repeated.
        more = {"batch": (*mesh_axes_of(rules.get("batch")), self.axis)}
        if rules.get("embed") is not None:
            # "expert_embed" does not change: experts already use the axis, and an array can only use it once.
            axes = (*mesh_axes_of(rules["embed"]), self.axis)
            more |= {"embed": axes, "rank": IfFree(axes)}
        return {**rules, **more, "expert": self.axis, "act_expert": self.axis}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the exchanges of tokens: a copy of each is sent to every chosen expert, and the result is
        sent back.
        """
        best = step.platform in BEST_RAGGED and not step.axes("layers")
        ragged = best if self.exchange is None else self.exchange == "ragged"
        for moe in step.experts:
            # Messages of equal size include their padding. Without a capacity the exchange is always recomputed in the
            # backward pass, but not the way back: no gradient needs the results.
            room = moe.capacity_factor or (1 if ragged else ROOM)
            passes = step.passes if moe.capacity_factor else 3
            kind = "ragged-all-to-all" if ragged and not moe.capacity_factor else "all-to-all"
            yield kind, step.axes("act_expert"), (passes + 2) * moe.top_k * room * step.hidden * moe.layers
