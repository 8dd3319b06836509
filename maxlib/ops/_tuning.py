"""The tile sizes that a kernel runs with: those of the code around it, of a device's table, or its own choice."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import jax

from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops import _findings

S = TypeVar("S", bound=TileSizes)

# Part of jit's cache key, which a plain context variable would not be: sizes are chosen while a program is traced.
_in_code = jax.make_user_context(())


@contextlib.contextmanager
def tile_sizes(*sizes: TileSizes) -> Iterator[None]:
    """Makes kernels run with these tile sizes, whatever the tables say. It selects no kernel.

    Each class of `ops.tiles` belongs to one kernel: `with ops.tile_sizes(ops.tiles.ChunkedTiles(256, 512)): ...`. It
    covers what is traced inside; a function that was compiled before is compiled again. Inner sizes replace outer ones.

    Args:
        *sizes: One of each kernel; `explain_attention(...).tiles.sizes` are those that a call gets.

    Raises:
        TypeError: When one of them is something else, or the sizes of one pass only.
        ValueError: When two are for the same kernel.
    """
    kinds = [type(size) for size in sizes]
    for size in sizes:
        if not (isinstance(size, TileSizes) and hasattr(size, "kernel")):
            raise TypeError(f"ops.tile_sizes takes sizes of whole kernels, classes of ops.tiles, got {size!r}")
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"ops.tile_sizes takes one size for each kernel, got {kinds}")
    # Sizes of other kernels from an outer `with` stay.
    with _in_code((*(size for size in _in_code.value if type(size) not in kinds), *sizes)):
        yield


@dataclasses.dataclass(frozen=True)
class Tuned(Generic[S]):
    """Sizes and where they come from.

    Args:
        sizes: What the kernel runs with.
        source: "code" (`ops.tile_sizes`), "measured" by `python -m maxlib.ops tune`, or "default".
        key: Kernel and shape, as in a device's table.
    """

    sizes: S
    source: str
    key: str

    def __str__(self) -> str:
        return f"{self.sizes}, {self.source}"


def choose(default: S, key: str, device_kind: str) -> Tuned[S]:
    """Chooses the sizes of a call.

    Args:
        default: The kernel's own choice for the call.
        key: `key_of` the call's shape.
        device_kind: jax's name of the device.
    """
    # The class of the default says which kernel asks: one class belongs to one kernel.
    kind: Any = type(default)
    key = f"{kind.kernel} {key}"
    for size in _in_code.value:
        if type(size) is kind:
            return Tuned(size, "code", key)
    with contextlib.suppress(ValueError, TypeError, AttributeError, KeyError):  # a damaged entry counts as none
        if (measured := _findings.tiles(key, device_kind)) is not None:
            return Tuned(kind.from_json(measured), "measured", key)
    return Tuned(default, "default", key)


def key_of(lengths: dict[str, int], widths: dict[str, int]) -> str:
    """Returns the key of a shape in a table; lengths count by the power of two that holds them.

    3000 and 4096 tokens share sizes: they are cut into blocks of about the same number.
    """
    up = {name: 1 << max(size - 1, 0).bit_length() for name, size in lengths.items()}
    return " ".join(f"{name}={size}" for name, size in (up | widths).items())
