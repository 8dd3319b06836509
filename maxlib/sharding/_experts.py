"""Expert parallelism: a mixture's experts over devices, to which tokens travel and from which they come back."""

import dataclasses
from typing import ClassVar

from maxlib.sharding._axes import IfFree, Table, mesh_axes_of
from maxlib.sharding._strategy import Strategy


@dataclasses.dataclass(frozen=True)
class ExpertParallel(Strategy):
    """Experts over a mesh axis of their own (GShard, arXiv:2006.16668); all else takes that axis for more batch and,
    where parameters are fully sharded, for more of that.

    Args:
        axis: the mesh axis.
        how: "ragged", tokens travel in pieces as large as they are; "dense", in pieces of one size; None, what suits
            the device.

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
        more = {"batch": (*mesh_axes_of(rules.get("batch")), self.axis)}
        if rules.get("embed") is not None:
            axes = (*mesh_axes_of(rules["embed"]), self.axis)
            more |= {"embed": axes, "rank": IfFree(axes)}
        return {**rules, **more, "expert": self.axis, "act_expert": self.axis}
