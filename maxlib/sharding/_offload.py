"""Offloading: arrays stay in the host's memory until a step needs them."""

import dataclasses
from typing import Any, ClassVar

from jax.sharding import Mesh

from maxlib.sharding._costs import StepFacts
from maxlib.sharding._strategy import Strategy

HOST = "pinned_host"  # page-locked, so devices copy from it at full speed


@dataclasses.dataclass(frozen=True)
class Offload(Strategy):
    """Offloading: arrays are stored in the host's memory between their uses. Two of them joined do both.

    Args:
      optimizer: store the optimizer's moments on the host; the update copies them to the device layer by layer.
      layers: store the matrices of scanned layers on the host; each pass copies them to the device layer by layer.
    """

    kind: ClassVar[str] = "offload"
    optimizer: bool = False
    layers: bool = False

    def merge(self, earlier: Strategy) -> Strategy:
        assert isinstance(earlier, Offload)
        return Offload(self.optimizer or earlier.optimizer, self.layers or earlier.layers)

    def host_copies(self, step: StepFacts) -> tuple[float, float]:
        """Returns the bytes of moments and weights that go to the host in a step, and come from it."""
        # Moments are copied both ways. Weights come four times (forward, backward, optimizer, update) and their
        # gradients once; the new weights and the gradients go.
        moments, weights = step.moments_on_host, step.weights_on_host
        return moments + 2.0 * weights, moments + 5.0 * weights

    def check(self, mesh: Any, others: tuple[Strategy, ...]) -> None:
        if not (self.optimizer or self.layers):
            return
        if any(other.kind == "pipeline" for other in others):
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
