"""The result of `explain_attention` and `explain_grouped_matmul`."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The implementation that a call gets, and the reasons; it prints as a readable text.

    Args:
      op: name of the operation.
      call: the call; it prints its shapes, dtype, features and device.
      chosen: name of the implementation; None if the requested one cannot run the call.
      reason: why it was chosen.
      refused: why each of the others cannot run the call, or is not chosen.
    """

    op: str
    call: Any
    chosen: str | None
    reason: str
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"{self.op} {self.call}", f"-> {self.chosen or 'error'}: {self.reason}"]
        return "\n".join(lines + [f"   {name}: {why}" for name, why in self.refused.items()])
