"""Tile sizes of kernels: the base of their classes, and the sizes that code sets for the kernels inside it."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TypeVar

import jax


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Sizes by which a kernel cuts its work: a frozen dataclass, so that it can be a static argument.

    A field is a whole number, a tuple of them, or the sizes of one of the kernel's passes (None if it does not run).
    """

    def require(self, multiple: int = 1, *names: str, least: int = 1) -> None:
        """Checks fields, or all of them that are numbers.

        Args:
            multiple: Number of which each field must be a multiple.
            *names: Names of the fields; default: all that are not passes.
            least: Smallest value.

        Raises:
            ValueError: When a field is something else.
        """
        for name in names or [field.name for field in dataclasses.fields(self)]:
            value = getattr(self, name)
            for size in value if isinstance(value, tuple) else (value,):
                if not isinstance(size, int) or size < least or size % multiple:
                    must = "a whole number" if multiple == 1 else f"a multiple of {multiple}"
                    least = max(least, multiple)
                    raise ValueError(f"{type(self).__name__}: {name} must be {must} of at least {least}, got {size!r}")

    def require_powers_of_two(self, *names: str) -> None:
        """Raises ValueError for a field that is no power of two; the fields are whole numbers of at least 1."""
        for name in names:
            if (size := getattr(self, name)) & (size - 1):
                raise ValueError(f"{type(self).__name__}: {name} must be a power of two, got {size}")


S = TypeVar("S", bound=TileSizes)

# Part of jit's cache key, which a plain context variable would not be: sizes are chosen while a program is traced.
_in_code = jax.make_user_context(())


@contextlib.contextmanager
def tile_sizes(*sizes: TileSizes) -> Iterator[None]:
    """Makes kernels run with these tile sizes instead of their own. It selects no kernel.

    Each class of `ops.tiles` belongs to one kernel: `with ops.tile_sizes(ops.tiles.ChunkedTiles(256, 512)): ...`. It
    covers what is traced inside; a function that was compiled before is compiled again. Inner sizes replace outer ones.

    Args:
        *sizes: One of each kernel; `explain_attention(...).tiles` are those that a call gets.

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


def chosen_tiles(default: S) -> S:
    """Returns the sizes that the code around a call sets for the kernel of `default`, or `default`."""
    return next((size for size in _in_code.value if type(size) is type(default)), default)
