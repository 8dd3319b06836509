"""Plans of runs that train adapters of a frozen base."""

import collections
import dataclasses
import importlib.util
import math

import pytest

from maxlib import adapters, plan
from maxlib._command import main
from maxlib.hardware import GIB
from maxlib.plan import _job as jobs
from maxlib.plan._program import make_program
from tests.nn.tiny import LLAMA
from tests.plan.jobs import layout

CONFIG = dataclasses.replace(LLAMA, vocab=64, num_layers=2, dim=64, mlp_dim=128, head_dim=16)
LORA = adapters.LoRA(4, 8)
JOB = plan.Job(CONFIG, "cpu", layout=layout(data=2, fsdp=4), sequence=64, dtype="float32", lora=LORA, base="int8")


def bytes_of(job):
    """Bytes on one device of the factors in float32, and of the frozen base."""
    program = make_program(job)
    places = {path: x.sharding.shard_shape(x.shape) for path, x in program.state.trainable.items()}
    return sum(4 * math.prod(shape) for shape in places.values()), program


@pytest.mark.full
def test_a_compiled_plan_holds_one_base_and_gradients_of_factors():
    got = plan.plan(JOB)
    factors, program = bytes_of(JOB)
    assert got.compiled and all(path.endswith(("matmul.a", "matmul.b")) for path in program.state.trainable)
    assert got.gradients == factors and 2 * factors <= got.optimizer < 2 * factors + 32
    full = plan.estimated(dataclasses.replace(JOB, lora=None, base=None))
    assert factors < got.parameters - full.parameters / 4 < 1.5 * factors + full.parameters / 8  # int8: a quarter
    factor_numbers = sum(math.prod(x.shape) for x in program.state.trainable.values())
    matrices = 2 * (64 * (4 + 2 + 2 + 4) * 16 + 3 * 64 * 128) + 64 * 64  # two layers and the head
    per_token = 6 * factor_numbers - 2 * matrices  # no gradient of what is frozen
    assert got.model_flops == pytest.approx(full.model_flops + per_token * got.tokens, rel=1e-6)
    assert 1.4 < (got.flops_factor or 0) < 1.55  # forward, forward again, and gradients of activations: 3/2
    sums = (
        sum(collective.bytes for collective in got.costs.collectives if collective.kind != "all-gather")
        if got.costs
        else math.inf
    )
    assert sums < 0.5 * full.gradients * 4  # gradients of the base would be summed whole
    assert "LoRA rank 4, alpha 8; their base is frozen, in int8" in str(got)


def test_of_frozen_weights_a_plan_counts_gathers_only():
    lora, full = (
        plan.estimated(dataclasses.replace(JOB, target="h100x8", lora=case, base=None)) for case in (LORA, None)
    )
    sizes = lambda case: {(c.kind, c.axes): c.bytes for c in case.costs.collectives}
    factors, _ = bytes_of(JOB)
    assert sizes(lora)["all-gather", ("fsdp",)] > sizes(full)["all-gather", ("fsdp",)]
    assert sizes(lora)["reduce-scatter", ("fsdp",)] <= 4 * factors < sizes(full)["reduce-scatter", ("fsdp",)]


@pytest.mark.full  # by default in bfloat16 on eight chips
@pytest.mark.parametrize(("base", "least", "most"), [("int8", 70, 85), ("nf4", 45, 55)])
def test_70b_fits_one_h200_with_a_quantized_base(base, least, most, capsys):
    got = plan.estimated(plan.Job("llama3-70b", "h200", sequence=4096, lora=adapters.LoRA(16, 32), base=base))
    assert got.fits and least < got.peak / GIB < most
    assert got.num_parameters == pytest.approx(70.55e9 + 0.207e9, rel=1e-3)  # the base, and rank 16 on every matrix


def test_70b_in_bfloat16_fits_eight_chips():
    got = plan.estimated(plan.Job("llama3-70b", "v5p-16", sequence=4096, lora=adapters.LoRA(16, 32)))
    base, factors = 2 * 70.55e9 / 8, 4 * 0.207e9  # bytes: the base's on each chip, and all factors
    assert got.fits and 24 < got.peak / GIB < 30
    assert factors / 8 < got.gradients < factors  # none of the base, whose share would be 33 GiB
    assert got.optimizer == pytest.approx(2 * got.gradients, rel=1e-6)
    assert got.parameters == pytest.approx(base + got.gradients, rel=2e-3)  # one base


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_the_compiled_step_of_70b_holds_one_base_and_sums_gradients_of_factors():
    job = plan.Job("llama3-70b", "v5p-16", sequence=4096, lora=adapters.LoRA(16, 32))
    got, estimate = plan.plan(job), plan.estimated(job)
    base, factors = 2 * 70.55e9 / 8, 4 * 0.207e9  # bytes: the base's on each chip, and all factors
    assert got.compiled and got.fits and got.peak == pytest.approx(estimate.peak, rel=0.1)
    assert base < got.parameters < got.peak < 2 * base  # no second base, and no gradients of it
    moved = collections.Counter()
    for collective in got.costs.collectives:
        moved[collective.kind] += collective.bytes
    # Gradients of the base, summed over chips, would be 131 GiB.
    assert 0.5 * factors < moved["all-reduce"] + moved["reduce-scatter"] < 1.1 * factors


def test_the_command_reads_adapters(monkeypatch):
    monkeypatch.setattr(plan, "plan", lambda job, **_: planned.append(job) or (_ for _ in ()).throw(ValueError("seen")))
    planned = []
    for words in ("--lora rank=16 --base nf4", "--lora rank=8,alpha=4,dora rslora"):
        main(["plan", "llama3-8b", "--target", "h200", *words.split()])
    assert [job.lora for job in planned] == [adapters.LoRA(16, 32), adapters.LoRA(8, 4, dora=True, rslora=True)]
    assert [job.base for job in planned] == ["nf4", None]
    again = jobs.from_json(jobs.to_json(planned[0]))
    assert again == planned[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lora alpha=16", "--lora takes rank=16,alpha=32 (numbers) and dora or rslora, of which rank is needed"),
        ("--lora rank=x", "(numbers)"),
        ("--lora rank=0", "rank must be at least 1"),
        ("--lora rank=16,beta=2", "got 'rank=16,beta=2'"),
        ("--base nf4", "base='nf4' stores a frozen base, which only adapters have: give lora"),
        ("--lora rank=16 --base int9", "base must be one of float32, bfloat16, fp8"),
    ],
)
def test_mistakes_about_adapters_are_named(words, said, capsys):
    assert main(["plan", "llama3.2-1b", "--target", "h100x8", *words.split()]) == 2
    assert said in capsys.readouterr().err
