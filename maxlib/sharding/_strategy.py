"""The base class of parallelism strategies: frozen values that describe how arrays are split and combine with `|`."""

import dataclasses
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar

from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import AxisRules, IfFree, check_axes

Traffic = tuple[str, Collection[str], float]  # kind of collective, mesh axes, bytes on one device


@dataclasses.dataclass(frozen=True)
class ShardedWeight:
    """A parameter in a training step.

    Args:
        split: Mesh axes that split it.
        gathered: Those of them that also split the batch, over which it is gathered for use.
        size: Bytes in the compute dtype, once gathered.
        uses: Number of gathers in a pass: one for each tick of a pipeline and for each microbatch.
        trained: False if it is frozen and has no gradient.
        axes: Names of its dimensions, without those of layers.
    """

    split: Collection[str]
    gathered: Collection[str]
    size: float
    uses: float
    trained: bool = True
    axes: tuple[str | None, ...] = ()


@dataclasses.dataclass(frozen=True)
class ExpertLayer:
    """A mixture of experts.

    Args:
        top_k: Number of experts per token.
        layers: Number of layers that it represents, including idle ticks of a pipeline.
    """

    top_k: int
    layers: float


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """One device's part of a training step; the argument of `Strategy.traffic` and `Strategy.host_copies`.

    Args:
        layout: The layout.
        platform: "tpu", "cuda" or "cpu".
        sequence: Tokens of a sequence.
        tokens: Tokens of the batch on this device.
        width: Bytes of a number in the compute dtype.
        hidden: Bytes of the residual stream of these tokens.
        layers: Number of layers computed for these tokens, including idle ticks of a pipeline.
        passes: 2 for forward and backward, 3 if layers are recomputed; in between if parts of them are.
        ticks: Ticks of a pipeline divided by its microbatches; 1 without one.
        weights: The parameters.
        mixers: The layers that mix tokens (`nn.SequenceMixer`), each with the number of layers that it represents.
        experts: The mixtures of experts.
        moments_on_host: Bytes of the optimizer's state that are stored on the host.
        weights_on_host: Bytes of trained parameters that are stored on the host.
    """

    layout: Any
    platform: str
    sequence: int
    tokens: float
    width: int
    hidden: float
    layers: float
    passes: float
    ticks: float
    weights: tuple[ShardedWeight, ...]
    mixers: tuple[tuple[Any, float], ...]
    experts: tuple[ExpertLayer, ...]
    moments_on_host: float
    weights_on_host: float

    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of size above 1 that split the axis `name`."""
        return self.layout.mesh_axes(name)

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes over which a sequence remains split in attention."""
        return tuple(axis for axis in self.axes("seq") if axis not in self.axes("act_heads"))

    def parts(self, axes: Collection[str]) -> int:
        """Returns the number of devices along mesh axes."""
        return math.prod(self.layout.mesh.shape[axis] for axis in axes)


# Strategies apply in this order, no matter how they were combined, because some read the rules of earlier ones (experts
# extend the batch). Other kinds come after these, plain rules last.
KINDS = ("batch", "fsdp", "tensor", "tensor_sequence", "experts", "sequence", "pipeline", "optimizer", "offload")


class Strategy:
    """Base class of parallelisms: configuration, effect on the layout, and communication costs.

    A subclass is a frozen dataclass and overrides the methods that it changes. `a | b` combines strategies; of two with
    the same `kind` the later one replaces the earlier one. A mapping counts as plain rules, which override all
    strategies.
    """

    kind: ClassVar[str] = ""

    def apply(self, rules: AxisRules) -> AxisRules:
        """Returns the rules with the changes of this strategy.

        Args:
            rules: From axis name to mesh axes, after earlier strategies.
        """
        return rules

    def rules_in_jit(self, rules: AxisRules) -> AxisRules:
        """Returns the rules for activations of a running program, if they differ from the rules of its arguments.

        Args:
            rules: From axis name to mesh axes.
        """
        return rules

    def merge(self, earlier: "Strategy") -> "Strategy":
        """Combines with an earlier strategy of the same kind; by default this one replaces it.

        Args:
            earlier: The earlier strategy.
        """
        return self

    def check(self, mesh: Any, others: tuple["Strategy", ...]) -> None:
        """Checks the strategy against a mesh and the other strategies of a layout.

        Args:
            mesh: The layout's mesh.
            others: All strategies of the layout.

        Raises:
            ValueError: if they conflict.
        """

    def parameter_spec(self, spec: P, names: tuple[str | None, ...], shape: tuple[int, ...], path: str, mesh: Any) -> P:
        """Returns the partition spec of a parameter; by default the spec of the rules.

        Args:
            spec: The spec of the rules and earlier strategies.
            names: Its axis names.
            shape: Its shape.
            path: Its dotted path in the model.
            mesh: The mesh.
        """
        return spec

    def optimizer_spec(self, spec: P, shape: tuple[int, ...], mesh: Any) -> P:
        """Returns the spec of the optimizer's moments of a parameter.

        Args:
            spec: The spec of the parameter.
            shape: Its shape.
            mesh: The mesh.
        """
        return spec

    def traffic(self, step: StepFacts) -> Iterator[Traffic]:
        """Yields the communication of a training step due to this strategy, for plans without compilation.

        Args:
            step: One device's part of the step.
        """
        yield from ()

    def host_copies(self, step: StepFacts) -> tuple[float, float]:
        """Returns the bytes that a device copies to the host and from the host in a training step, due to this
        strategy.

        Args:
            step: One device's part of the step.
        """
        return 0.0, 0.0

    def __or__(self, other: "Strategy | AxisRules") -> "Strategy":
        return join(self, other)

    def __ror__(self, other: AxisRules) -> "Strategy":
        return join(other, self)


@dataclasses.dataclass(frozen=True)
class Rules(Strategy):
    """Plain rules: a table from the axes of arrays to mesh axes.

    Args:
        table: From axis name to one or several mesh axes, `IfFree`, or None (not split).

    Raises:
        ValueError: for a name that is not declared, a value that is not a mesh axis, or the axis "layers", which only a
            `Pipeline` splits.
    """

    kind: ClassVar[str] = "rules"
    table: Any = ()

    def __post_init__(self):
        table = dict(self.table)
        check_axes(table, "rules")
        for name, axes in table.items():
            _check_rule(name, axes)
        # A sorted tuple is hashable: layouts are part of jit's cache key.
        frozen = {name: tuple(axes) if isinstance(axes, list) else axes for name, axes in table.items()}
        object.__setattr__(self, "table", tuple(sorted(frozen.items())))

    def apply(self, rules: AxisRules) -> AxisRules:
        return {**rules, **dict(self.table)}

    def merge(self, earlier: Strategy) -> Strategy:
        assert isinstance(earlier, Rules)
        return Rules({**dict(earlier.table), **dict(self.table)})


def _check_rule(name: str, axes: Any) -> None:
    if isinstance(axes, Strategy):
        raise ValueError(
            f"a rule must name mesh axes; got {name!r} -> {axes!r}. Combine strategies instead: FSDP | {axes!r}"
        )
    if axes is not None and not isinstance(axes, str | tuple | list | IfFree):
        raise ValueError(f"a rule must be one or several mesh axes, IfFree or None; got {name!r} -> {axes!r}")
    if name == "layers":
        raise ValueError(
            f"only a Pipeline may shard 'layers', got {name!r} -> {axes!r}; add it with | sharding.Pipeline('stage', 8)"
        )


@dataclasses.dataclass(frozen=True)
class Joined(Strategy):
    """Several strategies, at most one per kind, in the order in which they apply."""

    parts: tuple[Strategy, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def parts_of(strategy: Any) -> tuple[Strategy, ...]:
    """Returns the combined strategies.

    Args:
        strategy: A strategy, or a mapping of plain rules.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(strategy, Joined):
        return strategy.parts
    if isinstance(strategy, Mapping):
        return (Rules(strategy),)
    if not isinstance(strategy, Strategy):
        hint = f"; sharding.preset({strategy!r}) makes one of a name" if isinstance(strategy, str) else ""
        hint = f", a class: write {strategy.__name__}()" if isinstance(strategy, type) else hint
        raise TypeError(f"a layout takes a strategy such as sharding.FSDP, or a table of rules; got {strategy!r}{hint}")
    return (strategy,)


def join(*strategies: Any) -> Strategy:
    """Combines strategies into one, as `|` does.

    Args:
        strategies: Strategies, or mappings of plain rules. Those of the same kind are merged, by default to the last
            one.

    Raises:
        TypeError: for anything else.
    """
    by_kind: dict[str, Strategy] = {}
    for part in (part for strategy in strategies for part in parts_of(strategy)):
        kind = part.kind or type(part).__qualname__
        by_kind[kind] = part.merge(by_kind[kind]) if kind in by_kind else part
    ordered = tuple(by_kind[kind] for kind in sorted(by_kind, key=_order))
    return ordered[0] if len(ordered) == 1 else Joined(ordered)


def _order(kind: str) -> int:
    """Returns the position of a kind: known ones, then those of your own, then plain rules."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS) + (kind == Rules.kind)


@functools.cache
def rules_of(strategy: Strategy) -> AxisRules:
    """Returns the equivalent table of rules of a strategy."""
    rules: AxisRules = {}
    for part in parts_of(strategy):
        rules = part.apply(rules)
    return rules
