"""`plan(...)`: the one call."""

from collections.abc import Mapping
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


def plan(
    model: Any,
    target: str,
    *,
    batch_per_chip: float = 1,
    sequence: int = 2048,
    mesh: Mapping[str, int] | None = None,
    dcn: Mapping[str, int] | None = None,
    rules: Any = "fsdp",
    remat: Any = "full",
    attention: str | None = None,
    optimizer: Any = "adamw",
    dtype: str = "bfloat16",
    accumulate: int = 1,
    gradients: str | None = None,
    loss: Any = None,
    batch: Any = None,
    options: Mapping[str, Any] | None = None,
    full: bool = False,
    keep: str | Path | None = None,
    timeout: float = 3600,
) -> Plan:
    """Compiles a training step for hardware that is not there, and says what it needs and how fast it may be; print it.

    See `Job` for the arguments. The compiler runs in a process of its own, and stops when it has assigned memory;
    `full` lets it make the machine code too (minutes). options: XLA's own, by name. keep: an empty folder for the
    compiler's files, the program among them. Without jax's plugin for CUDA, GPUs are estimated from shapes, and so is
    what they send to the host. Raises ValueError for what does not fit together, ImportError saying what to install,
    TimeoutError after `timeout` seconds.
    """
    job = Job(
        model=model,
        target=target,
        batch_per_chip=batch_per_chip,
        sequence=sequence,
        mesh=mesh or {"fsdp": -1},
        dcn=dcn,
        rules=rules,
        remat=remat,
        attention=attention,
        optimizer=optimizer,
        dtype=dtype,
        accumulate=accumulate,
        gradients=gradients,
        loss=loss,
        batch=batch,
        options=options or {},
    )
    return plan_job(job, full=full, keep=keep, timeout=timeout)


def plan_job(job: Job, *, full: bool = False, keep: str | Path | None = None, timeout: float = 3600) -> Plan:
    """`plan` of a `Job`."""
    target = parse_target(job.target)
    check_names(job)
    if target.platform == "cuda" and refused(job):
        return estimated(job)
    compiled = run(job, full=full, keep=keep, timeout=timeout)
    return _plan(job, compiled.described, compiled)


def estimated(job: Job) -> Plan:
    """A plan from shapes alone, in this process."""
    from maxlib.plan._worker import describe

    program, described = describe(job)
    if job.dcn and isinstance(program.mesh, AbstractMesh):
        target = parse_target(job.target)
        described["links"] = link_speeds(program.mesh, target, across_hosts(job, target))
    return _plan(
        job, described, None, analytic_costs(program, described["model_flops"], described["analytic"]["offloaded"])
    )


def _plan(job: Job, described: dict[str, Any], compiled: Compiled | None, costs: Any = None) -> Plan:
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
