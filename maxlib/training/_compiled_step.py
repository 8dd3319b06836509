"""A step that is compiled for the mesh that it finds when it is called."""

from typing import Any

import jax
from jax.sharding import NamedSharding

from maxlib.distributed import xla_flags
from maxlib.hardware import current_device


class CompiledStep:
    """`jax.jit` of a step, with its state donated, and with the options of XLA that suit the device and the mesh.

    A step is often made outside of `sharding.use` and called inside, or called with arrays that other code has placed.
    So the mesh is looked up at each call: that of the context, else that of the arguments.

    Args:
      step: function from a state and a batch.
    """

    def __init__(self, step: Any):
        self._step, self._programs = step, {}

    def __call__(self, state: Any, batch: Any) -> Any:
        return self._program(state, batch)(state, batch)

    def lower(self, state: Any, batch: Any) -> jax.stages.Lowered:
        """Lowers the step for arrays, or their shapes and shardings, as `lower` of `jax.jit` does."""
        return self._program(state, batch).lower(state, batch)

    def trace(self, state: Any, batch: Any) -> jax.stages.Traced:
        """Traces the step, as `trace` of `jax.jit` does."""
        return self._program(state, batch).trace(state, batch)

    def _program(self, *arguments: Any) -> Any:
        device, mesh = current_device(), dict(jax.sharding.get_abstract_mesh().shape) or _mesh_of(arguments)
        key = device, *mesh.items()
        if key not in self._programs:
            options = xla_flags.automatic_options(device, mesh)
            self._programs[key] = jax.jit(self._step, donate_argnums=0, compiler_options=options or None)
        return self._programs[key]


def _mesh_of(tree: Any) -> dict[str, int]:
    """Returns the devices along each axis of the mesh over which arrays are placed; nothing without a mesh."""
    for x in jax.tree.leaves(tree):
        if isinstance(place := getattr(x, "sharding", None), NamedSharding):
            return dict(place.mesh.shape)
    return {}
