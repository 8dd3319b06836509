"""The recorded sweep over presets."""

import types

import pytest

from maxlib import weights
from tests.benchmarks import sweep

ROW = {
    "preset": "llama2-7b",
    "target": "v5p-8",
    "parameters": 6.7e9,
    "mesh": "fsdp 4",
    "sequence": 4096,
    "remat": "full",
    "batch": 1,
    "peak": 2.0**30,
    "analytic": 2.0**30,
    "fits": True,
    "factor": 1.3,
    "mfu": 0.7,
    "mfu_serial": 0.6,
    "bound": "arithmetic",
    "compile_seconds": 1.0,
}


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, []),
        ({"factor": 1.46}, ["1.46 times the model's FLOPs"]),
        ({"fits": False}, ["needs 1.00 GiB"]),
        ({"preset": "gpt3-52k", "mfu": 0.1, "factor": 1.6}, []),
        ({"preset": "deepseek-v2", "target": "v6e-32", "bound": "memory", "mfu": 0.4}, []),
        ({"preset": "deepseek-v2", "target": "v5p-32", "bound": "memory", "mfu": 0.4}, ["40.0% MFU at the roofline"]),
        ({"preset": "smollm3-3b", "target": "v6e-4", "bound": "memory", "mfu": 0.59}, ["59.0% MFU at the roofline"]),
    ],
)
def test_the_sweep_names_what_a_step_falls_short_of(change, fault):
    assert sweep.faults(ROW | change) == fault


def made(mfu, *, fits=True, factor=1.3):
    """What the sweep reads of a plan."""
    estimate, job = types.SimpleNamespace(mfu=mfu), types.SimpleNamespace(title="llama2-7b")
    return types.SimpleNamespace(fits=fits, flops_factor=factor, estimate=estimate, job=job)


@pytest.mark.parametrize(
    ("slices", "best"),
    [
        ([[made(0.5), made(0.7), made(0.9, fits=False), made(0.8, factor=1.5)], [made(0.9)]], 0.7),
        ([[made(0.9, fits=False)], [made(0.5)], [made(0.55)], [made(0.9)]], 0.55),  # falls short: the next slice, too
        ([[made(0.5, fits=False)]], 0.5),
    ],
)
def test_the_sweep_takes_the_fastest_plan_that_fits(monkeypatch, slices, best):
    monkeypatch.setattr(sweep, "fitting", lambda name, chip: iter(slices))
    monkeypatch.setattr(sweep, "searched", lambda plans, compile: plans)
    assert sweep.mfu(sweep.planned("llama2-7b", "v6e", compile=1)) == best


def test_every_row_of_the_sweep_is_of_a_preset_and_those_that_fall_short_are_known():
    rows = sweep.recorded()
    slow = {name.partition(",")[0] for name in sweep.SLOW}
    assert {row["preset"] for row in rows} | slow | {*sweep.COSTLY, *sweep.SPARSE["v6e"]} <= {*weights.presets()}
    assert {(row["preset"], row["target"]) for row in rows if sweep.faults(row)} == sweep.OPEN
