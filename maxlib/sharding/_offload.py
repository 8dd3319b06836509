"""Offloading: what waits in the host's memory until a step needs it."""

import dataclasses
from typing import Any, ClassVar

from jax.sharding import Mesh

from maxlib.sharding._strategy import Strategy

HOST = "pinned_host"  # from which devices copy at full speed


@dataclasses.dataclass(frozen=True)
class Offload(Strategy):
    """Arrays in the host's memory between their uses. Joined with another one it does both.

    Args:
        optimizer: moments wait on the host, and the update takes them to the device layer by layer.
        layers: so do the matrices of the layers that a stack repeats.
    """

    slot: ClassVar[str] = "offload"
    optimizer: bool = False
    layers: bool = False

    def merge(self, earlier: Strategy) -> Strategy:
        assert isinstance(earlier, Offload)
        return Offload(self.optimizer or earlier.optimizer, self.layers or earlier.layers)

    def check(self, mesh: Any, others: tuple[Strategy, ...]) -> None:
        if not (self.optimizer or self.layers):
            return
        if any(other.slot == "pipeline" for other in others):
            raise ValueError(
                f"{self}: what is taken from the host layer by layer cannot be cut into a pipeline's stages too"
            )
        if isinstance(mesh, Mesh):
            device: Any = next(iter(mesh.local_devices or mesh.devices.flat))
            kinds = sorted(memory.kind for memory in device.addressable_memories())
            if HOST not in kinds:
                raise ValueError(
                    f"{self} wants the memory {HOST!r}, but {device.device_kind} has only {kinds}: leave it out"
                )
