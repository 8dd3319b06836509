"""The result of `explain_attention` and `explain_grouped_matmul`."""

import dataclasses
import logging
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


_said: set[tuple[str, str, str]] = set()


def say_once(answer: Explanation, device: tuple[str, str], why: str, advice: str = "") -> None:
    """Logs that an accelerator runs plain XLA, once per process, operation, platform and reason.

    Args:
      answer: the answer for the call.
      device: platform and kind.
      why: the reason.
      advice: a sentence on what else would help, and a space.
    """
    if (key := (answer.op, device[0], why)) not in _said:
        _said.add(key)
        logging.getLogger("maxlib.ops").warning(
            f"{answer.op} runs {answer.chosen!r} on {device[1]}, plain XLA and slower than a fused kernel, because {why}. "
            f"{advice}ops.explain_{answer.op} lists all reasons."
        )
