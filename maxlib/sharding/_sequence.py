"""Context parallelism: the tokens of a row are split over devices.

Layers that treat tokens one by one need no communication. The three strategies differ in how attention's queries reach
the keys of other devices.
"""

import dataclasses
from typing import ClassVar

from maxlib.sharding._axes import Table, mesh_axes_of
from maxlib.sharding._strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Gather(Strategy):
    """All-gather attention: every device gathers all keys and values, for its own queries (Llama 3, arXiv:2407.21783).

    Args:
      axis: the mesh axis that splits the sequence.
    """

    slot: ClassVar[str] = "sequence"
    axis: str = "context"

    def apply(self, rules: Table) -> Table:
        # "kv_seq" has no rule, so inside attention keys and values are whole: [B, T / n, N, H] and [B, T, K, H].
        return {**rules, "seq": self.axis, "q_seq": self.axis}


@dataclasses.dataclass(frozen=True)
class Ring(Strategy):
    """Ring attention: keys and values go around the devices, past the queries of each (arXiv:2310.01889).

    Args:
      axis: the mesh axis that splits the sequence.
    """

    slot: ClassVar[str] = "sequence"
    axis: str = "context"

    def apply(self, rules: Table) -> Table:
        # No device ever holds all keys: queries [B, T / n, N, H], keys and values [B, T / n, K, H].
        return {**rules, "seq": self.axis, "q_seq": self.axis, "kv_seq": self.axis}


@dataclasses.dataclass(frozen=True)
class Ulysses(Strategy):
    """Ulysses attention: all-to-alls change from split tokens to split heads and back (arXiv:2309.14509).

    The mesh axis splits the heads that tensor parallelism leaves to a device.

    Args:
      axis: the mesh axis that splits the sequence.
    """

    slot: ClassVar[str] = "sequence"
    axis: str = "context"

    def apply(self, rules: Table) -> Table:
        # "q_seq" and "kv_seq" have no rule: [B, T / n, N, H] -> [B, T, N / n, H] inside attention.
        return {**rules, "seq": self.axis, "attn_heads": (*mesh_axes_of(rules.get("act_heads")), self.axis)}
