"""Where time and memory of a step go: profiler traces, its most expensive ops, its compiled program, its arrays."""

import collections
import dataclasses
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax


class Profile:
    """Callback that traces `steps` steps after step `after`: `callbacks=[(1, Profile("run/profile", after=10))]`.

    Open the directory with XProf or TensorBoard; the most expensive ops are logged. In your own loop use
    `jax.profiler.trace(directory)` and `top_ops(directory)`.
    """

    def __init__(self, directory: str | Path, *, after: int = 10, steps: int = 3):
        self.directory, self._after, self._steps = Path(directory), after, steps
        self._until: int | None = None
        self._done = False

    def __call__(self, trainer: Any) -> None:
        if self._done or trainer.step < self._after:
            return
        if self._until is None:
            jax.block_until_ready(trainer.state)  # exclude work that started earlier
            self._until = trainer.step + self._steps
            jax.profiler.start_trace(str(self.directory))
        elif trainer.step >= self._until:
            jax.block_until_ready(trainer.state)
            jax.profiler.stop_trace()
            self._done = True
            trainer.log(
                f"profile of {self._steps} steps in {self.directory}\n{profile_summary(top_ops(self.directory))}"
            )


_CONTAINERS = ("while", "conditional", "call")


@dataclasses.dataclass(frozen=True)
class OpStats:
    """Time of one op in a trace.

    Args:
        name: Name in the compiled HLO.
        seconds: Total time, without the ops inside it.
        calls: Number of calls.
        share: Fraction of the time of all ops.
    """

    name: str
    seconds: float
    calls: int
    share: float


def top_ops(directory: str | Path, n: int = 15) -> list[OpStats]:
    """Lists the ops that took the most time in the newest trace, over all devices of this host.

    Loops and branches are omitted, but the ops inside them are listed (on a CPU possibly from other threads). Names are
    those of the compiled HLO, which `dump_program` writes.

    Args:
        directory: Directory of the traces.
        n: Number of ops.

    Raises:
        FileNotFoundError: when there is no trace.
    """
    traces = sorted(Path(directory).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not traces:
        raise FileNotFoundError(f"no trace (*.xplane.pb) under {directory}; make one with jax.profiler.trace(...)")
    seconds: Any = collections.Counter()  # nanoseconds
    calls: collections.Counter[str] = collections.Counter()
    for line in _op_lines(jax.profiler.ProfileData.from_file(str(traces[-1]))):
        for name, self_time in _self_times(line):
            if not name.startswith(_CONTAINERS):
                seconds[name] += self_time
                calls[name] += 1
    total = sum(seconds.values()) or 1.0
    return [OpStats(name, s / 1e9, calls[name], s / total) for name, s in seconds.most_common(n)]


def profile_summary(ops: list[OpStats]) -> str:
    """Renders ops as a table of text."""
    lines = [f"{'op':48}{'ms':>10}{'calls':>8}{'share':>8}"]
    lines += [f"{op.name[:47]:48}{1e3 * op.seconds:10.3f}{op.calls:8}{op.share:8.1%}" for op in ops]
    return "\n".join(lines)


def _op_lines(data: Any) -> Iterator[list[Any]]:
    """Yields the events of ops by thread, from the devices' planes, or the host's plane on a CPU."""
    planes = list(data.planes)
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    for plane in devices or planes:
        lines = {line.name: line for line in plane.lines}
        for line in [lines["XLA Ops"]] if "XLA Ops" in lines else lines.values():
            events = list(line.events)
            yield events if line.name == "XLA Ops" else [e for e in events if any(k == "hlo_op" for k, _ in e.stats)]


def _self_times(events: list[Any]) -> Iterator[tuple[str, float]]:
    """Yields the nanoseconds of each event, excluding nested events."""
    inside: list[list[Any]] = []  # end, name, self time
    for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
        while inside and inside[-1][0] <= event.start_ns:
            yield tuple(inside.pop()[1:])
        if inside:
            inside[-1][2] -= event.duration_ns
        inside.append([event.start_ns + event.duration_ns, event.name, event.duration_ns])
    for _, name, self_time in inside:
        yield name, self_time


def dump_program(step: Any, *args: Any, directory: str | Path, name: str = "step") -> dict[str, Path]:
    """Writes the jaxpr of the jitted `step(*args)`, its StableHLO, the compiled HLO, and its memory and FLOPs.

    Nothing runs. It compiles once more, unless JAX's persistent compilation cache has the program. Call it inside
    `sharding.use` if the step runs there.

    Args:
        step: The jitted function.
        *args: Arrays or `jax.ShapeDtypeStruct`s.
        directory: Directory of the files.
        name: Beginning of their names.

    Returns:
        The files by kind.
    """
    traced = step.trace(*args)
    lowered = traced.lower()
    compiled = lowered.compile()
    texts = {
        "jaxpr": str(traced.jaxpr),
        "stablehlo": lowered.as_text(),
        "hlo": compiled.as_text(),
        "memory": _memory_of(compiled),
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    files = {kind: Path(directory) / f"{name}.{kind}.txt" for kind in texts}
    for kind, text in texts.items() if jax.process_index() == 0 else ():
        files[kind].write_text(text or "this backend does not say\n")
    return files


class DumpProgram:
    """Callback that runs `dump_program` once for a Trainer's step: `callbacks=[(1, DumpProgram("run/program"))]`."""

    def __init__(self, directory: str | Path):
        self._directory, self.files = directory, {}

    def __call__(self, trainer: Any) -> None:
        if not self.files:
            with trainer.sharded():
                self.files = dump_program(trainer.train_step, trainer.state, trainer.batch, directory=self._directory)


def _memory_of(compiled: Any) -> str:
    """Formats one device's bytes by purpose."""
    analysis, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    lines = [] if analysis is None else [f"{k:16}{getattr(analysis, f'{k}_size_in_bytes'):>18,} bytes" for k in kinds]
    lines += [f"{k:16}{cost[k]:>18,.0f}" for k in ("flops", "bytes accessed") if k in cost]
    return "\n".join(lines) + "\n"


def memory_use(*, max_age: float = 0.0) -> dict[str, int]:
    """Reads the peak bytes of this process (`memory/host_bytes`) and of its fullest device (`memory/device_bytes`, if
    the backend reports it), without synchronizing with devices.

    Args:
        max_age: Seconds for which an earlier result is returned instead: reading may take a millisecond.
    """
    if (now := time.monotonic()) - _last_use["at"] > max_age or not max_age:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        peaks = [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]
        bytes = _host_memory() | ({"memory/device_bytes": max(peaks)} if peaks else {})
        _last_use.update(at=now, bytes=bytes)
    return _last_use["bytes"]


_last_use: dict[str, Any] = {"at": -math.inf, "bytes": {}}


def live_arrays(n: int = 20) -> str:
    """Lists the arrays that Python holds on this process's devices, grouped by shape and dtype, the largest first."""
    count, size = collections.Counter(), collections.Counter()
    for array in jax.live_arrays():
        key = f"{array.dtype}{list(array.shape)}"
        count[key] += 1
        shards = array.sharding.shard_shape(array.shape) if array.shape else ()
        size[key] += array.dtype.itemsize * math.prod(shards) * len(array.sharding.addressable_devices)
    lines = [f"{size[key]:>16,} bytes  {count[key]:>5} x {key}" for key, _ in size.most_common(n)]
    return "\n".join([f"{sum(size.values()):>16,} bytes in {sum(count.values())} arrays", *lines])


def _host_memory() -> dict[str, int]:
    if sys.platform == "win32":
        return {}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"memory/host_bytes": peak if sys.platform == "darwin" else peak * 1024}
