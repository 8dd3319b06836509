"""The table of implementations of the gated delta rule, in order of preference, and the choice between them."""

import dataclasses
from typing import Any

from maxlib.kernels.gated_delta import DeltaTPUTiles, refuses
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops import _tuning
from maxlib.ops._explanation import Explanation
from maxlib.ops._findings import refused as failed_check
from maxlib.ops._gated_delta.chunked import DeltaTiles

FEW = 8  # tokens up to which the recurrence is faster than a chunk


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute the gated delta rule.

    Args:
      about: description in one line.
      platforms: platforms on which it runs; None for all.
      by_name: why it runs only by name; None if it may be chosen.
      tiles: the tile sizes that it chooses; None if it has none.
    """

    about: str
    platforms: frozenset[str] | None = None
    by_name: str | None = None
    tiles: TileSizes | None = None


# In order of speed as far as known. Kernels only run by name until they have been tested on hardware (decision 24).
TABLE = {
    "mosaic_tpu": Implementation(
        "kernels for TPUs in both passes", frozenset({"tpu"}), "it has not run on a TPU yet", DeltaTPUTiles()
    ),
    "chunked": Implementation("chunks of tokens in matmuls, by XLA", tiles=DeltaTiles()),
    "sequential": Implementation(f"the reference, token by token: the fastest form for up to {FEW} tokens"),
}


@dataclasses.dataclass(frozen=True)
class Call:
    """The properties of a call that decide its implementation: shapes, dtype, device."""

    batch: int
    tokens: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    platform: str
    device_kind: str

    def __str__(self) -> str:
        return (
            f"B={self.batch} T={self.tokens} K={self.key_heads} N={self.heads} Hk={self.key_dim} Hv={self.value_dim} "
            f"{self.dtype} on {self.platform} ({self.device_kind})"
        )

    def sizes(self, name: str | None) -> _tuning.Tuned | None:
        """Returns the tile sizes that an implementation runs this call with; None if it has none."""
        if name is None or (default := TABLE[name].tiles) is None:
            return None
        # The states of G value heads share vector memory with their key head's tokens.
        widths = {"G": self.heads // self.key_heads, "Hk": self.key_dim, "Hv": self.value_dim}
        return _tuning.choose(default, _tuning.key_of({"T": self.tokens}, widths), self.device_kind)

    def refusals(self) -> dict[str, str | None]:
        """Returns for each implementation why it cannot run this call, or None."""
        return {name: self._refusal(name) or failed_check(OP, name, self.device_kind) for name in TABLE}

    def _refusal(self, name: str) -> str | None:
        platforms = TABLE[name].platforms
        if platforms is not None and self.platform not in platforms:
            return f"runs on {' and '.join(sorted(platforms))}, not on {self.platform}"
        if name != "mosaic_tpu":
            return None
        tuned: Any = self.sizes(name)
        return refuses(self.heads // self.key_heads, self.key_dim, self.value_dim, self.dtype, tuned.sizes)


OP = "gated_delta_rule"


def explain(call: Call, name: str | None = None) -> Explanation:
    """Finds the implementation that would run a call, without running it.

    Args:
      call: the call.
      name: name of the requested implementation; None for the fastest that may be chosen.

    Raises:
      ValueError: when no implementation has this name.
    """
    if name is not None and name not in TABLE:
        raise ValueError(f"implementation must be one of {', '.join(TABLE)}, or None, got {name!r}")
    refused = {one: why for one, why in call.refusals().items() if why is not None}
    if name in refused:
        return Explanation(OP, call, None, f"{name} was requested, but it {refused[name]}", refused)
    if name is not None:
        return _chosen(call, name, "requested by name", refused)
    # A failure of `check` takes precedence over `by_name` as the reason.
    refused = {one: f"runs only by name: {row.by_name}" for one, row in TABLE.items() if row.by_name} | refused
    # Decoding has one or a few tokens at a time, so a chunk would be mostly padding.
    order = ("sequential", *TABLE) if call.tokens <= FEW else tuple(TABLE)
    best = next((one for one in order if one not in refused), None)
    reason = "no implementation can run it" if best is None else TABLE[best].about
    return _chosen(call, best, reason, refused)


def _chosen(call: Call, name: str | None, reason: str, refused: dict[str, str]) -> Explanation:
    return Explanation(OP, call, name, reason, refused, call.sizes(name))


def choose(call: Call, name: str | None) -> Explanation:
    """Returns the implementation to run, and its tile sizes. A named one is never replaced by another.

    Raises:
      ValueError: when the named implementation cannot run the call, or does not exist.
    """
    found = explain(call, name)
    if found.chosen is None:
        raise ValueError(f"{OP}: {found.reason}. Pass implementation=None for the best one that can.")
    return found
