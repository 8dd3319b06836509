"""What every parallelism is: a frozen value that says how it lays arrays out, and that mixes with others by `|`."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

from jax.sharding import PartitionSpec as P

from maxlib.sharding._axes import IfFree, Table, check_axes

# Strategies apply in this order, however they were joined; those with a slot of their own come after, plain rules last.
SLOTS = ("batch", "fsdp", "tensor", "tensor_sequence", "experts", "sequence", "pipeline", "optimizer", "offload")

Traffic = tuple[str, tuple[str, ...], float]  # kind of collective, mesh axes, bytes on one device


@runtime_checkable
class Step(Protocol):
    """A device's part of a training step, as `Strategy.traffic` sees it.

    tokens: its own of the batch. hidden: bytes of what a layer makes of them. layers: how many layers it computes for
    them, with a pipeline's idle ticks. passes: 2, forward and backward, or 3 where layers are computed again.
    ticks: of a pipeline, for each microbatch; 1 without one.
    """

    @property
    def tokens(self) -> float: ...
    @property
    def hidden(self) -> float: ...
    @property
    def layers(self) -> float: ...
    @property
    def passes(self) -> int: ...
    @property
    def ticks(self) -> float: ...
    def axes(self, name: str) -> tuple[str, ...]:
        """Returns the mesh axes of more than one device that split the axis `name`."""
        ...


class Strategy:
    """One parallelism: its configuration, how it applies, and what it costs.

    A subclass is a frozen dataclass. `a | b` joins strategies; of two with the same `slot` the later one holds. A
    mapping joins as plain rules, which are the last word.
    """

    slot: ClassVar[str] = ""

    def apply(self, rules: Table) -> Table:
        """Returns `rules`, from axis name to mesh axes, with what this strategy makes of them."""
        return rules

    def apply_running(self, rules: Table) -> Table:
        """Returns the rules that hold while a program is traced, where they differ from those of its arguments."""
        return rules

    def merge(self, earlier: "Strategy") -> "Strategy":
        """Returns what becomes of one in the same slot that was joined earlier: by default this one replaces it."""
        return self

    def check(self, mesh: Any, others: tuple["Strategy", ...]) -> None:
        """Raises ValueError where the mesh, or another strategy, does not go with this one."""

    def place_parameter(self, own: P, names: tuple[str | None, ...], shape: tuple[int, ...], path: str, mesh: Any) -> P:
        """Returns where the parameter at `path` lives, if that is not what the rules say (`own`)."""
        return own

    def place_optimizer(self, own: P, shape: tuple[int, ...], mesh: Any) -> P:
        """Returns where the optimizer's moments of a parameter live; `own` is the parameter's place."""
        return own

    def traffic(self, step: Step) -> Iterator[Traffic]:
        """Yields what a training step moves because of this strategy, for plans that nothing was compiled for."""
        yield from ()

    def __or__(self, other: "Strategy | Table") -> "Strategy":
        return join(self, other)

    def __ror__(self, other: Table) -> "Strategy":
        return join(other, self)


@dataclasses.dataclass(frozen=True)
class Rules(Strategy):
    """Plain rules: on which mesh axes the axes of arrays live.

    Args:
        table: from axis name to a mesh axis, several, `IfFree`, or None (whole).
    """

    slot: ClassVar[str] = "rules"
    table: Any = ()

    def __post_init__(self):
        table = dict(self.table)
        check_axes(table, "rules")
        for name, place in table.items():
            _check_place(name, place)
        frozen = {name: tuple(place) if isinstance(place, list) else place for name, place in table.items()}
        object.__setattr__(self, "table", tuple(sorted(frozen.items())))

    def apply(self, rules: Table) -> Table:
        return {**rules, **dict(self.table)}

    def merge(self, earlier: Strategy) -> Strategy:
        assert isinstance(earlier, Rules)
        return Rules({**dict(earlier.table), **dict(self.table)})


def _check_place(name: str, place: Any) -> None:
    if isinstance(place, Strategy):
        raise ValueError(
            f"a rule names mesh axes; got {name!r} -> {place!r}. Join a strategy instead: FSDP | {place!r}"
        )
    if place is not None and not isinstance(place, str | tuple | list | IfFree):
        raise ValueError(f"a rule names a mesh axis, several, IfFree or None; got {name!r} -> {place!r}")
    if name == "layers":
        raise ValueError(
            f"where layers lie is what a pipeline says, got {name!r} -> {place!r}; join sharding.Pipeline('stage', 8) by |"
        )


@dataclasses.dataclass(frozen=True)
class Joined(Strategy):
    """Several strategies, each slot once, in the order in which they apply."""

    parts: tuple[Strategy, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def parts_of(strategy: Any) -> tuple[Strategy, ...]:
    """Returns the strategies that were joined; a mapping counts as plain rules.

    Raises:
        TypeError: for anything else.
    """
    if isinstance(strategy, Joined):
        return strategy.parts
    if isinstance(strategy, Mapping):
        return (Rules(strategy),)
    if not isinstance(strategy, Strategy):
        hint = f"; sharding.preset({strategy!r}) makes one of a name" if isinstance(strategy, str) else ""
        raise TypeError(f"a layout takes a strategy such as sharding.FSDP, or a table of rules; got {strategy!r}{hint}")
    return (strategy,)


def join(*strategies: Any) -> Strategy:
    """Returns all strategies as one; of those with the same slot, what the later one makes of the earlier."""
    found: dict[str, Strategy] = {}
    for part in (part for strategy in strategies for part in parts_of(strategy)):
        slot = part.slot or type(part).__qualname__
        found[slot] = part.merge(found[slot]) if slot in found else part
    ordered = tuple(found[slot] for slot in sorted(found, key=_order))
    return ordered[0] if len(ordered) == 1 else Joined(ordered)


def _order(slot: str) -> int:
    return SLOTS.index(slot) if slot in SLOTS else len(SLOTS) + (slot == Rules.slot)


@functools.cache
def rules_of(strategy: Strategy) -> Table:
    """Returns the plain rules that a strategy comes to."""
    return functools.reduce(lambda rules, part: part.apply(rules), parts_of(strategy), {})
