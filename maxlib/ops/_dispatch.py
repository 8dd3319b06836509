"""The choice of a kernel: an operation with several implementations has a table of them, in order of preference.

`Op.choose` returns the first kernel of the table that supports a call; a kernel that is named runs, or the call is an
error. `Op.explain` says the same without running anything, with the reason why every other kernel is not chosen.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from maxlib.kernels.tile_sizes import TileSizes, chosen_tiles

Shaped = jax.Array | jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The properties of a call that decide its kernel; each operation adds its shapes.

    Args:
        dtype: Dtype of the result.
        platform: Platform of the device.
        device_kind: jax's name of the device.
        features: Names of the optional features that the call uses, of `Op.features`.
    """

    dtype: str
    platform: str
    device_kind: str
    features: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One implementation of an operation.

    Args:
        name: Name by which a call selects it.
        run: The function that computes the operation.
        about: Description in one line.
        platforms: Platforms it runs on; None for all.
        features: The optional features it supports, of `Op.features`.
        refuses: Function of a call that returns the reason why the kernel cannot run it, or None.
        by_name: Reason why it only runs when it is named; None if it may be chosen automatically.
        tiles: Function of a call that returns default tile sizes, or None; `run` then takes `tiles`.
        takes_mask_hint: True if `run` takes the static description of attention's mask.
    """

    name: str
    run: Callable
    about: str
    platforms: frozenset[str] | None = None
    features: frozenset[str] = frozenset()
    refuses: Callable[[Any], str | None] | None = None
    by_name: str | None = None
    tiles: Callable[[Any], TileSizes | None] | None = None
    takes_mask_hint: bool = False

    def sizes(self, call: Call) -> TileSizes | None:
        """Returns the tile sizes that it runs a call with: those of `ops.tile_sizes` around it, or its own."""
        default = self.tiles and self.tiles(call)
        return default and chosen_tiles(default)


class Choice(NamedTuple):
    """A kernel and its tile sizes (None if it has none): a static argument of the function that runs it."""

    kernel: str
    tiles: TileSizes | None

    @property
    def options(self) -> dict[str, Any]:
        """Returns the tile sizes as keyword arguments of the kernel."""
        return {} if self.tiles is None else {"tiles": self.tiles}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The implementation that a call gets, and the reasons; it prints as a readable text.

    Args:
        op: Name of the operation.
        call: The call; it prints its shapes, dtype, features and device.
        chosen: Name of the implementation; None if the requested one cannot run the call.
        reason: Why it was chosen.
        refused: Why each of the others cannot run the call, or is not chosen.
        tiles: Tile sizes of the chosen one, a class of `ops.tiles`; None if it has none.
    """

    op: str
    call: Any
    chosen: str | None
    reason: str
    refused: dict[str, str]
    tiles: TileSizes | None = None

    def __str__(self) -> str:
        lines = [f"{self.op} {self.call}", f"-> {self.chosen or 'error'}: {self.reason}"]
        lines += [] if self.tiles is None else [f"   tiles: {self.tiles}"]
        return "\n".join(lines + [f"   {name}: {why}" for name, why in self.refused.items()])


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation and its kernels.

    Args:
        name: Name of the operation in `maxlib.ops`.
        kernels: Its implementations, in order of preference.
        features: Descriptions of optional features, which kernels may lack.
        first: Function of a call that returns the name of a kernel to try before the others, or None.
        fused: Kernels whose refusals are logged when plain XLA runs on their platform.
    """

    name: str
    kernels: tuple[Kernel, ...]
    features: Mapping[str, str] = dataclasses.field(default_factory=dict)
    first: Callable[[Any], str | None] | None = None
    fused: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Kernel:
        return next(kernel for kernel in self.kernels if kernel.name == name)

    def refusal(self, kernel: Kernel, call: Call) -> str | None:
        """Returns the reason why a kernel cannot run a call; None if it can."""
        if kernel.platforms is not None and call.platform not in kernel.platforms:
            return f"runs on {' and '.join(sorted(kernel.platforms))}, not on {call.platform}"
        if missing := call.features - kernel.features:
            return "lacks " + ", ".join(f"{name} ({self.features[name]})" for name in sorted(missing))
        return None if kernel.refuses is None else kernel.refuses(call)

    def explain(self, call: Call, name: str | None = None) -> Explanation:
        """Finds the kernel that would run a call, without running it.

        Args:
            call: The call.
            name: Name of the requested kernel; None for the first that supports the call.

        Raises:
            ValueError: No kernel has this name.
        """
        names = [kernel.name for kernel in self.kernels]
        if name is not None and name not in names:
            raise ValueError(f"implementation must be None or one of {', '.join(names)}, got {name!r}")
        reasons = {kernel.name: self.refusal(kernel, call) for kernel in self.kernels}
        refused = {kernel: reason for kernel, reason in reasons.items() if reason is not None}
        best = self._best(call, refused)
        if name is None:
            unasked = {kernel.name: f"runs only by name: {kernel.by_name}" for kernel in self.kernels if kernel.by_name}
            reason = "no implementation can run it" if best is None else best.about
            return self._chosen(call, best, reason, unasked | refused)
        if name in refused:
            other = f"; {best.name} can run it" if best else ""
            reason = f"{name} was requested, but it {refused[name]}{other}"
            return Explanation(self.name, call, None, reason, refused)
        return self._chosen(call, self[name], "requested by name", refused)

    def _best(self, call: Call, refused: dict[str, str]) -> Kernel | None:
        """Returns the first kernel that may be chosen and is not refused."""
        first = self.first and self.first(call)
        order = sorted(self.kernels, key=lambda kernel: kernel.name != first)
        return next((kernel for kernel in order if kernel.name not in refused and kernel.by_name is None), None)

    def _chosen(self, call: Call, kernel: Kernel | None, reason: str, refused: dict[str, str]) -> Explanation:
        return Explanation(
            self.name, call, kernel and kernel.name, reason, refused, None if kernel is None else kernel.sizes(call)
        )

    def choose(self, call: Call, name: str | None = None) -> Choice:
        """Returns the kernel to run and its tile sizes. A named one is never replaced by another.

        Raises:
            ValueError: The named kernel cannot run the call, or does not exist.
        """
        answer = self.explain(call, name)
        if answer.chosen is None:
            raise ValueError(f"{self.name}: {answer.reason}. Pass implementation=None for the best one that can.")
        if name is None and self[answer.chosen].platforms is None:
            self._warn(answer)
        # Chosen once, and static from then on: the backward pass may be traced later, outside of `ops.tile_sizes`.
        return Choice(answer.chosen, answer.tiles)

    def _warn(self, answer: Explanation) -> None:
        """Logs once for each reason why an accelerator runs plain XLA, if it has kernels for this operation."""
        platform, device_kind = answer.call.platform, answer.call.device_kind
        fused = [name for name in self.fused if platform in (self[name].platforms or ())]
        why = ", and ".join(f"{name} {answer.refused[name]}" for name in fused if name in answer.refused)
        key = self.name, platform, why
        if why and answer.chosen != (self.first and self.first(answer.call)) and key not in _warned:
            _warned.add(key)
            logging.getLogger("maxlib.ops").warning(
                f"{self.name} runs {answer.chosen!r} on {device_kind}, plain XLA and slower than a fused kernel, "
                f"because {why}. The op's explain function lists all reasons."
            )


_warned: set[tuple[str, str, str]] = set()
