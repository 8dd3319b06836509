"""The attention kernel of a whole model, chosen from outside."""

from typing import Any

import jax

from maxlib.nn._attention import Attention
from maxlib.nn._mla import MLA


def with_attention(model: Any, implementation: str | None) -> Any:
    """`model`, or a part of it such as a stack, whose layers all use this implementation of `ops.attention`; None is
    the best one again.

    Arrays are shared with `model`, which stays as it is. Raises ValueError where there is no `nn.Attention` and no
    `nn.MLA`.
    """
    is_attention = lambda x: isinstance(x, Attention | MLA)
    if not any(map(is_attention, jax.tree.leaves(model, is_leaf=is_attention))):
        raise ValueError(f"with_attention: {type(model).__name__} has no layer of type nn.Attention or nn.MLA to set")

    def choose(layer):
        if not is_attention(layer):
            return layer
        new = jax.tree.map(lambda a: a, layer)
        new.implementation = implementation
        return new

    return jax.tree.map(choose, model, is_leaf=is_attention)
