"""Data sheet figures of jax devices, for MFU, plans and the choice of kernels."""

import dataclasses
import re

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One jax device. Rates are per second; a link is counted in one direction.

    Attributes:
        kind: Name for people.
        prefixes: Prefixes of jax's `device_kind`; the chip with the longest matching prefix is used. For TPUs the first
            is the whole name.
        flops: Dense bfloat16 FLOP/s (float32 on a CPU).
        memory: Bytes available to a program.
        bandwidth: Bytes of memory read or written.
        links: Bytes over one torus dimension, both ends together; for GPUs, over NVLink. 0 if there are none.
        network: Bytes over the slower network, between slices or hosts.
        host: Bytes over the link to the host.
        dims: Dimensions of the torus; 0 for GPUs.
        cores: Cores per chip, as counted in names such as v5p-128.
        devices: JAX devices per TPU chip.
        group: Number of GPUs connected by NVLink, or by PCIe without NVLink; unused for TPUs.
        cache: Bytes of the last cache before the memory.
        fp8: Dense FLOP/s of 8-bit floats; 0 without units for them.
        int8: Dense operations per second of 8-bit integers; 0 without units for them.
    """

    kind: str
    prefixes: tuple[str, ...]
    flops: float
    memory: float
    bandwidth: float
    links: float
    network: float
    host: float
    dims: int = 0
    cores: int = 1
    devices: int = 1
    group: int = 8
    cache: float = 0
    fp8: float = 0
    int8: float = 0

    def peak(self, kind: str) -> float:
        """Returns FLOP/s of operands of `kind`, "fp8" or "int8"; in bfloat16 if there are no units for them."""
        return {"fp8": self.fp8, "int8": self.int8}[kind] or self.flops


# Links to the host. GPUs: PCIe 5 x16 (A100, L40S: 4), half of what the data sheets give for both directions; GB200:
# half of a superchip's NVLink-C2C, which two GPUs share. TPUs: Google's data sheets have none; "How to Scale Your
# Model" (jax-ml.github.io/scaling-book/tpus) has about 15 GB/s a chip, and 32 for v6e. That v4 and v7x have as much as
# v5p is assumed. CPU devices share one memory with the host.
# Networks between GPU hosts: one adapter of 400 Gbit/s per GPU (A100: 200), as in the makers' own systems.
# A chip of TPU v7x is two jax devices, each with half of the data sheet's 2307 TFLOP/s, 192 GiB, 7.38 TB/s, and of
# its links, which are v5p's: 1200 GB/s a chip in both directions (docs.cloud.google.com/tpu/docs/tpu7x).
CHIPS = {
    "v4": Chip("TPU v4", ("TPU v4",), 275e12, 31.75 * GIB, 1.23e12, 9e10, 6.25e9, 1.5e10, 3, cores=2, int8=275e12),
    "v5e": Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197e12, 15.75 * GIB, 8.2e11, 9e10, 3.1e9, 1.5e10, 2, int8=394e12),
    "v5p": Chip("TPU v5p", ("TPU v5", "TPU v5p"), 459e12, 95.74 * GIB, 2.765e12, 1.8e11, 6.25e9, 1.5e10, 3, cores=2, int8=918e12),
    "v6e": Chip("TPU v6e", ("TPU v6 lite", "TPU v6"), 918e12, 31.25 * GIB, 1.64e12, 1.8e11, 1.25e10, 3.2e10, 2, int8=1836e12),
    "v7x": Chip("TPU v7x", ("TPU7x",), 1153.5e12, 96 * GIB, 3.69e12, 9e10, 6.25e9, 1.5e10, 3, cores=2, devices=2, fp8=2307e12),
    "a100": Chip("NVIDIA A100 SXM", ("NVIDIA A100",), 312e12, 79.1 * GIB, 2.039e12, 3e11, 2.5e10, 3.2e10, cache=40 * 2**20, int8=624e12),
    "a100-40gb": Chip("NVIDIA A100 40 GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), 312e12, 39.4 * GIB, 1.555e12, 3e11, 2.5e10, 3.2e10, cache=40 * 2**20, int8=624e12),
    "h20": Chip("NVIDIA H20", ("NVIDIA H20",), 148e12, 95 * GIB, 4e12, 4.5e11, 5e10, 6.4e10, cache=60 * 2**20, fp8=296e12, int8=296e12),
    "h100": Chip("NVIDIA H100 SXM", ("NVIDIA H100",), 989e12, 79.1 * GIB, 3.35e12, 4.5e11, 5e10, 6.4e10, cache=50 * 2**20, fp8=1979e12, int8=1979e12),
    "h100-pcie": Chip("NVIDIA H100 PCIe", ("NVIDIA H100 PCIe",), 756e12, 79.1 * GIB, 2e12, 0, 5e10, 6.4e10, cache=50 * 2**20, fp8=1513e12, int8=1513e12),
    "h100-nvl": Chip("NVIDIA H100 NVL", ("NVIDIA H100 NVL",), 835e12, 93 * GIB, 3.9e12, 3e11, 5e10, 6.4e10, group=2, cache=50 * 2**20, fp8=1671e12, int8=1671e12),
    "h200": Chip("NVIDIA H200 SXM", ("NVIDIA H200",), 989e12, 139.8 * GIB, 4.8e12, 4.5e11, 5e10, 6.4e10, cache=50 * 2**20, fp8=1979e12, int8=1979e12),
    "h200-nvl": Chip("NVIDIA H200 NVL", ("NVIDIA H200 NVL",), 835e12, 139.8 * GIB, 4.8e12, 4.5e11, 5e10, 6.4e10, group=4, cache=50 * 2**20, fp8=1671e12, int8=1671e12),
    "l40s": Chip("NVIDIA L40S", ("NVIDIA L40S",), 362e12, 44.5 * GIB, 8.64e11, 0, 5e10, 3.2e10, cache=96 * 2**20, fp8=733e12, int8=733e12),
    "b200": Chip("NVIDIA B200", ("NVIDIA B200",), 2250e12, 178 * GIB, 8e12, 9e11, 5e10, 6.4e10, cache=126 * 2**20, fp8=4500e12, int8=4500e12),
    "gb200": Chip("NVIDIA GB200 NVL72", ("NVIDIA GB200",), 2500e12, 184 * GIB, 8e12, 9e11, 5e10, 2.25e11, group=72, cache=126 * 2**20, fp8=5000e12, int8=5000e12),
    "cpu": Chip("this machine's CPU devices", (), 1e11, 8 * GIB, 2e10, 1e10, 1e9, 2e10),
}  # fmt: skip


def chip_of(device_kind: str) -> Chip | None:
    """Finds the chip of jax's `device_kind`; None if it is not in the table."""
    matches = [
        (len(prefix), chip) for chip in CHIPS.values() for prefix in chip.prefixes if device_kind.startswith(prefix)
    ]
    return max(matches, key=lambda pair: pair[0])[1] if matches else None


def is_hopper(device_kind: str) -> bool:
    """Returns True if a device is an NVIDIA GPU of the Hopper generation (H20, H100, H200, H800, GH200)."""
    return re.search(r"\bG?H(20|100|200|800)\b", device_kind) is not None


def is_blackwell(device_kind: str) -> bool:
    """Returns True if a device is an NVIDIA GPU of the Blackwell generation (B100, B200, GB200, B300, GB300)."""
    return re.search(r"\bG?B(100|200|300)\b", device_kind) is not None


# Names of GPUs up to Turing. Later workstation GPUs dropped "Quadro" and "TITAN"; the GeForce RTX 2050 is Ampere.
_BEFORE_AMPERE = re.compile(r"\b(GTX|MX\d+|RTX 20[678]0|TITAN|Quadro|GV100|[PV]100\w*|P40?|T4G?|T\d{3,4})\b")


def is_ampere_or_later(device_kind: str) -> bool:
    """Returns True if a device is an NVIDIA GPU of the generations since Ampere, which multiply bfloat16."""
    return "NVIDIA" in device_kind and not _BEFORE_AMPERE.search(device_kind)


def current_device() -> tuple[str, str]:
    """Returns the platform and kind of the device for which a program is traced.

    This is the device of the active mesh, which need not be present, or else the default device.
    """
    import jax  # here, so that data sheets can be read without it

    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        device = jax.default_device.value or jax.devices()[0]
    return (device, device) if isinstance(device, str) else (device.platform, device.device_kind)


_GPUS = ("NVIDIA ", "Tesla ", "Quadro ")  # with which jax's names of NVIDIA's GPUs begin


def explained_device(device: tuple[str, str] | None) -> tuple[str, str]:
    """Returns jax's platform and kind of a device that a caller names; the current device for None.

    Args:
        device: "gpu", "tpu" or "cpu", and jax's `device_kind` or a usual short name, such as "H100" or "v6e".

    Raises:
        ValueError: when there is no such device; the message lists the known kinds.
    """
    if device is None:
        return current_device()
    platform, kind = device
    if platform == "cpu" or device == current_device():
        return device
    full = _full_kind(kind)
    if full is None or platform != _platform(full):

        def names(of):
            return ", ".join(name for name, chip in CHIPS.items() if chip.prefixes and _platform(chip.kind) == of)

        raise ValueError(
            f"no device is known as {device!r}; known are gpu: {names('gpu')}; tpu: {names('tpu')}; cpu; and "
            "jax's device_kind of any of them and of other GPUs, such as 'NVIDIA GeForce RTX 4090'"
        )
    return platform, full


def _platform(kind: str) -> str:
    return "gpu" if kind.startswith(_GPUS) else "tpu"


def _full_kind(kind: str) -> str | None:
    """Returns jax's `device_kind` for a short name, and a whole kind as it is; None if the device is unknown."""
    if kind.startswith(_GPUS) or chip_of(kind):
        return kind  # a GPU that is not in the table runs the kernels of its generation
    short = re.sub(r"^(nvidia|tpu) ", "", kind.lower())
    if short in CHIPS and CHIPS[short].prefixes:
        return CHIPS[short].prefixes[0]
    model = f"NVIDIA {short.upper()}"
    return model if is_hopper(model) or is_blackwell(model) else None
