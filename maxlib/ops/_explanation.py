"""The result of `explain_attention` and `explain_grouped_matmul`."""

import dataclasses
from typing import Any

from maxlib.ops._tuning import Tuned


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The implementation that a call gets, and the reasons; it prints as a readable text.

    Args:
      op: name of the operation.
      call: the call; it prints its shapes, dtype, features and device.
      chosen: name of the implementation; None if the requested one cannot run the call.
      reason: why it was chosen.
      refused: why each of the others cannot run the call, or is not chosen.
      tiles: `sizes` of the chosen one's tiles, a class of `ops.tiles`, and their `source`; None if it has none.
    """

    op: str
    call: Any
    chosen: str | None
    reason: str
    refused: dict[str, str]
    tiles: Tuned | None = None

    def __str__(self) -> str:
        lines = [f"{self.op} {self.call}", f"-> {self.chosen or 'error'}: {self.reason}"]
        lines += [] if self.tiles is None else [f"   tiles: {self.tiles}"]
        return "\n".join(lines + [f"   {name}: {why}" for name, why in self.refused.items()])
