"""The entry points `plan` and `estimated`."""

import dataclasses
from pathlib import Path
from typing import Any

from maxlib.plan._analytic import analytic_costs
from maxlib.plan._hlo import Costs
from maxlib.plan._job import Job, check_names
from maxlib.plan._memory import Memory
from maxlib.plan._program import refused
from maxlib.plan._report import Plan
from maxlib.plan._roofline import estimate
from maxlib.plan._run import run
from maxlib.plan._targets import parse_target


def plan(job: Job, *, full: bool = False, keep: str | Path | None = None, timeout: float = 3600) -> Plan:
    """Compiles a training step for hardware that need not be present; print the result for a report.

    The compiler runs in a separate process and stops once memory is assigned. Without a compiler for the target
    (libtpu, or jax's CUDA plugin), and for GPUs if the job sends arrays to the host, the plan is estimated from
    shapes; the report says why.

        job = plan.Job("llama3.2-1b", "b200x8", sequence=4096, remat="full")
        print(plan.plan(job))  # memory, time and traffic of a step

    Args:
        job: The training step and its target.
        full: True also generates machine code, which takes minutes.
        keep: An empty folder for the compiler's files, which include the optimized program.
        timeout: Time limit of the compiler in seconds.

    Raises:
        ValueError: when the parts of the job are inconsistent.
        TimeoutError: when compiling takes longer than `timeout`.
    """
    if not isinstance(job, Job):
        raise TypeError(f"plan takes a plan.Job, such as plan.Job('llama3-70b', 'v5p-128'), got {job!r:.80}")
    check_names(job)
    if refused(job):
        return estimated(job)
    compiled = run(job, full=full, keep=keep, timeout=timeout)
    return dataclasses.replace(
        _plan(job, compiled.facts, compiled.costs),
        compiled=True,
        host=compiled.host,
        temporaries=compiled.temporaries,
        code=compiled.code,
        peak=compiled.peak,
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
    )


def estimated(job: Job) -> Plan:
    """Plans a job from shapes and data sheets alone, without compiling, in this process; no compiler is needed.

        estimate = plan.estimated(plan.Job("llama3.2-1b", "v5e-16", sequence=4096, remat="full"))
        estimate.fits, estimate.peak, estimate.estimate.mfu

    Args:
        job: The training step and its target.

    Raises:
        ValueError: when the parts of the job do not go together.
    """
    from maxlib.plan._worker import describe

    program, facts = describe(job)
    memory = Memory(**facts["analytic"])
    return _plan(job, facts, analytic_costs(program, facts["model_flops"], memory.activations, memory.offloaded))


def _plan(job: Job, facts: dict[str, Any], costs: Costs | None) -> Plan:
    """Returns the plan from shapes, with these costs."""
    target, analytic, flops = parse_target(job.target), Memory(**facts["analytic"]), facts["model_flops"]
    guess = None
    if costs is not None:
        tokens = facts["rows"] * job.sequence
        guess = estimate(costs, target, facts["mesh"], facts["links"], tokens=tokens, model_flops=flops)
    return Plan(
        job=job,
        target=target,
        mesh=facts["mesh"],
        num_parameters=facts["parameters"],
        rows=facts["rows"],
        parameters=analytic.parameters,
        optimizer=analytic.optimizer,
        batch=analytic.batch,
        host=facts["host"],
        gradients=analytic.gradients,
        temporaries=analytic.temporaries,
        peak=analytic.total,
        analytic=analytic,
        model_flops=flops,
        costs=costs,
        estimate=guess,
    )
