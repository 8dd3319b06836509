"""Tensor parallelism: matrices are split by heads, inner width or vocabulary (Megatron, arXiv:1909.08053)."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from maxlib.sharding._axes import AxisRules, IfFree
from maxlib.sharding._costs import StepFacts, Traffic
from maxlib.sharding._strategy import Strategy

# Of two consecutive matmuls, [D, F] then [F, D], the first is split by its outputs and the second by its inputs. There
# is no communication between them, and one sum over devices after them.
_SPLIT = ("vocab", "heads", "kv_heads", "mlp", "act_heads", "attn_heads", "act_mlp", "act_vocab")


@dataclasses.dataclass(frozen=True)
class TensorParallel(Strategy):
    """Tensor parallelism: heads, inner widths and the vocabulary are split, in parameters and activations.

    Args:
        axis: The mesh axis.
    """

    kind: ClassVar[str] = "tensor"
    axis: str = "tensor"

    def apply(self, rules: AxisRules) -> AxisRules:
        return {**rules, **dict.fromkeys(_SPLIT, self.axis)}

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields two all-reduces, of attention and of the MLP, for every pass of every layer."""
        yield "all-reduce", step.axes("act_heads"), 2 * step.passes * step.layers * step.hidden


@dataclasses.dataclass(frozen=True)
class SequenceParallel(Strategy):
    """Sequence parallelism (Megatron, arXiv:2205.05198), for norms and the residual stream.

    Outside the matmuls that tensor parallelism splits, the same mesh axis splits activations by sequence.

    Args:
        axis: The mesh axis of `TensorParallel`.
    """

    kind: ClassVar[str] = "tensor_sequence"
    axis: str = "tensor"

    def apply(self, rules: AxisRules) -> AxisRules:
        # The all-reduce after a matmul becomes a reduce-scatter, and an all-gather before the next one: the same
        # traffic, but the residual stream takes 1 / n of the memory. If heads or the inner width use the axis, "seq" is
        # not split.
        return {**rules, "seq": IfFree(self.axis)}
