"""The recorded sweep over presets."""

import types

import pytest

from maxlib import hardware, weights
from tests.benchmarks import sweep
from tests.benchmarks.limits import limit

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
        ({"preset": "gpt3-52k", "mfu": 0.1, "limit": 1.0, "factor": 1.6}, []),
        ({"mfu": 0.4, "limit": 0.5}, []),
        ({"mfu": 0.4, "limit": 0.6}, ["40.0% MFU at the roofline, limit 60%"]),
        ({"mfu": 0.59, "limit": 1.7}, ["59.0% MFU at the roofline, limit 170%"]),
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


def test_the_limit_counts_what_a_dense_step_moves_at_least():
    cfg, tokens = weights.presets()["llama3.2-1b"], 2 * 4096
    D, q, kv, M, L = cfg.dim, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim, cfg.mlp_dim, cfg.num_layers
    matrices = L * (D * (2 * q + 2 * kv) + 3 * D * M) + cfg.vocab * D
    read = 2 * tokens * (L * (2 * D + 2 * q + 2 * kv + M) + D)  # by projections, attention and the head
    written = 2 * tokens * L * (2 * q + 2 * kv + 2 * D + 2 * M)
    chip = hardware.CHIPS["v6e"]
    count = limit("llama3.2-1b", chip, {"fsdp": 4}, 4096, 2)
    assert count.bytes["weights"] == 2 * 5 * matrices
    assert count.bytes["optimizer"] == 32 * (matrices + (2 * L + 1) * D) / 4
    assert count.bytes["activations"] == 3 * read + 2 * written
    attention = 6 * L * q * 4096 * 4097 * 2  # two sequences, causal
    useful = (6 * tokens * matrices + attention) / chip.flops
    assert count.mfu == pytest.approx(useful / (sum(count.bytes.values()) / chip.bandwidth))


def test_every_row_of_the_sweep_is_of_a_preset_and_those_that_fall_short_are_known():
    rows = sweep.recorded()
    below = [row for row in rows if row["mfu"] < sweep.LEAST_MFU]
    slow = {name for names in sweep.SLOW.values() for name in names}
    assert {row["preset"] for row in rows} | {*sweep.COSTLY} <= {*weights.presets()}
    assert slow <= {row["preset"] for row in below}
    assert all(row["mfu"] <= row["limit"] for row in below)
    assert {(row["preset"], row["target"]) for row in rows if sweep.faults(row)} == sweep.OPEN
