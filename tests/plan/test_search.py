"""The search for a layout: what it tries, what it refuses, in which order it shows the rest."""

import dataclasses
import functools
import re

import pytest

from maxlib import plan
from maxlib._command import main
from maxlib.models import llama
from maxlib.plan._program import mesh_of
from maxlib.plan._search import _default_layouts
from tests.plan.jobs import CONFIG, MIXTRAL, layout


def test_a_search_in_which_nothing_fits_ends_like_a_plan_that_does_not_fit(capsys, monkeypatch):
    layouts = [layout()]
    monkeypatch.setattr(plan, "search", functools.partial(plan.search, layouts=layouts, batches=(1,), remats=("full",)))
    assert main(["plan", "llama3-70b", "--target", "h100", "--search"]) == 1
    assert re.search(r"no layout fits h100: .* GiB more than there is", capsys.readouterr().err)


def test_a_search_whose_compiled_layouts_do_not_fit_names_one_that_may():
    fits = plan.estimated(plan.Job(CONFIG, "h100x8", layout=layout(), sequence=16))
    large = dataclasses.replace(fits, compiled=True, peak=1e12)
    with pytest.raises(
        ValueError, match=r"no layout that was compiled fits h100x8.* GiB to spare: compile more of them"
    ):
        _ = plan.Search((large, fits), (), 0.0).best


def test_a_search_orders_what_fits_by_speed():
    layouts = [layout(), layout("fsdp_tp_sp", fsdp=2, tensor=4), layout(fsdp=3)]
    job = plan.Job("llama3-8b", "h100x8", sequence=4096)
    result = plan.search(job, layouts=layouts, batches=(1, 64), remats=("full",))
    assert result.best.fits and len(result.plans) == 4 and len(result.refused) == 2
    speeds = [p.tokens / p.estimate.serial for p in result.plans if p.fits and p.estimate]
    assert speeds == sorted(speeds, reverse=True) and any(not p.fits for p in result.plans)
    assert "4 layouts in" in str(result) and "not shown: 2 slower or larger ones" in str(result)


def test_a_printed_search_has_the_fastest_that_fit_or_else_the_smallest(monkeypatch):
    monkeypatch.setattr("maxlib.plan._search.ROWS", 2)
    job = plan.Job(CONFIG, "h100x8", sequence=16)
    result = plan.search(job, layouts=[layout()], batches=(1, 2, 3), remats=("full",), compile=0)
    lines = str(result).splitlines()
    assert sum("estimated" in line for line in lines) == 2
    assert "not shown: 1 slower or larger ones (`.plans` has all)" in lines
    huge = plan.search(plan.Job("llama3-70b", "h100"), layouts=[layout()], batches=(2, 1), remats=("full",), compile=0)
    rows = [line.split() for line in str(huge).splitlines() if "too large" in line]
    assert [row[row.index("full") + 1] for row in rows] == ["1", "2"]


def tried(job):
    """The layouts that a search tries, each with its mesh."""
    layouts = _default_layouts(job)
    return [(candidate, mesh_of(dataclasses.replace(job, layout=candidate)).shape) for candidate in layouts]


def test_a_search_spreads_experts_over_devices():
    meshes = [mesh for _, mesh in tried(plan.Job(MIXTRAL, "h100x16", sequence=16))]
    degrees = {(mesh["fsdp"], mesh["tensor"], mesh["expert"]) for mesh in meshes}
    assert {(16, 1, 1), (8, 2, 1), (4, 1, 4), (2, 1, 8)} <= degrees and {expert for *_, expert in degrees} == {1, 4, 8}


def test_a_search_copies_parameters_where_the_devices_do_not_divide_a_width():
    cfg = dataclasses.replace(CONFIG, dim=48)
    meshes = [mesh for _, mesh in tried(plan.Job(cfg, "h100x32", sequence=16))]
    assert {(2, 16, 1), (1, 16, 2)} <= {
        (mesh["data"], mesh["fsdp"], mesh["tensor"]) for mesh in meshes
    }  # 48 is 3 times 16


def test_a_search_does_not_copy_experts():
    """32 devices do not divide 48, so 16 of them split the model; but its experts' matrices all 32."""
    cfg = dataclasses.replace(MIXTRAL, dim=48)
    job = plan.Job(cfg, "h100x32", sequence=16)
    result = plan.search(job, batches=(1,), remats=("full",), compile=0)
    got = next(candidate for candidate in result.plans if candidate.mesh["expert"] == 8)
    assert (got.mesh["data"], got.mesh["fsdp"]) == (2, 2)
    copied = plan.estimated(dataclasses.replace(job, layout=layout("ep", data=2, fsdp=2, expert=8)))
    matrices = 4 * cfg.num_layers * cfg.num_experts * 3 * cfg.dim * cfg.expert_dim  # bytes
    assert copied.analytic.parameters - got.analytic.parameters == matrices / 16 - matrices / 32


def test_a_search_over_slices_tries_experts_with_and_without_copies():
    jobs = [plan.Job(MIXTRAL, "v5e-16x2", sequence=16, layout=layout(fsdp=-1, dcn={"data": n})) for n in (2, -1)]
    job, rest = jobs
    assert len(tried(rest)) == len(tried(job))  # -1 is as many as there are
    spread = [(candidate, mesh) for candidate, mesh in tried(job) if mesh["expert"] == 8]
    rules = [candidate.rules["expert_embed"] for candidate, _ in spread]
    assert {"data": 2, "fsdp": 2}.items() <= spread[0][1].items()
    assert sorted(rules, key=len) == [("data", "fsdp"), "fsdp"]


def test_a_search_over_hosts_splits_within_a_host():
    meshes = [
        mesh for _, mesh in tried(plan.Job(CONFIG, "h100x16", sequence=16, layout=layout(fsdp=-1, dcn={"data": -1})))
    ]
    assert [mesh["tensor"] for mesh in meshes] == [1, 2, 4, 8] and all(mesh["data"] == 2 for mesh in meshes)


def test_layouts_share_what_is_traced_of_a_model(monkeypatch):
    traced, call = [], llama.Llama.__call__
    monkeypatch.setattr(
        llama.Llama, "__call__", lambda self, *args, **more: traced.append(more) or call(self, *args, **more)
    )
    job = plan.Job(dataclasses.replace(CONFIG, dim=40), "h100x8", sequence=16)
    first = plan.estimated(job)
    assert [options["remat"] for options in traced] == [{"moe": "keep"}, None, None]  # "full", all of it, and the FLOPs
    second = plan.estimated(dataclasses.replace(job, layout=layout(data=2, fsdp=4)))
    assert len(traced) == 4 and second.analytic.activations == first.analytic.activations
