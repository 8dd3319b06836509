"""Expert parallelism: the experts of a mixture are spread over devices, and tokens travel to them and back."""

import dataclasses
from typing import ClassVar

from maxlib.sharding._axes import IfFree, Table, mesh_axes_of
from maxlib.sharding._strategy import Strategy


@dataclasses.dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Expert parallelism (GShard, arXiv:2006.16668): experts are split over a mesh axis of their own.

    The rest of the model uses that axis as more data parallelism, and as more FSDP if parameters are fully sharded.

    Args:
      axis: the mesh axis.
      how: "ragged" sends each device exactly its tokens (ragged all-to-all); "dense" pads all messages to one size;
        None chooses by device.

    Raises:
      ValueError: for another `how`.
    """

    slot: ClassVar[str] = "experts"
    axis: str = "expert"
    how: str | None = None

    def __post_init__(self):
        if self.how not in (None, "ragged", "dense"):
            raise ValueError(f"tokens travel 'ragged' or 'dense', or as suits the device (None); got {self.how!r}")

    def apply(self, rules: Table) -> Table:
        # Outside the experts every device of the axis has rows of its own, so no device repeats another's work.
        more = {"batch": (*mesh_axes_of(rules.get("batch")), self.axis)}
        if rules.get("embed") is not None:
            # "expert_embed" is left alone: experts already use the axis, and an array can use it once.
            axes = (*mesh_axes_of(rules["embed"]), self.axis)
            more |= {"embed": axes, "rank": IfFree(axes)}
        return {**rules, **more, "expert": self.axis, "act_expert": self.axis}
