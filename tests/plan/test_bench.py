"""What the plans benchmark counts and refuses."""

import types

import pytest

from maxlib import weights
from maxlib.plan._hlo import Collective, Costs
from tests.benchmarks import plans as bench
from tests.benchmarks import sweep


def test_the_bench_compares_collectives_and_what_they_move():
    kinds = {"all-gather": 16, "all-reduce": 3, "reduce-scatter": 8, "all-to-all": 3, "collective-permute": 1}
    collectives = tuple(Collective(kind, ("fsdp",), count, count, count * 2.0**30) for kind, count in kinds.items())
    got = types.SimpleNamespace(costs=Costs(1.0, 1.0, collectives, 0))
    assert (bench.written(got), bench.moved(got)) == (31, 31.0)
    assert bench.Peer(1.0, 31, 31.0).excess(got) == [] == bench.Peer(None).excess(got)
    assert bench.Peer(1.0, 30, 40.0).excess(got) == ["31 collectives for 30"]
    assert bench.Peer(1.0, 31, 30.99).excess(got) == ["31.00 GiB moved for 30.99"]
    assert [bench.theirs(peer) for peer in (None, bench.Peer(None), bench.Peer(9.3))] == [
        "not measured",
        "does not fit",
        "9.30",
    ]


@pytest.mark.parametrize(("plans", "seconds"), [(23, 100.0), (24, 600.0)])
def test_the_bench_of_a_search_fails_when_layouts_are_missing_or_it_takes_ten_minutes(plans, seconds, monkeypatch):
    best = types.SimpleNamespace(compiled=True)
    found = types.SimpleNamespace(plans=[best] * plans, refused=[()] * 6, seconds=seconds, best=best)
    monkeypatch.setattr(bench.plan, "search", lambda *_, **__: found)
    bench.search(check=False)
    with pytest.raises(SystemExit, match="layouts in .*: 30 have to be tried within 600"):
        bench.search(check=True)
    found.plans, found.seconds = [best] * 24, 599.0
    bench.search(check=True)


ROW = {
    "preset": "llama2-7b",
    "target": "v5p-8",
    "parameters": 6.7e9,
    "mesh": "fsdp 4",
    "sequence": 4096,
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
        ({"mfu": 0.59}, ["59.0% MFU at the roofline"]),
        ({"fits": False}, ["needs 1.00 GiB"]),
        ({"preset": "gpt3-52k", "mfu": 0.1, "factor": 1.6}, []),
        ({"preset": "falcon-h1-0.5b", "mfu": 0.5, "factor": 1.46}, ["1.46 times the model's FLOPs"]),
        ({"preset": "gpt3-52k", "fits": False}, ["needs 1.00 GiB"]),
        ({"preset": "deepseek-v2", "target": "v6e-32", "bound": "memory", "mfu": 0.4}, []),
        ({"preset": "deepseek-v2", "target": "v5p-32", "bound": "memory", "mfu": 0.4}, ["40.0% MFU at the roofline"]),
        ({"preset": "gpt2", "target": "v6e-4", "bound": "memory", "mfu": 0.4}, []),
        ({"preset": "smollm3-3b", "target": "v6e-4", "bound": "memory", "mfu": 0.59}, ["59.0% MFU at the roofline"]),
        ({"target": "v6e-256x2", "bound": "network", "mfu": 0.1}, ["10.0% MFU at the roofline"]),
    ],
)
def test_the_sweep_names_what_a_step_falls_short_of(change, fault):
    assert sweep.faults(ROW | change) == fault


def test_a_saved_row_replaces_that_of_its_preset_on_the_same_kind_of_chip(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "RECORDED", tmp_path / "sweep.json")
    sweep.RECORDED.write_text("[]")
    for target, mfu in (("v5p-8", 0.7), ("v6e-8", 0.6), ("v5p-16", 0.8)):
        sweep.save(ROW | {"target": target, "mfu": mfu})
    assert [(one["target"], one["mfu"]) for one in sweep.recorded()] == [("v5p-16", 0.8), ("v6e-8", 0.6)]
    assert sweep.found([], ["v6e"]) == sweep.found(["llama2-7b"], ["v6e"]) != sweep.found(["gpt2"], ["v6e"]) == []


def test_every_row_of_the_sweep_is_of_a_preset_and_those_that_fall_short_are_known():
    rows = sweep.recorded()
    slow = {name.partition(",")[0] for name in sweep.SLOW}
    assert {one["preset"] for one in rows} | slow | {*sweep.COSTLY, *sweep.SPARSE["v6e"]} <= {*weights.presets()}
    assert {(one["preset"], one["target"]) for one in rows if sweep.faults(one)} == sweep.OPEN


def test_the_sweep_names_presets_without_a_row_or_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "RECORDED", tmp_path / "sweep.json")
    monkeypatch.setattr(sweep, "MISSING", {("llama2-7b", "v6e"): "why"})
    sweep.RECORDED.write_text("[]")
    everything = len(sweep.distinct()) * len(sweep.CHIPS)
    assert len(sweep.unrecorded()) == everything - 1 and ("llama2-7b", "v5p") in sweep.unrecorded()
    sweep.save(ROW)
    assert len(sweep.unrecorded()) == everything - 2 and ("llama2-7b", "v5p") not in sweep.unrecorded()


ALL = [f"{size}" for size in (8 * 2**i for i in range(9))]


@pytest.mark.parametrize(
    ("most", "size", "tensor", "share"),
    [
        (0, "8", False, 0.9),
        (1, "16", False, 0.9),
        (9, "8", True, 0.9),
        (18, "8", False, 1.0),
        (27, "256x2", False, 1.0),
        (28, None, None, None),
    ],
)
def test_a_preset_is_tried_on_slices_then_split_by_width_then_without_a_margin(most, size, tensor, share, monkeypatch):
    tried = []
    monkeypatch.setattr(sweep, "SIZES", {"v5p": ALL})
    monkeypatch.setattr(sweep, "SEVERAL", {"v5p": ["256x2"]})
    fastest = lambda job, *how: tried.append((job.target, *how)) or (job if len(tried) > most else None)
    monkeypatch.setattr(sweep, "fastest", fastest)
    if size is None:
        with pytest.raises(ValueError, match="no slice is large enough"):
            next(sweep.fitting("gpt2", "v5p"))
        return
    assert next(sweep.fitting("gpt2", "v5p")).sequence == 1024
    assert tried[-1] == (f"v5p-{size}", tensor, share)


@pytest.mark.parametrize(
    ("name", "steps", "chosen"),
    [
        ("gpt2", [(True, 1.46), (True, 1.45)], 1),
        ("gpt2", [(False, 1.2), (True, 1.2)], 1),
        ("gpt2", [(True, 1.5), (True, 1.47)], 0),
        ("gpt3-52k", [(True, 1.56), (True, 1.2)], 0),  # whose reason is known
    ],
)
def test_a_step_that_computes_too_much_again_is_planned_on_a_larger_slice(name, steps, chosen, monkeypatch):
    plans = [types.SimpleNamespace(fits=fits, flops_factor=factor) for fits, factor in steps]

    def fitting(name, chip):
        yield from plans
        raise ValueError("no more")

    monkeypatch.setattr(sweep, "fitting", fitting)
    assert sweep.planned(name, "v6e", lambda job: job) is plans[chosen]


def test_a_preset_that_fits_nowhere_has_no_plan(monkeypatch):
    monkeypatch.setattr(sweep, "fastest", lambda job, *_: None)
    with pytest.raises(ValueError, match="no slice is large enough"):
        sweep.planned("gpt2", "v6e", lambda job: job)
