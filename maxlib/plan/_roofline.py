"""A roofline model: the minimum time of a step from its arithmetic, memory traffic and communication."""

import dataclasses
import math
from collections.abc import Mapping

from jax.sharding import Mesh

from maxlib.hardware import Chip
from maxlib.plan._hlo import Collective, Costs
from maxlib.plan._targets import Target


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The time of one step on each resource of a device, and the speed that follows.

    Args:
        compute: Seconds of arithmetic.
        memory: Seconds of memory traffic.
        network: Seconds of collectives.
        host: Seconds of copies to and from the host.
        seconds: The step if all of these overlap perfectly: their maximum.
        serial: The step if network and host copies do not overlap: max(compute, memory) + network + host.
        tokens_per_second: Tokens of the global batch by `seconds`.
        mfu: Model FLOPs utilization by `seconds`.
        mfu_serial: Model FLOPs utilization by `serial`.
        bound: The slowest resource.
        assumptions: Sentences for the report.
    """

    compute: float
    memory: float
    network: float
    host: float
    seconds: float
    serial: float
    tokens_per_second: float
    mfu: float
    mfu_serial: float
    bound: str
    assumptions: tuple[str, ...]


_TILES = "tiles with rows of two experts, computed once for each; not in the compiled FLOPs above"


def estimate(
    costs: Costs,
    target: Target,
    mesh: Mapping[str, int],
    links: Mapping[str, float],
    *,
    tokens: float,
    model_flops: float,
) -> Estimate:
    """Estimates the time of a step.

    Args:
        costs: One device's work in a step.
        target: The hardware.
        mesh: From mesh axis to number of devices.
        links: Bytes per second that a device sends, and receives, over each mesh axis.
        tokens: Tokens of the global batch.
        model_flops: The model's FLOPs of a step on all devices, without recomputation.
    """
    chip = target.chip
    wide = costs.flops + costs.repeated - sum(costs.narrow.values())
    compute = wide / chip.flops + sum(flops / chip.peak(kind) for kind, flops in costs.narrow.items())
    memory = costs.bytes / chip.bandwidth
    network = sum(_seconds(collective, mesh, links) for collective in costs.collectives)
    host = max(costs.to_host, costs.from_host) / chip.host  # both ways at once
    times = {"arithmetic": compute, "memory": memory, "network": network, "host": host}
    seconds, serial = max(times.values()), max(compute, memory) + network + host
    useful = model_flops / (target.devices * chip.flops)
    return Estimate(
        compute,
        memory,
        network,
        host,
        seconds,
        serial,
        tokens / seconds if seconds else 0.0,
        useful / seconds if seconds else 0.0,
        useful / serial if serial else 0.0,
        max(times, key=lambda name: times[name]),
        _assumptions(costs, chip, links, mesh, host > 0),
    )


def _seconds(collective: Collective, mesh: Mapping[str, int], links: Mapping[str, float]) -> float:
    """Returns the seconds of a collective: bytes that cross a device's links, over their speed."""
    axes = [axis for axis in collective.axes if axis in mesh]
    parts = math.prod(mesh[axis] for axis in axes) or 1
    if parts == 1:
        return 0.0
    # In a ring of n devices, an all-gather or reduce-scatter sends (n - 1) / n of the array through each device; an
    # all-reduce is both in sequence.
    share = collective.bytes * (parts - 1) / parts
    moved = {"all-reduce": 2 * share, "collective-permute": collective.bytes}.get(collective.kind, share)
    # A group over several axes uses the links of all of them, unless one of them crosses the slower network.
    speeds = [links[axis] for axis in axes]
    return moved / (min(speeds) if min(speeds) < max(speeds) / 4 else sum(speeds))


def _assumptions(
    costs: Costs, chip: Chip, links: Mapping[str, float], mesh: Mapping[str, int], host: bool
) -> tuple[str, ...]:
    copies = (f"copies to and from the host at {chip.host / 1e9:.0f} GB/s each way, both at once",) if host else ()
    used = ", ".join(f"{axis} {links[axis] / 1e9:.0f} GB/s" for axis in mesh if mesh[axis] > 1) or "none used"
    return (
        f"matmuls at the peak of {chip.flops / 1e12:.4g} bfloat16 TFLOP/s a device; nothing else costs arithmetic",
        *(_narrow(kind, flops / costs.flops, chip) for kind, flops in costs.narrow.items()),
        *([f"{costs.repeated / costs.flops:.1%} more arithmetic for {_TILES}"] if costs.repeated else []),
        f"memory at {chip.bandwidth / 1e9:.0f} GB/s",
        *costs.assumes,
        f"collectives at full link speed, no latency: {used}",
        *copies,
        f"the estimate overlaps all of these perfectly; 'no overlap' adds the network's{' and the host' * host} time",
    )


def _narrow(kind: str, share: float, chip: Chip) -> str:
    """Returns a sentence about matmuls of operands of eight bits."""
    if chip.peak(kind) == chip.flops:
        return f"{share:.0%} of the arithmetic on {kind} operands, for which there are no units: at the bfloat16 peak"
    return (
        f"{share:.0%} of the arithmetic on {kind} operands, at their peak of {chip.peak(kind) / 1e12:.4g} TFLOP/s; MFU "
        "counts by the bfloat16 peak and can exceed 100%"
    )


def _gpu_speed(hosts: list[int], chip: Chip) -> float:
    """Returns bytes per second of a group of GPUs: NVLink within a host, else the network.

    Args:
        hosts: The host, or rack, of each GPU.
        chip: The kind of GPU.
    """
    inside = chip.links or chip.host  # without NVLink, PCIe
    if len(set(hosts)) == 1:
        return inside
    # Each GPU has its own network card; a ring over several hosts uses the cards of all its members in a host.
    return min(inside, len(hosts) // len(set(hosts)) * chip.network)


def link_speeds(mesh: Mesh, target: Target) -> dict[str, float]:
    """Returns bytes per second of each mesh axis, over the torus of a TPU slice, NVLink, or the slower network.

    Args:
        mesh: The mesh of devices or of their places.
        target: The hardware.
    """
    speeds = {}
    for number, axis in enumerate(mesh.axis_names):
        # The devices along one axis, at index 0 of the others.
        line = mesh.devices.swapaxes(0, number).reshape(mesh.devices.shape[number], -1)[:, 0]
        if target.platform != "tpu":
            speeds[axis] = _gpu_speed([device.process_index for device in line], target.chip)
            continue
        far = len({getattr(device, "slice_index", 0) for device in line}) > 1
        # Every torus dimension in which they differ adds links.
        dims = sum(len(set(values)) > 1 for values in zip(*[device.coords for device in line], strict=True))
        speeds[axis] = target.chip.network if far else target.chip.links * max(1, dims)
    return speeds
