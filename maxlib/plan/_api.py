"""The entry points `plan` and `estimated`."""

from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh

from maxlib.plan._analytic import analytic_costs
from maxlib.plan._job import Job, check_names
from maxlib.plan._memory import Memory
from maxlib.plan._program import across_hosts, refused
from maxlib.plan._report import Plan
from maxlib.plan._roofline import estimate, link_speeds
from maxlib.plan._run import Compiled, run
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
    return _plan(job, compiled.described, compiled)


def estimated(job: Job) -> Plan:
    """Plans a job from shapes and data sheets alone, without compiling, in this process; no compiler is needed.

        found = plan.estimated(plan.Job("llama3.2-1b", "v5e-16", sequence=4096, remat="full"))
        found.fits, found.peak, found.estimate.mfu

    Args:
        job: The training step and its target.

    Raises:
        ValueError: when the parts of the job do not go together.
    """
    from maxlib.plan._worker import describe

    program, described = describe(job)
    target = parse_target(job.target)
    if job.dcn and target.platform == "cuda" and isinstance(program.mesh, AbstractMesh):
        described["links"] = link_speeds(program.mesh, target, across_hosts(job, target))
    return _plan(
        job, described, None, analytic_costs(program, described["model_flops"], described["analytic"]["offloaded"])
    )


def _plan(job: Job, described: dict[str, Any], compiled: Compiled | None, costs: Any = None) -> Plan:
    """Builds the `Plan` from the compiler's numbers if available, else from the analytic ones."""
    target, analytic = parse_target(job.target), Memory(**described["analytic"])
    costs = compiled.costs if compiled else costs
    rows, mesh = described["rows"], described["mesh"]
    guess = None
    if costs is not None:
        guess = estimate(
            costs, target, mesh, described["links"], tokens=rows * job.sequence, model_flops=described["model_flops"]
        )
    return Plan(
        job=job,
        target=target,
        mesh=mesh,
        compiled=compiled is not None,
        num_parameters=described["parameters"],
        rows=rows,
        **described["bytes"] | ({"host": compiled.host} if compiled else {}),
        gradients=analytic.gradients,
        temporaries=compiled.temporaries if compiled else analytic.temporaries,
        code=compiled.code if compiled else None,
        peak=compiled.peak if compiled else analytic.total,
        analytic=analytic,
        model_flops=described["model_flops"],
        costs=costs,
        estimate=guess,
        lower_seconds=compiled.lower_seconds if compiled else 0.0,
        compile_seconds=compiled.compile_seconds if compiled else 0.0,
    )
