"""Stacks of another prefix or period: which stored rows make up a leaf."""

import re
from typing import Any

import jax

from maxlib import nn
from maxlib.nn.stack import place_of

Layouts = dict[str, dict[str, int]]
# A leaf of one layer: the stored leaf it is in, and its row there (None: it is all of it).
Piece = tuple[str, int | None]


def layouts(model: Any) -> Layouts:
    """`{path: {num_layers, prefix, period}}` of every stack of `model`, as a checkpoint's meta holds it."""
    is_stack = lambda x: isinstance(x, nn.Stack)
    leaves = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_stack)
    name = lambda path: jax.tree_util.keystr(path, simple=True, separator=".")
    return {name(path): stack.layout for path, stack in leaves if is_stack(stack)}


def logical_names(name: str, layouts: Layouts) -> list[Piece]:
    """The leaf `name` layer by layer: `layers.body.0.w` is `layers.1.w` row 0, `layers.3.w` row 1, ...

    The stack may lie under any path: an optimizer's moments are named `0.mu.layers.body.0.w`.
    """
    for stack in sorted(layouts, key=len, reverse=True):
        here = rf"{re.escape(stack)}\." if stack else ""
        match = re.search(rf"(?:^|\.){here}(?P<place>(?:prefix|body|suffix)\.\d+)(?=\.|$)", name)
        if match:
            before, after = name[: match.start("place")], name[match.end("place") :]
            layers = _layers_at(match["place"], layouts[stack])
            return [(f"{before}{i}{after}", row) for i, row in layers] or [(name, None)]
    return [(name, None)]


def _layers_at(place: str, layout: dict[str, int]) -> list[tuple[int, int | None]]:
    """The layers stored at `place`, with their rows, in the order of the rows."""
    everywhere = [(i, *place_of(i, **layout)) for i in range(layout["num_layers"])]
    return [(i, row) for i, path, row in everywhere if path == place]
