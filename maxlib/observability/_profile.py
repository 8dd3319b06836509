"""Profiler traces of selected steps, and a summary of their most expensive ops without a viewer."""

import collections
import dataclasses
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
class Op:
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


def top_ops(directory: str | Path, n: int = 15) -> list[Op]:
    """Lists the ops that took the most time in the newest trace, over all devices of this host.

    Loops and branches are omitted, but the ops inside them are listed (on a CPU possibly from other threads). Names are
    those of the compiled HLO, which `dump_program` writes.

    Args:
        directory: Directory of the traces.
        n: Number of ops.

    Raises:
        FileNotFoundError: when there is no trace.
    """
    found = sorted(Path(directory).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise FileNotFoundError(f"no trace (*.xplane.pb) under {directory}; make one with jax.profiler.trace(...)")
    seconds: Any = collections.Counter()  # nanoseconds
    calls: collections.Counter[str] = collections.Counter()
    for line in _op_lines(jax.profiler.ProfileData.from_file(str(found[-1]))):
        for name, own in _own_times(line):
            if not name.startswith(_CONTAINERS):
                seconds[name] += own
                calls[name] += 1
    total = sum(seconds.values()) or 1.0
    return [Op(name, s / 1e9, calls[name], s / total) for name, s in seconds.most_common(n)]


def profile_summary(ops: list[Op]) -> str:
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


def _own_times(events: list[Any]) -> Iterator[tuple[str, float]]:
    """Yields the nanoseconds of each event, excluding nested events."""
    inside: list[list[Any]] = []  # end, name, own time
    for event in sorted(events, key=lambda e: (e.start_ns, -e.duration_ns)):
        while inside and inside[-1][0] <= event.start_ns:
            yield tuple(inside.pop()[1:])
        if inside:
            inside[-1][2] -= event.duration_ns
        inside.append([event.start_ns + event.duration_ns, event.name, event.duration_ns])
    for _, name, own in inside:
        yield name, own
