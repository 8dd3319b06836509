"""Errors for names that do not exist; they suggest the closest one that does."""

from collections.abc import Collection, Mapping
from typing import Any


def no_attribute(package: str, name: str, known: Collection[str]) -> AttributeError:
    """Makes the error for a name that `package` lacks, with the closest of the `known` names, or else all of them."""
    near = _closest(name, known)
    says = f"did you mean {near!r}?" if near else f"it has {', '.join(known)}"
    return AttributeError(f"module {package!r} has no attribute {name!r}; {says}")


class Presets(dict[str, Any]):
    """Configurations by name; the KeyError for another name suggests the closest."""

    def __init__(self, configurations: Mapping[str, Any]):
        super().__init__(configurations)

    def __missing__(self, name: str) -> Any:
        raise KeyError(self.unknown(name))

    def unknown(self, name: str) -> str:
        """Returns a sentence that says that there is no preset `name`, and which is the closest."""
        near = _closest(name, self)
        return f"no preset is called {name!r}; " + (f"did you mean {near!r}?" if near else "`maxlib models` lists all")


def _closest(name: Any, known: Collection[str]) -> str | None:
    """Returns the closest of the `known` names, whatever their case; None if none is close."""
    import difflib  # only when there is an error: importing maxlib stays quick

    names = {candidate.lower(): candidate for candidate in known}
    return next((names[candidate] for candidate in difflib.get_close_matches(str(name).lower(), names, n=1)), None)
