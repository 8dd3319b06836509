"""Memory use: how much, and by which arrays."""

import collections
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax


def memory_use() -> dict[str, int]:
    """Reads the peak bytes of this process (`memory/host_bytes`) and of its fullest device (`memory/device_bytes`, if
    the backend reports it).

    It does not synchronize with devices. It may take a millisecond, so the Trainer calls it once per second
    (`Sampled`).
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
    return _host() | ({"memory/device_bytes": max(peaks)} if peaks else {})


class Sampled:
    """Caches the result of `read` for `seconds`."""

    def __init__(self, read: Callable[[], dict[str, int]], seconds: float = 1.0):
        self._read, self._seconds, self._at, self._last = read, seconds, -math.inf, {}

    def __call__(self) -> dict[str, int]:
        if (now := time.monotonic()) - self._at >= self._seconds:
            self._at, self._last = now, self._read()
        return self._last


def memory_profile(directory: str | Path) -> Path:
    """Writes `memory.prof` (device memory by allocating line, for `pprof`) and `memory.txt`, a summary."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    jax.profiler.save_device_memory_profile(str(Path(directory) / "memory.prof"))
    text = Path(directory) / "memory.txt"
    text.write_text(live_arrays() + "\n")
    return text


def live_arrays(n: int = 20) -> str:
    """Lists the arrays that Python holds on this process's devices, grouped by shape and dtype, the largest first."""
    count, size = collections.Counter(), collections.Counter()
    for array in jax.live_arrays():
        key = f"{array.dtype}{list(array.shape)}"
        count[key] += 1
        shards = array.sharding.shard_shape(array.shape) if array.shape else ()
        size[key] += array.dtype.itemsize * _product(shards) * len(array.sharding.addressable_devices)
    lines = [f"{size[key]:>16,} bytes  {count[key]:>5} x {key}" for key, _ in size.most_common(n)]
    return "\n".join([f"{sum(size.values()):>16,} bytes in {sum(count.values())} arrays", *lines])


def _product(shape: tuple[int, ...]) -> int:
    return shape[0] * _product(shape[1:]) if shape else 1


def _host() -> dict[str, int]:
    if sys.platform == "win32":
        return {}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/host_bytes": peak if sys.platform == "darwin" else peak * 1024}
