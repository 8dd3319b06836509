"""Plans with losses defined outside of maxlib, passed by value and by name."""

import dataclasses

import pytest

from maxlib import plan
from maxlib._command import main
from maxlib.plan import _job as jobs
from maxlib.plan._program import make_program
from tests.nn.tiny import LLAMA
from tests.plan.jobs import layout
from tests.training import custom_losses

CONFIG = dataclasses.replace(LLAMA, vocab=64, num_layers=4)
JOB = plan.Job(CONFIG, "cpu", layout=layout(fsdp=8), sequence=16, dtype="float32")
PAIRS = {"loss": custom_losses.Preferred(beta=0.3), "batch": custom_losses.pair_shapes}


def test_a_loss_travels_with_its_options():
    job = dataclasses.replace(JOB, microbatches=2, **PAIRS)
    assert jobs.from_json(jobs.to_json(job)) == job
    named = dataclasses.replace(JOB, loss="tests.training.custom_losses:gentle")
    assert jobs.from_json(jobs.to_json(named)) == named
    assert named.loss_function == custom_losses.Focal(gamma=1.0)
    assert dataclasses.replace(JOB, loss="tests.training.custom_losses:Focal").loss_function == custom_losses.Focal()


def test_the_step_of_a_plan_is_that_of_the_loss():
    """A program with its arrays beside tokens, whose gradient is that of the loss."""
    program = make_program(dataclasses.replace(JOB, **PAIRS))
    shapes = {name: (x.shape, str(x.dtype)) for name, x in program.batch.items()}
    by_token = (8, 16)
    assert shapes == {
        "tokens": (by_token, "int32"),
        "targets": (by_token, "int32"),
        "segment_ids": (by_token, "int32"),
        "reference": (by_token, "float32"),
        "weight": ((8,), "float32"),
    }
    assert program.batch["weight"].sharding.spec == program.batch["reference"].sharding.spec
    assert program.model_flops > 0
    _, metrics = program.lower().out_info
    assert {"margin", "accuracy", "num_targets"} <= metrics.keys() and "nll" not in metrics


def piped() -> plan.Job:
    return dataclasses.replace(JOB, layout=layout("fsdp+pp_1f1b:4", stage=4, fsdp=2), **PAIRS)


@pytest.mark.full
def test_a_plan_compiles_an_outside_loss_in_a_pipeline():
    """In a process of its own."""
    result = plan.plan(piped())
    assert result.compiled and result.costs is not None and result.costs.flops * 8 > result.model_flops


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--loss tests.training.custom_losses:nothing", "loss must be named module:name"),
        ("--loss nowhere:loss", "loss must be named module:name"),
        ("--loss focal", "loss must be named module:name"),
        ("--loss tests.training.tiny:batch", "does not take"),
        ("--loss tests.training.custom_losses:contrast --strategy pp_1f1b", "a subclass of training.Loss"),
    ],
)
def test_the_command_line_takes_a_loss_by_name(words, said, capsys):
    assert main(["plan", "llama3.2-1b", "--target", "h100x8", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_the_command_line_hands_the_loss_on(monkeypatch):
    calls = []
    monkeypatch.setattr(plan, "plan", lambda job, **_: calls.append(job) or 1 / 0)
    words = "llama3.2-1b --target cpu --loss tests.training.custom_losses:Focal --batch tests.training.custom_losses:pair_shapes"
    with pytest.raises(ZeroDivisionError):
        main(["plan", *words.split()])
    assert calls[0].loss_function == custom_losses.Focal()
    assert calls[0].batch == "tests.training.custom_losses:pair_shapes"
