"""The choice between implementations of a recurrence, shared by the gated delta rule, Kimi delta attention and SSD."""

import dataclasses
from collections.abc import Callable
from typing import Any

from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops import _tuning
from maxlib.ops._explanation import Explanation, say_once
from maxlib.ops._findings import refused as failed_check

FEW = 8  # tokens up to which the recurrence is faster than a chunk
SEQUENTIAL = f"the reference, token by token: the fastest form for up to {FEW} tokens"


@dataclasses.dataclass(frozen=True)
class Call:
    """The properties of a call that decide its implementation: shapes, dtype, options, device.

    Args:
      batch: number B of rows.
      tokens: number T of tokens in a row.
      key_heads: heads of keys, or groups of SSD.
      heads: heads of values.
      key_dim: rows of a state: the width of keys, or the size of SSD's state.
      value_dim: columns of a state: the width of values, with those of a transition if the sequence is split.
      dtype: dtype of the values.
      platform: platform of the device.
      device_kind: jax's name of the device.
      l2_norm: True if queries and keys have unit norm.
      tracked: True if JAX tracks the mesh axes that arrays vary over (`jax.shard_map` with `check_vma`).
      letters: the letters by which the operation names heads and widths, in the order above.
    """

    batch: int
    tokens: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    platform: str
    device_kind: str
    l2_norm: bool = True
    tracked: bool = False
    letters: tuple[str, str, str, str] = ("K", "N", "Hk", "Hv")

    def __str__(self) -> str:
        sizes = (self.batch, self.tokens, self.key_heads, self.heads, self.key_dim, self.value_dim)
        named = dict(zip(("B", "T", *self.letters), sizes, strict=True))
        shape = " ".join(f"{letter}={size}" for letter, size in named.items())
        return f"{shape} {self.dtype} on {self.platform} ({self.device_kind})"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute a recurrence.

    Args:
      about: description in one line.
      platforms: platforms on which it runs; None for all.
      by_name: why it runs only by name; None if it may be chosen.
      tiles: function of a call that returns its tile sizes; None if it has none.
      accepts: function of a call and its tile sizes that returns why it cannot run the call, or None.
    """

    about: str
    platforms: frozenset[str] | None = None
    by_name: str | None = None
    tiles: Callable[[Call], TileSizes] | None = None
    accepts: Callable[[Call, Any], str | None] | None = None


@dataclasses.dataclass(frozen=True)
class Operation:
    """A recurrent operation and its implementations.

    Args:
      name: name of the operation in `maxlib.ops`.
      table: its implementations, in order of preference.
      widths: function of a call that returns the widths in its key in tables of tile sizes.
    """

    name: str
    table: dict[str, Implementation]
    widths: Callable[[Call], dict[str, int]]

    def sizes(self, call: Call, name: str | None) -> _tuning.Tuned | None:
        """Returns the tile sizes that an implementation runs a call with; None if it has none."""
        if name is None or (default := self.table[name].tiles) is None:
            return None
        return _tuning.choose(default(call), _tuning.key_of({"T": call.tokens}, self.widths(call)), call.device_kind)

    def refusals(self, call: Call) -> dict[str, str | None]:
        """Returns for each implementation why it cannot run a call, or None."""
        return {one: self._refusal(call, one) or failed_check(self.name, one, call.device_kind) for one in self.table}

    def _refusal(self, call: Call, name: str) -> str | None:
        row = self.table[name]
        if row.platforms is not None and call.platform not in row.platforms:
            return f"runs on {' and '.join(sorted(row.platforms))}, not on {call.platform}"
        sizes = self.sizes(call, name)
        return row.accepts(call, sizes and sizes.sizes) if row.accepts else None

    def explain(self, call: Call, name: str | None = None) -> Explanation:
        """Finds the implementation that would run a call, without running it.

        Args:
          call: the call.
          name: name of the requested implementation; None for the fastest that may be chosen.

        Raises:
          ValueError: when no implementation has this name.
        """
        if name is not None and name not in self.table:
            raise ValueError(f"implementation must be one of {', '.join(self.table)}, or None, got {name!r}")
        refused = {one: why for one, why in self.refusals(call).items() if why is not None}
        if name in refused:
            return Explanation(self.name, call, None, f"{name} was requested, but it {refused[name]}", refused)
        if name is not None:
            return self._chosen(call, name, "requested by name", refused)
        # A failure of `check` takes precedence over `by_name` as the reason.
        refused = {one: f"runs only by name: {row.by_name}" for one, row in self.table.items() if row.by_name} | refused
        # Decoding has one or a few tokens at a time, so a chunk would be mostly padding.
        order = ("sequential", *self.table) if call.tokens <= FEW else tuple(self.table)
        best = next((one for one in order if one not in refused), None)
        reason = "no implementation can run it" if best is None else self.table[best].about
        return self._chosen(call, best, reason, refused)

    def _chosen(self, call: Call, name: str | None, reason: str, refused: dict[str, str]) -> Explanation:
        return Explanation(self.name, call, name, reason, refused, self.sizes(call, name))

    def choose(self, call: Call, name: str | None) -> Explanation:
        """Returns the implementation to run, and its tile sizes. A named one is never replaced by another.

        Raises:
          ValueError: when the named implementation cannot run the call, or does not exist.
        """
        found = self.explain(call, name)
        if found.chosen is None:
            raise ValueError(f"{self.name}: {found.reason}. Pass implementation=None for the best one that can.")
        if name is None and found.chosen == "chunked":
            for package, why in found.refused.items():
                if "pip install" in why:  # this package has kernels for the call
                    say_once(found, (call.platform, call.device_kind), f"{package} {why}")
        return found
