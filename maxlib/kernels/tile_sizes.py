"""The base of every kernel's tile sizes: how they are checked, stored and varied."""

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

T = TypeVar("T", bound="TileSizes")


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

    def neighbours(self: T) -> list[T]:
        """Returns these sizes and the valid ones half or twice as large. Of several passes one changes at a time: all
        pairs would take hours, and the passes do not meet.
        """
        return list(dict.fromkeys([self, *filter(None, map(self._replaced, self._changes()))]))

    def _changes(self) -> Iterator[dict[str, Any]]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        numbers = {name: x for name, x in fields.items() if isinstance(x, (int, tuple))}
        for factors in itertools.product((1, 0.5, 2), repeat=len(numbers)):
            yield {name: _times(x, by) for (name, x), by in zip(numbers.items(), factors, strict=True)}
        for name, value in fields.items():
            if isinstance(value, TileSizes):
                yield from ({name: other} for other in value.neighbours()[1:])

    def _replaced(self: T, changes: dict[str, Any]) -> T | None:
        try:
            return dataclasses.replace(self, **changes)
        except ValueError:
            return None

    def to_json(self) -> dict[str, Any]:
        """Returns the sizes as a table of a device keeps them."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls: type[T], entries: dict[str, Any]) -> T:
        """Inverts `to_json`.

        Raises:
            ValueError, TypeError, AttributeError: When `found` does not describe such sizes.
        """
        hints = typing.get_type_hints(cls)
        return cls(**{name: _read(hints[name], x) for name, x in entries.items() if name in hints})


def _times(x: Any, by: float) -> Any:
    return tuple(max(1, int(size * by)) for size in x) if isinstance(x, tuple) else max(1, int(x * by))


def _read(hint: Any, x: Any) -> Any:
    """Reads the value of a field of type `hint`: a number, a tuple of numbers, sizes, or sizes or None."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if isinstance(kind, type) and issubclass(kind, TileSizes)]
    if kinds and x is not None:
        same = [kind for kind in kinds if {field.name for field in dataclasses.fields(kind)} == x.keys()]
        return (same or kinds)[0].from_json(x)
    return tuple(x) if isinstance(x, list) else x
