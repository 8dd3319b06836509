"""States of grain's iterators as JSON, in which tuples survive."""

from typing import Any

import numpy as np


def to_json(state: Any) -> Any:
    """Copies a state into JSON types. JSON turns tuples into lists, from which grain would resume incorrectly, so
    tuples are marked.
    """
    match state:
        case None | bool() | int() | float() | str():
            return state
        case np.integer() | np.floating() | np.bool_():
            return state.item()
        case tuple():
            return {"tuple": [to_json(x) for x in state]}
        case list():
            return [to_json(x) for x in state]
        case dict() if all(isinstance(key, str) for key in state) and set(state) != {"tuple"}:
            return {key: to_json(value) for key, value in state.items()}
    raise TypeError(f"An iterator's state must consist of JSON types, got {state!r}.")


def from_json(state: Any) -> Any:
    match state:
        case {"tuple": items, **rest} if not rest:
            return tuple(from_json(x) for x in items)
        case dict():
            return {key: from_json(value) for key, value in state.items()}
        case list():
            return [from_json(x) for x in state]
    return state
