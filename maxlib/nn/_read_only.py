"""Read-only copies of scanned layers: editing one raises an error, because the edit would not reach the model."""

from typing import NoReturn, TypeVar

from flax import nnx
from flax.nnx.tracers import TraceState

Layer = TypeVar("Layer")


class _Taken(TraceState):
    """State that flax checks before it changes a module or a variable. It is not part of the pytree, so `jax.tree.map`
    and `jit` treat the layer as an ordinary one.
    """

    __slots__ = ("_number",)

    def __init__(self, number: int):
        super().__init__()
        self._number = number

    def is_valid(self) -> NoReturn:
        raise ValueError(
            f"layer {self._number} was taken out of a stack that scans its layers, so it is a copy, and a change to it "
            "would not reach the model. Change it in `nn.unstack(model)`, which stores each layer alone, or in a stack "
            f"from `regrouped(prefix={self._number + 1}, period=...)`. To change only the copy, copy it first: "
            "`jax.tree.map(lambda a: a, layer)`"
        )


def read_only(layer: Layer, number: int) -> Layer:
    """Makes assignments to a layer, its submodules and their variables raise an error.

    Args:
        layer: The copy, which is changed in place.
        number: The layer's index in its stack, for the message.
    """
    taken = _Taken(number)
    for _, part in nnx.iter_graph(layer):
        if isinstance(part, nnx.Variable):
            object.__setattr__(part, "_trace_state", taken)
        elif isinstance(part, nnx.Pytree):
            object.__setattr__(part._pytree__state, "_trace_state", taken)
    return layer
