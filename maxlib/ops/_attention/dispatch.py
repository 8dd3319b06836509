"""Which implementation runs: what each can do, and why one is chosen."""

import dataclasses
from collections.abc import Callable

import jax

FEATURES = {
    "gqa": "fewer key than query heads",
    "value_dim": "values of another width than keys",
    "softcap": "soft-capped logits",
    "sinks": "a sink logit per head",
    "bias": "an additive bias",
    "lse": "the log-sum-exp as a result",
    "float64": "double precision",
}


@dataclasses.dataclass(frozen=True)
class Call:
    """All that decides who can compute one attention: shapes, dtype, features used, device."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    features: frozenset[str]
    platform: str
    device_kind: str

    def __str__(self) -> str:
        uses = ", ".join(sorted(self.features)) or "no extra features"
        return (
            f"B={self.batch} T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads} "
            f"Hk={self.key_dim} Hv={self.value_dim} {self.dtype} ({uses}) on {self.platform} ({self.device_kind})"
        )


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention. `run` has the signature of `reference`; every row of the table has gradients.

    by_name: why it runs only where it is asked for (None: it may be chosen). platforms: where it runs (None:
    everywhere). features: which of `FEATURES` it has. accepts: any further condition, as a function from the call to
    the reason against it, or None.
    """

    name: str
    run: Callable
    about: str
    platforms: frozenset[str] | None = None
    features: frozenset[str] = frozenset(FEATURES)
    accepts: Callable[[Call], str | None] | None = None
    by_name: str | None = None

    def refusal(self, call: Call) -> str | None:
        """Why it cannot run this call, or None if it can."""
        if self.platforms is not None and call.platform not in self.platforms:
            return f"runs on {' and '.join(sorted(self.platforms))}, not on {call.platform}"
        if missing := call.features - self.features:
            return "lacks " + ", ".join(f"{name} ({FEATURES[name]})" for name in sorted(missing))
        return self.accepts(call) if self.accepts else None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which implementation a call gets (None: the one asked for cannot run it), and why."""

    call: Call
    chosen: str | None
    reason: str
    refused: dict[str, str]

    def __str__(self) -> str:
        lines = [f"attention {self.call}", f"-> {self.chosen or 'error'}: {self.reason}"]
        return "\n".join(lines + [f"   {name}: {why}" for name, why in self.refused.items()])


_implementations: list[Implementation] = []


def register(implementation: Implementation, *, before: str | None = None) -> None:
    """Adds an implementation; `implementation=None` takes the first that accepts, so put better ones `before`."""
    names = [one.name for one in _implementations]
    if implementation.name in names:
        raise ValueError(f"attention already has an implementation called {implementation.name!r}")
    _implementations.insert(len(names) if before is None else names.index(before), implementation)


def implementations() -> tuple[Implementation, ...]:
    """All implementations, in the order in which they are preferred."""
    return tuple(_implementations)


def explain(call: Call, name: str | None = None) -> Explanation:
    """Says who would run `call`, without running it."""
    refusals = {one.name: one.refusal(call) for one in _implementations}
    if name is not None and name not in refusals:
        raise ValueError(f"implementation must be None or one of {sorted(refusals)}, got {name!r}")
    unasked = {one.name: f"runs only by name: {one.by_name}" for one in _implementations if one.by_name is not None}
    refused = {one: why for one, why in refusals.items() if why is not None}
    best = next((one for one, why in refusals.items() if why is None and one not in unasked), None)
    if name is None:
        refused = unasked | refused
        return Explanation(call, best, "the first in order of preference that can", refused)
    if name in refused:
        return Explanation(call, None, f"{name} was asked for and {refused[name]}; {best} can run it", refused)
    return Explanation(call, name, "asked for by name", refused)


def choose(call: Call, name: str | None = None) -> Implementation:
    """The implementation to run. A name means that one or an error, never another one."""
    answer = explain(call, name)
    if answer.chosen is None:
        raise ValueError(f"attention cannot run as asked: {answer.reason}. Pass implementation=None for the best one.")
    return by_name(answer.chosen)


def by_name(name: str) -> Implementation:
    return next(one for one in _implementations if one.name == name)


class Table(str):
    """Markdown, which notebooks show as the table that it is."""

    def _repr_markdown_(self) -> str:
        return str(self)


def capabilities() -> Table:
    """The capability matrix: which implementation runs where and has which feature."""
    rows = [["implementation", "runs on", *FEATURES], ["---"] * (len(FEATURES) + 2)]
    for one in _implementations:
        where = "everything" if one.platforms is None else ", ".join(sorted(one.platforms))
        rows.append([f"`{one.name}`", where, *("yes" if name in one.features else "-" for name in FEATURES)])
    return Table("\n".join("| " + " | ".join(row) + " |" for row in rows))


def current_device() -> tuple[str, str]:
    """Platform and kind of the device a trace is for: the mesh in context (which may be absent hardware), or the
    default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.default_device.value or jax.devices()[0]
    return (device, device) if isinstance(device, str) else (device.platform, device.device_kind)
