"""Contenders that take turns on one machine, so that what else runs there slows all of them."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from rich.console import Console
from rich.table import Table


def measure(runs: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, list[float]]:
    """Returns the seconds of every contender, round by round; one round before them warms up."""
    times: dict[Any, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            begin = time.perf_counter()
            run()
            if number:
                times[name].append(time.perf_counter() - begin)
    return times


def ratio(times: Mapping[Any, list[float]], name: Any, base: Any) -> float:
    """Returns the median over rounds of a contender's time over that of another."""
    return statistics.median(t / b for t, b in zip(times[name], times[base], strict=True))


def compiled(f: Callable[..., Any], *args: Any) -> tuple[Callable[[], Any], float]:
    """Returns a call of a compiled function, and the MiB of its temporaries."""
    program = jax.jit(f).lower(*args).compile()
    mib = program.memory_analysis().temp_size_in_bytes / 2**20
    return (lambda: jax.block_until_ready(program(*args))), mib


def show(title: str, times: Mapping[str, list[float]], base: str, memory: Mapping[str, float]) -> None:
    """Prints a table of contenders, with their times as multiples of that of `base`."""
    table = Table("", "median ms", f"time / {base}", "temporaries MiB", title=title)
    for name, seconds in times.items():
        mib = f"{memory[name]:.0f}" if name in memory else ""
        table.add_row(name, f"{1e3 * statistics.median(seconds):.2f}", f"{ratio(times, name, base):.2f}", mib)
    Console().print(table)
