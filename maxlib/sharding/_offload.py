"""Offloading: arrays stay in host memory until a step needs them."""

import dataclasses
from typing import Any, ClassVar

from jax.sharding import Mesh

from maxlib.sharding._costs import StepFacts
from maxlib.sharding._strategy import Strategy

HOST = "pinned_host"  # page-locked, so devices can copy from it at full speed


@dataclasses.dataclass(frozen=True)
class Offload(Strategy):
    """Offloading: arrays are stored in host memory between their uses. Combining two of them does both.

    Args:
        optimizer: True stores the optimizer's moments on the host; the update copies them to the device layer by layer.
        layers: True stores the matrices of scanned layers on the host; each pass copies them to the device layer by
            layer.
    """

    kind: ClassVar[str] = "offload"
    optimizer: bool = False
    layers: bool = False

    def merge(self, earlier: Strategy) -> Strategy:
        assert isinstance(earlier, Offload)
        return Offload(self.optimizer or earlier.optimizer, self.layers or earlier.layers)

    def host_copies(self, step: StepFacts) -> tuple[float, float]:
        """Returns the bytes of moments and weights that a step copies to the host and from the host."""
        # Moments are copied both ways. Weights are copied to the device four times (forward, backward, optimizer,
        # update) and their gradients once; new weights and gradients are copied to the host.
        moments, weights = step.moments_on_host, step.weights_on_host
        return moments + 2.0 * weights, moments + 5.0 * weights

    def check(self, mesh: Any, others: tuple[Strategy, ...]) -> None:
        if not (self.optimizer or self.layers):
            return
        if any(other.kind == "pipeline" for other in others):
            raise ValueError(
                f"{self}: arrays that are copied from the host layer by layer cannot also be split into pipeline stages"
            )
        if isinstance(mesh, Mesh):
            device: Any = next(iter(mesh.local_devices or mesh.devices.flat))
            kinds = sorted(memory.kind for memory in device.addressable_memories())
            if HOST not in kinds:
                raise ValueError(
                    f"{self} needs the memory {HOST!r}, but {device.device_kind} only has {kinds}: omit it"
                )
