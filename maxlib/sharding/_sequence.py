"""Context parallelism: the tokens of a row are split over devices.

Layers that treat tokens independently need no communication. The three strategies differ in how queries get the keys of
other devices.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar

from maxlib.sharding._axes import AxisRules, IfFree, MeshAxes, mesh_axes_of
from maxlib.sharding._strategy import StepFacts, Strategy, Traffic


@dataclasses.dataclass(frozen=True)
class SplitSequence:
    """A split sequence, the argument of `SequenceMixer.traffic`.

    Args:
        strategy: The strategy that splits it.
        mesh: From mesh axis to number of devices.
        parts: Devices that share a sequence.
        heads: Devices that share the heads (tensor parallelism).
        rows: Sequences on a device.
        tokens: Tokens on a device.
        width: Bytes of a number in the compute dtype.
        passes: 2 for forward and backward, 3 if the forward pass is computed again; in between if parts of it are.
    """

    strategy: "ContextParallel"
    mesh: Mapping[str, int]
    parts: int
    heads: int
    rows: float
    tokens: float
    width: int
    passes: float

    def attention(self, *, queries: int, keys: int) -> dict[str, float]:
        """Returns the bytes that attention sends in a training step, by kind of collective.

        Args:
            queries: Numbers in a token's queries and outputs.
            keys: Numbers in a token's keys and values.
        """
        return self.strategy.attention(self, queries=queries, keys=keys)


class ContextParallel(Strategy):
    """Base class of strategies that split a sequence; they differ in `apply` and in the traffic of `attention`."""

    kind: ClassVar[str] = "sequence"

    def attention(self, split: SplitSequence, *, queries: int, keys: int) -> dict[str, float]:
        """Returns the bytes that attention sends in a training step, by kind of collective.

        Args:
            split: The split sequence.
            queries: Numbers in a token's queries and outputs.
            keys: Numbers in a token's keys and values.
        """
        raise NotImplementedError(f"{type(self).__name__} must define attention(split, queries, keys) for plans")

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the traffic of every layer that mixes tokens, because sequences are split."""
        if not (context := step.sequence_axes):
            return
        parts = step.parts(context)
        split = SplitSequence(
            strategy=self,
            mesh=step.layout.mesh.shape,
            parts=parts,
            heads=step.parts(set(step.axes("attn_heads")) - set(context)),
            rows=step.tokens * parts / step.sequence,
            tokens=step.tokens,
            width=step.width,
            passes=step.passes,
        )
        for mixer, layers in step.mixers:
            for kind, size in mixer.traffic(split).items():
                yield kind, context, size * layers


def _between_layers(axis: str, rules: AxisRules) -> MeshAxes:
    """Returns the rule of tokens outside attention: `axis` splits them, and then sequence parallelism does."""
    further = rules.get("seq")
    return (axis, further) if isinstance(further, IfFree) else axis


@dataclasses.dataclass(frozen=True)
class AllGatherAttention(ContextParallel):
    """All-gather attention: every device gathers all keys and values, for its own queries (Llama 3, arXiv:2407.21783).

    Args:
        axis: The mesh axis that splits the sequence.
    """

    axis: str = "context"

    def apply(self, rules: AxisRules) -> AxisRules:
        # "kv_seq" has no rule, so inside attention keys and values are gathered: [B, T / n, N, H] and [B, T, K, H].
        return {**rules, "seq": _between_layers(self.axis, rules), "q_seq": self.axis}

    def attention(self, split: SplitSequence, *, queries: int, keys: int) -> dict[str, float]:
        # Forward: all-gather of keys and values. Backward: reduce-scatter of their gradients.
        gathered = split.tokens * split.width / split.heads * keys * split.parts
        return {"all-gather": (split.passes - 1) * gathered, "reduce-scatter": gathered}


@dataclasses.dataclass(frozen=True)
class RingAttention(ContextParallel):
    """Ring attention: keys and values are passed around the devices, while queries stay (arXiv:2310.01889).

    Args:
        axis: The mesh axis that splits the sequence.
    """

    axis: str = "context"

    def apply(self, rules: AxisRules) -> AxisRules:
        # No device ever holds all keys: queries [B, T / n, N, H], keys and values [B, T / n, K, H].
        return {**rules, "seq": _between_layers(self.axis, rules), "q_seq": self.axis, "kv_seq": self.axis}

    def attention(self, split: SplitSequence, *, queries: int, keys: int) -> dict[str, float]:
        # Every pass sends all keys and values; the backward pass also sends the sums of their gradients, in float32.
        number = split.tokens * split.width / split.heads
        return {"collective-permute": (split.passes + 4 / split.width) * number * keys * split.parts}


@dataclasses.dataclass(frozen=True)
class UlyssesAttention(ContextParallel):
    """Ulysses attention: all-to-alls reshard from split tokens to split heads and back (arXiv:2309.14509).

    The mesh axis splits the heads that a device has under tensor parallelism.

    Args:
        axis: The mesh axis that splits the sequence.
    """

    axis: str = "context"

    def apply(self, rules: AxisRules) -> AxisRules:
        # "q_seq" and "kv_seq" have no rule: [B, T / n, N, H] -> [B, T, N / n, H] inside attention.
        return {
            **rules,
            "seq": _between_layers(self.axis, rules),
            "attn_heads": (*mesh_axes_of(rules.get("act_heads")), self.axis),
        }

    def attention(self, split: SplitSequence, *, queries: int, keys: int) -> dict[str, float]:
        # Queries, keys, values and outputs are exchanged in every pass.
        return {"all-to-all": split.passes * (split.tokens * split.width / split.heads) * (queries + keys)}


def by_rules(axes: Callable[[str], tuple[str, ...]]) -> ContextParallel | None:
    """Returns the strategy by which rules split the sequence of attention; None if they do not split it.

    Args:
        axes: Returns the mesh axes of size above 1 that split an axis, such as "seq".

    Raises:
        ValueError: when keys are split over several mesh axes, around which no ring goes.
    """
    queries, keys = axes("q_seq"), axes("kv_seq")
    if len(keys) > 1:
        raise ValueError(f"'kv_seq' can be split over one mesh axis only, but its rule names {keys}")
    if keys:
        return RingAttention(keys[0])
    if queries:
        return AllGatherAttention(queries[0])
    exchanged = [axis for axis in axes("seq") if axis in axes("attn_heads") and axis not in axes("act_heads")]
    return UlyssesAttention(exchanged[0]) if exchanged else None
