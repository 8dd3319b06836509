"""Hardware to plan for: topologies of chips, described without the devices."""

import dataclasses
import importlib.util
import itertools
import math
import os
import re
from typing import Any

import jax

from maxlib.distributed.xla_flags import WITHOUT_TPU
from maxlib.hardware import CHIPS, GIB, Chip


@dataclasses.dataclass(frozen=True)
class Target:
    """Hardware to plan for; `parse_target` makes one from a name.

    Args:
        name: The name, such as "v5e-256".
        chip: The kind of device.
        devices: Number of devices.
        topology: The shape of a TPU slice, such as "v5e:16x16"; None for others.
        slices: Number of TPU slices.
    """

    name: str
    chip: Chip
    devices: int
    topology: str | None = None
    slices: int = 1

    @property
    def wrap(self) -> tuple[bool, ...]:
        """Returns which dimensions of a TPU topology wrap around: all dimensions of whole 4x4x4 cubes; in 2-D those of
        size 16.

        The compiler needs this: over three dimensions it only uses all-gathers on rings, and all-reduces otherwise.
        """
        sides = [int(side) for side in (self.topology or "").partition(":")[2].split("x") if side]
        cubes = all(side % 4 == 0 for side in sides)
        return tuple(cubes if len(sides) == 3 else side == 16 for side in sides)

    @property
    def platform(self) -> str:
        """The platform: "tpu", "cuda" or "cpu"."""
        return "tpu" if self.topology else "cpu" if self.chip is CHIPS["cpu"] else "cuda"

    def __str__(self) -> str:
        slices = f" in {self.slices} slices" if self.slices > 1 else ""
        shape = f" ({self.topology.partition(':')[2]})" if self.topology else ""
        return f"{self.name}: {self.devices} x {self.chip.kind}{shape}{slices}, {self.chip.memory / GIB:.2f} GiB each"


_TPUS = "v4|v5e|v5p|v6e|v7x"
_GPUS = tuple(name for name, chip in CHIPS.items() if chip.kind.startswith("NVIDIA"))
_TOPOLOGIES = {"v7x": "tpu7x"}  # libtpu's own names, where they differ
COMPILED_GPUS = ("h100", "h200")  # those that are described to XLA's compiler below; others are estimated


def parse_target(name: str) -> Target:
    """Reads the name of hardware.

    Args:
        name: "v4-N", "v5p-N" or "v7x-N" (N cores), "v5e-N" or "v6e-N" (N chips), with "xM" for M slices; a topology
            such as "v5p:4x4x8", with "*M" for M slices; a GPU of `hardware.CHIPS` and a number, such as "h100x16"; or
            "cpu".

    Raises:
        ValueError: for hardware that does not exist; the message lists the known names.
    """
    text = name.strip().lower().replace("tpu7x", "v7x")
    if re.search(r"[-x*:]0+(?!\d)", text):
        raise ValueError(f"{name}: there is no hardware of 0 chips or slices")
    if text == "cpu":
        return Target(text, CHIPS["cpu"], len(jax.devices("cpu")))
    if match := re.fullmatch(rf"({'|'.join(_GPUS)})(?:[x-](\d+))?", text):
        return _gpus(text, match[1], int(match[2] or 1))
    if match := re.fullmatch(rf"({_TPUS}):(\d+(?:x\d+)+)(?:\*(\d+))?", text):
        sides = tuple(map(int, match[2].split("x")))
        return _tpu(name, text, match[1], math.prod(sides), sides, int(match[3] or 1))
    if match := re.fullmatch(rf"({_TPUS})-(\d+)(?:x(\d+))?", text):
        chip, count = CHIPS[match[1]], int(match[2])
        if count % chip.cores:
            raise ValueError(f"{name}: {match[1]}-N counts cores, {chip.cores} a chip, so N must be a multiple of that")
        chips = count // chip.cores
        return _tpu(name, text, match[1], chips, _torus(name, chips, chip.dims), int(match[3] or 1))
    raise ValueError(
        f"no hardware is known as {name!r}; take v4-N, v5p-N, v7x-N (N cores), v5e-N, v6e-N (N chips), such as v5e-256, "
        f"with xM for M slices, a topology such as v5p:4x4x8, GPUs such as {', '.join(f'{gpu}xN' for gpu in _GPUS)}, or cpu"
    )


def _gpus(name: str, kind: str, count: int) -> Target:
    if count > (group := CHIPS[kind].group) and count % group:
        raise ValueError(
            f"{name}: these GPUs come in groups of {group}; take up to {group} of one, or a multiple of {group}, such as "
            f"{kind}x{2 * group}; got {count}"
        )
    return Target(name, CHIPS[kind], count)


def _tpu(name: str, text: str, kind: str, chips: int, sides: tuple[int, ...], slices: int) -> Target:
    chip = CHIPS[kind]
    limit = 16 if chip.dims == 2 else 28
    if len(sides) != chip.dims or max(sides) > limit or chips < 1:
        raise ValueError(
            f"{name}: {chip.kind} comes in {chip.dims} dimensions of at most {limit} chips each; got {'x'.join(map(str, sides))}"
        )
    topology = f"{_TOPOLOGIES.get(kind, kind)}:{'x'.join(map(str, sides))}"
    return Target(text, chip, chips * chip.devices * slices, topology, slices)


def _torus(name: str, chips: int, dims: int) -> tuple[int, ...]:
    """Returns the most cubic shape of so many chips, with sides that are powers of two, as they are sold."""
    if chips < 1 or chips & (chips - 1):
        raise ValueError(f"{name}: {chips} chips is no power of two; give the topology, such as v5p:4x4x12")
    power = chips.bit_length() - 1
    if dims == 3 and power == 2:
        return 2, 2, 1  # one host
    return tuple(2 ** ((power + d) // dims) for d in range(dims))


@dataclasses.dataclass(frozen=True)
class AbsentDevice:
    """The place of a device in its slice or host, for estimates; nothing can be compiled for it.

    The names are those of jax's devices.

    Args:
        id: Number of the device, by rows of the topology.
        process_index: Number of its host, or of its rack of connected GPUs.
        device_kind: JAX's name of the chip.
        platform: "tpu" or "gpu".
        coords: Place of its chip in the torus, `(x, y, z)`.
        core_on_chip: Number of the device on its chip.
        slice_index: Number of its slice.
    """

    id: int
    process_index: int
    device_kind: str
    platform: str
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    slice_index: int = 0


def devices_of(target: Target) -> list[Any]:
    """Returns the devices of a topology that a compiler describes, or this machine's CPU devices.

    A process can describe several topologies of GPUs, but only one of TPUs.

    Args:
        target: The hardware.

    Raises:
        ImportError: when the compiler for GPUs is not installed; the message has the command to install it.
        ValueError: for a TPU topology that does not exist.
    """
    if target.platform == "cpu":
        return list(jax.devices("cpu"))
    if target.platform == "cuda":
        return _gpu_devices(target)
    from jax.experimental import topologies

    for key, value in WITHOUT_TPU.items():
        os.environ.setdefault(key, value)
    wrap = (*target.wrap, False)[:3]  # the compiler counts three dimensions, and of some chips the last is 1
    more: dict[str, Any] = {"wrap": wrap} | ({"num_slices": target.slices} if target.slices > 1 else {})
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=str(target.topology), **more).devices)
    except Exception as error:
        raise ValueError(f"{_no_topology(target)} (libtpu: {error})") from error


def absent_devices(target: Target) -> list[AbsentDevice]:
    """Returns the places of the devices of a target, in the order of a compiler's.

    Raises:
        ValueError: for a TPU topology that does not exist.
    """
    if target.platform == "cuda":
        kind, group = target.chip.kind, target.chip.group
        return [AbsentDevice(number, number // group, kind, "gpu") for number in range(target.devices)]
    columns, rows, layers = (*_sides(str(target.topology).partition(":")[2]), 1)[:3]
    if columns % 2 or rows % 2:
        raise ValueError(_no_topology(target))
    # Host by host, each of 2 x 2 chips.
    cores, hosts = range(target.chip.devices), (range(layers), range(0, rows, 2), range(0, columns, 2))
    places = []
    for number, (part, (z, top, left)) in enumerate(itertools.product(range(target.slices), itertools.product(*hosts))):
        for y, x, core in itertools.product((top, top + 1), (left, left + 1), cores):
            index = (((part * layers + z) * rows + y) * columns + x) * len(cores) + core
            places.append(AbsentDevice(index, number, target.chip.prefixes[0], "tpu", (x, y, z), core, part))
    return places


def _no_topology(target: Target) -> str:
    kind, _, sides = str(target.topology).partition(":")
    multiple = "x".join(
        str(max(least, 1 << side.bit_length() - 1)) for side, least in zip(_sides(sides), (2, 2, 1), strict=False)
    )
    return f"{target.name}: there is no topology {target.topology}, as hosts have 2x2 chips; take for example {kind}:{multiple}"


def _sides(text: str) -> list[int]:
    return [int(side) for side in text.split("x")]


def has_tpu_compiler() -> bool:
    """Returns True if libtpu is installed; it compiles without a TPU."""
    return importlib.util.find_spec("libtpu") is not None


INSTALL_TPU_COMPILER = 'pip install "maxlib[tpu]" (Linux, x86; no TPU is needed)'


def has_gpu_compiler() -> bool:
    """Returns True if jax's CUDA plugin is installed, which can compile without a GPU."""
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


INSTALL_GPU_COMPILER = 'pip install "maxlib[cuda]" (no GPU is needed)'

# The facts that XLA needs about a Hopper GPU that is not present. Its kernels need the accelerated features (sm_90a).
_HOPPER = """
gpu_device_info {{
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f} l2_cache_size: {cache:.0f} device_memory_size: {memory:.0f}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }} device_description_str: "{kind}"
"""


def _gpu_devices(target: Target) -> list[Any]:
    if not has_gpu_compiler():
        raise ImportError(
            f"{target.name}: compiling for GPUs needs jax's plugin for CUDA; install it: {INSTALL_GPU_COMPILER}"
        )
    if target.chip not in [CHIPS[name] for name in COMPILED_GPUS]:
        raise ValueError(f"{target.name}: {' and '.join(COMPILED_GPUS)} are described to XLA's compiler, no other GPU")
    from jax.experimental import topologies

    chip, hosts = target.chip, math.ceil(target.devices / target.chip.group)
    about = _HOPPER.format(bandwidth=chip.bandwidth, memory=chip.memory, cache=chip.cache, kind=chip.kind)
    shape = f"1x{hosts}x{target.devices // hosts}"
    return list(topologies.get_topology_desc(target.name, "cuda", target_config=about, topology=shape).devices)
