"""Names of the leading axis of a stack, whose equal layers share arrays.

A stack of three layers stores their weights `(heads, head_dim, embed)` as one array with the axes `("layers", "heads",
"head_dim", "embed")`. The name is in the variable's metadata; nothing is guessed from a path or a rank.
"""

from collections.abc import Sequence
from typing import Any

LAYERS = "layers"  # scanned layers, which a `Pipeline` splits into stages
UNSTAGED_LAYERS = "unstaged_layers"  # other scanned layers, which run before or after the stages
_LAYER_AXES = (LAYERS, UNSTAGED_LAYERS)


def is_stacked(axes: Sequence[str | None]) -> bool:
    """Returns True if an array stores several layers, judged by its axis names.

    Args:
        axes: A name (or None) for each dimension.
    """
    return len(axes) > 0 and axes[0] in _LAYER_AXES


def num_layer_axes(axes: Sequence[Any]) -> int:
    """Counts the leading layer axes: 0 for a single layer, 2 for a stack inside a scanned layer.

    Args:
        axes: A name (or None) for each dimension.
    """
    return next((d for d, name in enumerate(axes) if name not in _LAYER_AXES), len(axes))


def own_axes(axes: Sequence[str | None]) -> tuple[str | None, ...]:
    """Returns the names of one layer's own dimensions, `()` if none has a name.

    Args:
        axes: A name (or None) for each dimension, starting with layer axes.
    """
    names = tuple(axes[num_layer_axes(axes) :])
    return names if any(names) else ()
