"""Runs Pallas's kernels for Triton on a CPU, by Pallas's own interpreter."""

import functools
from unittest import mock

from jax.experimental import pallas as pl

CALL, PROGRAM = pl.pallas_call, pl.program_id


def _call(kernel, *args, grid_spec, **options):
    @functools.wraps(kernel)
    def run(*refs):
        # The interpreter knows a program's place in the grid only outside of loops, and tokamax asks for it in them.
        place = [PROGRAM(axis) for axis in range(len(grid_spec.grid))]
        with mock.patch.object(pl, "program_id", functools.partial(_at, place)):
            return kernel(*refs)

    return CALL(run, *args, grid_spec=grid_spec, interpret=True, **options)


def _at(place, axis):
    if axis >= len(place):
        raise ValueError(f"the grid has {len(place)} axes")
    return place[axis]


def install(monkeypatch) -> None:
    """Makes every `pallas_call` run in the interpreter."""
    monkeypatch.setattr(pl, "pallas_call", _call)
