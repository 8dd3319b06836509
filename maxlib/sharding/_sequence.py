"""Context parallelism: the tokens of a row over devices. The three ways differ in how attention sees all of them."""

import dataclasses
from typing import ClassVar

from maxlib.sharding._axes import Table, mesh_axes_of
from maxlib.sharding._strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Gather(Strategy):
    """Every device gathers all keys and values, for its own queries (Llama 3, arXiv:2407.21783).

    Args:
        axis: the mesh axis that splits the sequence.
    """

    slot: ClassVar[str] = "sequence"
    axis: str = "context"

    def apply(self, rules: Table) -> Table:
        return {**rules, "seq": self.axis, "q_seq": self.axis}


@dataclasses.dataclass(frozen=True)
class Ring(Strategy):
    """Keys and values go around a ring of devices, past each one's queries (arXiv:2310.01889).

    Args:
        axis: the mesh axis that splits the sequence.
    """

    slot: ClassVar[str] = "sequence"
    axis: str = "context"

    def apply(self, rules: Table) -> Table:
        return {**rules, "seq": self.axis, "q_seq": self.axis, "kv_seq": self.axis}


@dataclasses.dataclass(frozen=True)
class Ulysses(Strategy):
    """Attention splits heads instead of tokens: two all-to-alls exchange one for the other (arXiv:2309.14509).

    The mesh axis splits heads beside those of tensor parallelism.

    Args:
        axis: the mesh axis that splits the sequence.
    """

    slot: ClassVar[str] = "sequence"
    axis: str = "context"

    def apply(self, rules: Table) -> Table:
        return {**rules, "seq": self.axis, "attn_heads": (*mesh_axes_of(rules.get("act_heads")), self.axis)}
