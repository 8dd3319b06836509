"""Plans that compilers for TPUs and GPUs make without hardware, and their processes."""

import importlib.util
import os
import select
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from maxlib import nn, plan
from maxlib.plan import _job as jobs
from maxlib.plan import _targets as targets
from maxlib.plan import _worker
from tests.benchmarks.published import ROWS, Net
from tests.plan.jobs import CONFIG, layout

PUBLISHED_BILLIONS = {16: 16.27, 32: 32.55, 64: 64.76, 128: 129.2, 256: 258.4, 512: 516.1, 1024: 1031}


@pytest.mark.full
def test_the_published_networks_have_their_published_sizes_and_travel():
    for scale in (16, 64, 1024):
        assert nn.num_parameters(jax.eval_shape(Net(scale))) / 1e9 == pytest.approx(PUBLISHED_BILLIONS[scale], rel=1e-3)
    job = plan.Job(model=Net(32), target="v5p-128")
    assert jobs.from_json(jobs.to_json(job)).model == Net(32)
    assert {row.net.scale for row in ROWS.values()} == set(PUBLISHED_BILLIONS)


def test_a_compiler_watches_the_process_that_started_it_and_what_it_has_written(tmp_path, monkeypatch):
    class EndedError(BaseException):
        pass

    def end(status):
        raise EndedError

    naps = []
    sleep = lambda seconds: naps.append(seconds) or (tmp_path / "text.1").touch()
    monkeypatch.setattr(_worker, "os", types.SimpleNamespace(getppid=os.getppid, _exit=end))
    monkeypatch.setattr(_worker, "time", types.SimpleNamespace(sleep=sleep))
    for parent, enough, waits in ((-1, "", [1]), (os.getppid(), "text.*", [0.2, 1])):
        naps.clear()
        (tmp_path / "text.1").unlink(missing_ok=True)
        with pytest.raises(EndedError):
            _worker._end_early(parent, tmp_path, enough)
        assert naps == waits


@pytest.mark.full
def test_a_compilers_process_ends_with_the_one_that_started_it(tmp_path):
    """A parent that is killed cannot clean up, and the compiler would run on for minutes."""
    command = f"[sys.executable, '-m', 'maxlib.plan._worker', {str(tmp_path)!r}, str(os.getpid()), '']"
    code = f"import os, subprocess, sys, time; subprocess.Popen({command}); print(flush=True); time.sleep(600)"
    pipe = subprocess.PIPE  # the worker waits for its job on the parent's input, which stays open here
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout
        parent.stdout.readline()
        parent.kill()
        ended, *_ = select.select([parent.stdout], [], [], 60)  # the worker holds the other end until it ends
    assert ended


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


@needs_libtpu
@pytest.mark.full
def test_llama2_7b_on_four_chips_is_no_larger_than_the_peer():
    got = plan.plan(plan.Job("llama2-7b", "v5p-8"))
    assert got.peak <= 29.04 * 2**30 and got.analytic.total == pytest.approx(got.peak, rel=0.1)
    # Layers' weights come twice and their gradients go once, in bfloat16. What else travels is rows: of lookups, and to
    # the head.
    moved = {collective.kind: collective.bytes for collective in got.costs.collectives}
    weights = 2 * (got.num_parameters - 2 * 32_000 * 4096)
    assert {collective.axes for collective in got.costs.collectives} == {("fsdp",)}
    assert moved.pop("all-gather") == pytest.approx(2 * weights, rel=0.005)
    assert moved.pop("reduce-scatter") == pytest.approx(weights, rel=0.01)
    assert sum(moved.values()) < 0.02 * weights
    assert jnp.isfinite(got.estimate.mfu)


def test_without_a_compiler_for_gpus_a_plan_estimates_and_says_what_to_install(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if "cuda" in name else find(name, *rest))
    text = str(plan.plan(plan.Job(CONFIG, "h100x8", sequence=16)))
    assert "analytic model only" in text and 'pip install "maxlib[cuda]"' in text


needs_cuda = pytest.mark.skipif(not targets.has_gpu_compiler(), reason="needs jax's plugin for CUDA: jax[cuda13]")


@needs_cuda
@pytest.mark.full
@pytest.mark.parametrize("attention", [None, "mosaic_gpu"])
def test_a_step_compiles_for_gpus_that_are_not_there(attention):
    got = plan.plan(plan.Job("llama2-7b", "h100x16", sequence=2048, attention=attention))
    assert got.compiled and got.fits and got.analytic.total == pytest.approx(got.peak, rel=0.1)
    assert 1.15 < got.costs.flops * 16 / got.model_flops < 1.35
    # Weights come twice and their gradients go once, in bfloat16; rows travel to embedding and head.
    moved = {collective.kind: collective.bytes for collective in got.costs.collectives}
    layers = 2 * (got.num_parameters - 2 * 32_000 * 4096)
    assert {collective.axes for collective in got.costs.collectives} == {("fsdp",)}
    assert moved["all-gather"] == pytest.approx(2 * layers, rel=0.1)
    assert moved["reduce-scatter"] == pytest.approx(layers, rel=0.1)


@needs_libtpu
@pytest.mark.full
def test_a_1f1b_pipeline_needs_less_memory_and_no_more_arithmetic():
    """Beside full remat, 16 microbatches on 4 stages idle in 3 of 19 ticks; what moves between stages is small."""
    gpipe, early = (
        plan.plan(
            plan.Job(
                "llama3-8b",
                "v5p-32",
                layout=layout(name, stage=4, fsdp=4),
                sequence=4096,
                per_device_batch_size=4,
            )
        )
        for name in ("fsdp+pp:16", "fsdp+pp_1f1b:16")
    )
    assert early.peak < 0.8 * gpipe.peak and early.analytic.total == pytest.approx(early.peak, rel=0.1)
    for got in (gpipe, early):
        assert got.costs.flops * 16 / got.model_flops < 1.26 * 19 / 16
        assert sum(collective.bytes for collective in got.costs.collectives if "stage" in collective.axes) < 7 * 2**30
        activations = sum(
            collective.bytes
            for collective in got.costs.collectives
            if collective.axes == ("stage",) and "permute" in collective.kind
        )
        assert 0 < activations < 3.5 * 2**30


@needs_libtpu
@pytest.mark.full
def test_what_is_on_the_host_is_not_on_the_device():
    usual, offloaded = (
        plan.plan(plan.Job("llama3.2-1b", "v5e-16", layout=layout(name))) for name in ("fsdp", "fsdp+offload_optimizer")
    )
    assert usual.host == 0 and offloaded.host == pytest.approx(usual.optimizer, rel=0.01)
    assert usual.peak - offloaded.peak > 0.95 * usual.optimizer
    assert offloaded.costs.from_host == pytest.approx(offloaded.host, rel=0.01)
    assert offloaded.costs.to_host == pytest.approx(offloaded.host, rel=0.01)
