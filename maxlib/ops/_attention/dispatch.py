"""Choice of an attention implementation from the registered ones; `table` registers them."""

import dataclasses
from collections.abc import Callable

from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops import _tuning
from maxlib.ops._attention.masks import StaticMask
from maxlib.ops._explanation import Explanation, say_once
from maxlib.ops._findings import refused as failed_check

OFFLINE = "offline"
"""Selects the best implementation that compiles without the device, for plans."""

# The proven kernels of each platform, in order of preference.
FUSED = {"gpu": ("cudnn", "mosaic_gpu", "tokamax_triton"), "tpu": ("splash",)}

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
    """The properties of an attention call that decide its implementation: shapes, dtype, features, mask, device.

    `tracked` is True if JAX tracks the mesh axes that arrays vary over (`jax.shard_map` with `check_vma`), and `shared`
    if the values are the first channels of the keys (a cache of latents).
    """

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
    mask: StaticMask | None = None
    tracked: bool = False
    shared: bool = False

    @property
    def key(self) -> str:
        """Returns the key of its shape in tables of tile sizes; a soft-cap needs registers, so it has its own."""
        # Lengths count by powers of two, widths exactly: they decide what fits into registers.
        widths = {"Hk": self.key_dim, "Hv": self.value_dim} | ({"softcap": 1} if "softcap" in self.features else {})
        return _tuning.key_of({"T": self.queries, "S": self.keys}, widths)

    def __str__(self) -> str:
        uses = ", ".join(sorted(self.features)) or "no extra features"
        uses = f"{uses}; mask: {self.mask or 'intervals'}{'; values are channels of the keys' if self.shared else ''}"
        return (
            f"B={self.batch} T={self.queries} S={self.keys} N={self.heads} K={self.kv_heads} "
            f"Hk={self.key_dim} Hv={self.value_dim} {self.dtype} ({uses}) on {self.platform} ({self.device_kind})"
        )


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention; all of them are differentiable.

    Args:
      name: name by which a call selects it.
      run: the function, with the signature of `reference`.
      about: one line for the table of capabilities.
      platforms: platforms it runs on; None for all.
      features: the `FEATURES` it supports.
      accepts: function that checks further conditions; it returns the reason why a call cannot run, or None.
      by_name: reason why it only runs when selected by name; None if it may be chosen automatically.
      takes_mask_hint: True if `run` also takes `mask_hint`, a `MaskHint` that describes the intervals.
      tiles: function that returns the tile sizes it chooses for a call; `run` then also takes `tiles`.
    """

    name: str
    run: Callable
    about: str
    platforms: frozenset[str] | None = None
    features: frozenset[str] = frozenset(FEATURES)
    accepts: Callable[[Call], str | None] | None = None
    by_name: str | None = None
    takes_mask_hint: bool = False
    tiles: Callable[[Call], TileSizes] | None = None

    def sizes(self, call: Call) -> _tuning.Tuned | None:
        """Returns the tile sizes that it runs a call with: those of code and tables come before its own."""
        return None if self.tiles is None else _tuning.choose(self.tiles(call), call.key, call.device_kind)

    def sized(self, call: Call) -> tuple[str, TileSizes | None]:
        """Returns its name and the tile sizes of a call."""
        # Chosen once, and static from then on: the backward pass may be traced later, outside of `ops.tile_sizes`.
        sizes = self.sizes(call)
        return self.name, sizes and sizes.sizes

    def refusal(self, call: Call) -> str | None:
        """Returns the reason why it cannot run this call; None if it can."""
        if self.platforms is not None and call.platform not in self.platforms:
            return f"runs on {' and '.join(sorted(self.platforms))}, not on {call.platform}"
        if missing := call.features - self.features:
            return "lacks " + ", ".join(f"{name} ({FEATURES[name]})" for name in sorted(missing))
        return self.accepts(call) if self.accepts else None


_implementations: list[Implementation] = []


def register(implementation: Implementation, *, before: str | None = None) -> None:
    """Adds an implementation to the table.

    Args:
      implementation: the row to add.
      before: name of the row to insert it before; default: at the end. The first row that supports a call runs it.

    Raises:
      ValueError: when the name is taken.
    """
    names = [one.name for one in _implementations]
    if implementation.name in names:
        raise ValueError(f"attention already has an implementation called {implementation.name!r}")
    _implementations.insert(len(names) if before is None else names.index(before), implementation)


def implementations() -> tuple[Implementation, ...]:
    """Returns all implementations in order of preference."""
    return tuple(_implementations)


def explain(call: Call, name: str | None = None) -> Explanation:
    """Finds the implementation that would run `call`, without running it.

    Args:
      call: the call.
      name: name of the requested implementation; None for the first that supports the call.

    Raises:
      ValueError: when no implementation has this name.
    """
    refusals = {
        one.name: one.refusal(call) or failed_check("attention", one.name, call.device_kind) for one in _implementations
    }
    if name is not None and name not in refusals:
        raise ValueError(f"implementation must be None or one of {sorted(refusals)}, got {name!r}")
    unasked = {one.name: f"runs only by name: {one.by_name}" for one in _implementations if one.by_name is not None}
    refused = {one: why for one, why in refusals.items() if why is not None}
    best = next((one for one, why in refusals.items() if why is None and one not in unasked), None)
    if name is None:
        refused = unasked | refused
        return _chosen(call, best, "" if best is None else by_name(best).about, refused)
    if name in refused:
        return Explanation(
            "attention", call, None, f"{name} was requested, but it {refused[name]}; {best} can run it", refused
        )
    return _chosen(call, name, "requested by name", refused)


def _chosen(call: Call, name: str | None, reason: str, refused: dict[str, str]) -> Explanation:
    sizes = None if name is None else by_name(name).sizes(call)
    return Explanation("attention", call, name, reason, refused, sizes)


def choose(call: Call, name: str | None = None) -> Implementation:
    """Returns the implementation to run. A named one is never replaced by another.

    Raises:
      ValueError: when the named implementation cannot run the call, or does not exist.
    """
    if name == OFFLINE:
        return _compiled_without_device(call)
    answer = explain(call, name)
    if name is None and answer.chosen == "chunked" and call.platform in FUSED:
        _say_why(answer)
    if answer.chosen is None:
        raise ValueError(
            f"attention cannot run as requested: {answer.reason}. Pass implementation=None for the best one."
        )
    return by_name(answer.chosen)


def _compiled_without_device(call: Call) -> Implementation:
    """Returns the implementation of a call; if it only compiles on a GPU, maxlib's for Hopper or else plain XLA."""
    best = choose(call)
    stands_in = best if best.name not in ("cudnn", "tokamax", "tokamax_triton") else by_name("mosaic_gpu")
    return stands_in if stands_in.refusal(call) is None else by_name("chunked")


def _say_why(answer: Explanation) -> None:
    """Logs why an accelerator runs plain XLA; a kernel whose package is missing says what to install."""
    call: Call = answer.call
    why = ", and ".join(f"{name} {answer.refused.get(name, 'is not registered')}" for name in FUSED[call.platform])
    asked = [one.name for one in _implementations if one.by_name is not None and one.refusal(call) is None]
    by_name = f"By name this call could run {' or '.join(asked)}. " if asked else ""
    say_once(answer, (call.platform, call.device_kind), why, by_name)


def by_name(name: str) -> Implementation:
    """Returns the implementation called `name`."""
    return next(one for one in _implementations if one.name == name)


class MarkdownTable(str):
    """A Markdown table, which notebooks render."""

    def _repr_markdown_(self) -> str:
        return str(self)


def capabilities() -> MarkdownTable:
    """Returns the table of implementations, with the platforms and features of each."""
    rows = [["implementation", "runs on", *FEATURES], ["---"] * (len(FEATURES) + 2)]
    for one in _implementations:
        where = "everything" if one.platforms is None else ", ".join(sorted(one.platforms))
        rows.append([f"`{one.name}`", where, *("yes" if name in one.features else "-" for name in FEATURES)])
    return MarkdownTable("\n".join("| " + " | ".join(row) + " |" for row in rows))
