"""Tensor parallelism: a layer's matrices split by heads, inner width or vocabulary (Megatron, arXiv:1909.08053)."""

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from maxlib.sharding._axes import IfFree, Table
from maxlib.sharding._strategy import Step, Strategy, Traffic

_SPLIT = ("vocab", "heads", "kv_heads", "mlp", "act_heads", "attn_heads", "act_mlp", "act_vocab")


@dataclasses.dataclass(frozen=True)
class TensorParallel(Strategy):
    """Heads, inner widths and the vocabulary over devices, in parameters and activations.

    Args:
        axis: the mesh axis.
    """

    slot: ClassVar[str] = "tensor"
    axis: str = "tensor"

    def apply(self, rules: Table) -> Table:
        return {**rules, **dict.fromkeys(_SPLIT, self.axis)}

    def traffic(self, step: Step) -> Iterator[Traffic]:
        """Counts two sums over the devices, of attention and of the MLP, in every pass of every layer."""
        yield "all-reduce", step.axes("act_heads"), 2 * step.passes * step.layers * step.hidden


@dataclasses.dataclass(frozen=True)
class TensorSequence(Strategy):
    """Megatron's sequence parallelism (arXiv:2205.05198): between the matmuls that tensor parallelism splits, the same
    mesh axis splits activations by sequence.

    Args:
        axis: that of `TensorParallel`.
    """

    slot: ClassVar[str] = "tensor_sequence"
    axis: str = "tensor"

    def apply(self, rules: Table) -> Table:
        return {**rules, "seq": IfFree(self.axis)}
