"""Layers that refuse to be changed, because the change would be lost."""

from typing import NoReturn, TypeVar

from flax import nnx
from flax.nnx.tracers import TraceState

Layer = TypeVar("Layer")


class _Taken(TraceState):
    """State that flax asks before it changes a module or a variable; no part of the pytree, so `jax.tree.map` and `jit`
    see the layer as it is.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def is_valid(self) -> NoReturn:
        raise ValueError(
            f"layer {self._number} was taken out of a stack that scans its layers, so it is a copy, and a change of it "
            "would not reach the model. Change it in `nn.unstack(model)`, whose layers are stored alone, or in a stack "
            f"from `regrouped(prefix={self._number + 1}, period=...)`. To change a copy on its own, copy it first: "
            "`jax.tree.map(lambda a: a, layer)`"
        )


def read_only(layer: Layer, number: int) -> Layer:
    """Makes assignments to a layer, its submodules and their variables an error.

    Args:
        layer: The copy, which is changed in place.
        number: The layer's number in its stack, for the message.
    """
    taken = _Taken(number)
    for _, part in nnx.iter_graph(layer):
        if isinstance(part, nnx.Variable):
            object.__setattr__(part, "_trace_state", taken)
        elif isinstance(part, nnx.Pytree):
            object.__setattr__(part._pytree__state, "_trace_state", taken)
    return layer
