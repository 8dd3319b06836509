"""Tick tables of pipeline schedules, with the share of time that stages idle and the activations that they keep.

    python -m tests.benchmarks.bubbles [--stages 4] [--microbatches 16] [--tables]

A forward pass (F), the gradient of a chunk's inputs (B) and that of its weights (W) take one unit each, divided by the
repeats; recomputing a chunk takes as long as F. Activations are those of a microbatch in one stage's layers, kept from
F to W. All stages run one program in step, as those of `sharding.Pipeline` do, so a tick lasts as long as all kinds of
work that some stage has in it. ZB-H1 (arXiv:2401.10241) runs W later than B: here once the first stage has come as far,
which keeps no more activations than 1F1B.
"""

import argparse
from collections.abc import Iterator
from fractions import Fraction

import jax.numpy as jnp

from maxlib.sharding._pipeline_chunks import Schedule, Tick

Work = tuple[str, int, int]  # F, B or W, a microbatch, and one of all chunks
Table = list[list[list[Work]]]  # tick, stage, work


def make_table(schedule: Schedule, *, split: bool) -> Table:
    """Returns the table of 1F1B that runs here; `split` delays W by as many ticks as the first stage is behind."""
    table: Table = [[[] for _ in schedule.all] for _ in range(schedule.ticks + schedule.lead)]
    for t, row in enumerate(table):
        for s, works in enumerate(row):
            works += _work("F", schedule.forward(jnp.asarray(t), s), schedule, s)
            works += _work("B", schedule.backward(jnp.asarray(t), s), schedule, s)
            works += _work("W", schedule.backward(jnp.asarray(t - s if split else t), s), schedule, s)
    return table


def _work(kind: str, tick: Tick, schedule: Schedule, stage: int) -> Iterator[Work]:
    if tick.active:
        yield kind, int(tick.microbatch), int(tick.repeat) * schedule.stages + stage


def check(table: Table, schedule: Schedule) -> None:
    """Asserts that everything is done once, and after what it needs."""
    at = {work: t for t, row in enumerate(table) for works in row for work in works}
    chunks = schedule.stages * schedule.repeats
    assert len(at) == 3 * chunks * schedule.microbatches == sum(len(works) for row in table for works in row)
    for (kind, m, chunk), t in at.items():
        if kind == "F":
            assert chunk == 0 or at["F", m, chunk - 1] < t
        elif kind == "B":
            assert at["F", m, chunk] <= t and (chunk == chunks - 1 or at["B", m, chunk + 1] < t)
        else:
            assert at["B", m, chunk] <= t


def costs(table: Table, schedule: Schedule, *, recompute: bool) -> tuple[Fraction, float]:
    """Returns the time of the table, and the share of it that a stage idles."""
    long = {"F": 1, "B": 1 + recompute, "W": 1}
    if recompute and any("B" not in kinds for row in table for works in row if "W" in (kinds := {w[0] for w in works})):
        long["W"] += 1  # it cannot use what B has recomputed
    kinds = [{kind for works in row for kind, *_ in works} for row in table]
    time = Fraction(sum(long[kind] for tick in kinds for kind in tick), schedule.repeats)
    busy = Fraction(sum(long.values()) * schedule.microbatches)
    return time, float(1 - busy / time)


def kept(table: Table, schedule: Schedule) -> Fraction:
    """Returns the most activations that a stage keeps at once, in those of a microbatch in all of its layers."""
    most = 0
    for s in schedule.all:
        held = 0
        for row in table:
            held += sum(kind == "F" for kind, *_ in row[s])
            most = max(most, held)
            held -= sum(kind == "W" for kind, *_ in row[s])
    return Fraction(most, schedule.repeats)


def show(table: Table) -> str:
    """Returns a row of text for each stage; a letter and a microbatch for each work."""
    width = max(len(_cell(works)) for row in table for works in row) + 1
    return "\n".join("".join(_cell(row[s]).ljust(width) for row in table).rstrip() for s in range(len(table[0])))


def _cell(works: list[Work]) -> str:
    return "".join(f"{kind}{m}" for kind, m, _ in works) or "."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    once, twice = (Schedule(args.stages, args.microbatches, repeats) for repeats in (1, 2))
    rows = {
        "1F1B": (make_table(once, split=False), once),
        "ZB-H1": (make_table(once, split=True), once),
        "1F1B, repeats=2": (make_table(twice, split=False), twice),
        "ZB-H1, repeats=2": (make_table(twice, split=True), twice),
    }
    print(f"{'':20}{'time':>8}{'idle':>8}{'kept':>8}{'time, recomputing':>20}")
    for name, (table, schedule) in rows.items():
        check(table, schedule)
        (time, idle), (again, _) = (costs(table, schedule, recompute=recompute) for recompute in (False, True))
        print(f"{name:20}{float(time):8.1f}{idle:8.1%}{float(kept(table, schedule)):8.1f}{float(again):20.1f}")
        if args.tables:
            print(show(table))


if __name__ == "__main__":
    main()
