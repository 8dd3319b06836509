"""Searches for the best layout: estimates many, compiles a few."""

import concurrent.futures
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from rich import box
from rich.table import Table

from maxlib import nn, sharding
from maxlib._utils.text import to_text
from maxlib.hardware import GIB
from maxlib.plan import _api
from maxlib.plan._job import Job
from maxlib.plan._report import Plan
from maxlib.plan._targets import parse_target
from maxlib.sharding import preset_name

# The analytic model errs: a layout that it puts this far over the capacity may still fit.
SLACK = 1.1
# A printed search shows so many layouts that fit.
ROWS = 12


@dataclasses.dataclass(frozen=True)
class Search:
    """The layouts that a search tried; prints as a table of the fastest that fit, and of all that were compiled.

    Args:
        plans: Compiled plans, the best first, then those that were only estimated.
        refused: Descriptions of layouts that could not be planned, each with the reason.
        seconds: Duration of the search.
    """

    plans: tuple[Plan, ...]
    refused: tuple[tuple[str, str], ...]
    seconds: float

    @property
    def best(self) -> Plan:
        """The fastest compiled plan that fits (or estimated one, if none was compiled).

        Raises:
            ValueError: when no layout fits; the message has the one that came closest.
        """
        good = [plan for plan in self.plans if plan.compiled and plan.fits] or [
            plan for plan in self.plans if not plan.compiled and plan.fits and not any(p.compiled for p in self.plans)
        ]
        if good:
            return good[0]
        least = min(self.plans, key=lambda plan: plan.peak)
        if least.fits:
            raise ValueError(
                f"no layout that was compiled fits {least.target}; by its estimate the smallest ({_words(least)}) has "
                f"{(least.target.chip.memory - least.peak) / GIB:.2f} GiB to spare: compile more of them, compile="
            )
        over = (least.peak - least.target.chip.memory) / GIB
        raise ValueError(
            f"no layout fits {least.target}: the smallest ({_words(least)}) needs {over:.2f} GiB more than there is; take more chips, "
            "a smaller batch or a shorter sequence"
        )

    def __str__(self) -> str:
        table, shown = Table(box=box.SIMPLE), self._shown()
        for name in ("mesh", "strategy", "remat"):
            table.add_column(name, no_wrap=name == "mesh")
        for name in ("batch/chip", "peak GiB", "analytic GiB", "tokens/s", "MFU"):
            table.add_column(name, justify="right")
        table.add_column("")
        for plan in shown:
            table.add_row(*_row(plan))
        compiled = sum(plan.compiled for plan in self.plans)
        tried = f"{len(self.plans)} layouts in {self.seconds:.0f} s, {compiled} compiled; {len(self.refused)} refused"
        left = len(self.plans) - len(shown)
        more = f"not shown: {left} slower or larger ones (`.plans` has all)\n" if left else ""
        return f"{tried}\n{to_text(table, width=118)}\n{more}{self._reasons()}"

    __repr__ = __str__

    def _shown(self) -> list[Plan]:
        """Returns the fastest plans that fit and all compiled ones; if none fits, the smallest."""
        fitting = [plan for plan in self.plans if plan.fits][:ROWS]
        compiled = [plan for plan in self.plans if plan.compiled and not plan.fits]
        return [*fitting, *compiled] or sorted(self.plans, key=lambda plan: plan.peak)[:ROWS]

    def _reasons(self) -> str:
        """Returns a line for each reason, with the first layout that was refused for it."""
        first = {why: words for words, why in reversed(self.refused)}
        return "".join(f"refused: {words}: {why}\n" for why, words in reversed(first.items()))


def search(
    job: Job,
    *,
    layouts: Iterable[sharding.Layout] | None = None,
    remats: Sequence[Any] = ("full", "dots", None),
    batches: Sequence[float] = (1, 2, 4),
    compile: int = 3,
    workers: int | None = None,
    timeout: float = 3600,
) -> Search:
    """Estimates every combination of layout, remat and batch, and compiles the most promising that may fit.

    Args:
        job: The common settings; its own layout, remat and batch are not tried.
        layouts: The layouts to try; by default FSDP with tensor parallelism up to 16 or, for experts, expert
            parallelism up to 128, and the job's `dcn`. If the devices do not divide a width, such as an image tower's,
            the parameters are split over fewer of them, and `data` is greater than one.
        remats: Remat policies to try.
        batches: Sequences per device to try.
        compile: Number of estimates to compile.
        workers: Number of compilers that run at once; by default half of the processors.
        timeout: Time limit of one compiler in seconds.

    Raises:
        ValueError: when no layout can be planned.
    """
    if compile < 0:
        raise ValueError(f"compile must be at least 0, the number of layouts to compile; got {compile}")
    begin = time.monotonic()
    layouts = list(layouts or _default_layouts(job))
    jobs = [
        dataclasses.replace(job, layout=layout, remat=remat, per_device_batch_size=per_chip)
        for layout, remat, per_chip in itertools.product(layouts, remats, batches)
    ]
    estimates, refused = _sorted(_attempt(_api.estimated, job) for job in jobs)
    hopeful = [plan for plan in estimates if plan.peak <= SLACK * plan.target.chip.memory][:compile]
    workers = workers or max(1, (os.cpu_count() or 2) // 2)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:

        def attempt(plan):
            return _attempt(functools.partial(_api.plan, timeout=timeout), plan.job)

        compiled, failed = _sorted(pool.map(attempt, hopeful))
    done = {id(plan) for plan in hopeful}
    plans, refused = (*compiled, *(plan for plan in estimates if id(plan) not in done)), (*refused, *failed)
    if not plans:
        raise ValueError(f"none of {len(jobs)} layouts can be planned: {refused[0][0]}: {refused[0][1]}")
    return Search(plans, refused, time.monotonic() - begin)


# Experts' matrices are split over copies of the rest of the model, too.
_EXPERTS_OVER_DATA = {"expert_embed": ("data", "fsdp")}


def _default_layouts(job: Job) -> list[sharding.Layout]:
    """Returns FSDP with tensor parallelism up to 16, and for a mixture of experts with expert parallelism to 128."""
    groups, across = _groups(job)
    devices, split = parse_target(job.target).devices // groups, sharding.FSDP_TP | sharding.SP
    width, inner, experts = _divisors(job)
    tensor = [("tensor", n, split if n > 1 else sharding.FSDP) for n in (1, 2, 4, 8, 16)]
    expert = [("expert", n, sharding.EP) for n in (4, 8, 16, 32, 64, 128) if experts and experts % n == 0]
    layouts = []
    for axis, n, strategy in (choice for choice in tensor + expert if devices % choice[1] == 0):
        # Widths are split over all devices but those of `tensor`. What does not divide them, copies take.
        parts = devices // (n if axis == "tensor" else 1)
        copies = parts // math.gcd(parts, width)
        strategies = [strategy]
        if axis == "expert" and copies * across > 1 and inner % (devices // n * across) == 0:
            # Experts are nearly all of a mixture: only slices may have copies of them.
            strategies = [strategy] * (copies == 1) + [strategy | _EXPERTS_OVER_DATA]
        degrees = {"data": copies, "fsdp": -1, axis: n, "dcn": job.dcn}
        layouts += [sharding.Layout(degrees, choice) for choice in strategies]
    return layouts


def _groups(job: Job) -> tuple[int, int]:
    """Returns how many slices or hosts the slower network joins, and how many of them have copies of all parameters."""
    target = parse_target(job.target)
    groups = target.slices
    if job.dcn and target.platform == "cuda":
        groups = math.ceil(target.devices / target.chip.group)
    _, across = sharding.MeshShape.of({"fsdp": -1, "dcn": job.dcn}).sizes(target.devices, groups)
    return groups, across["data"]


def _divisors(job: Job) -> tuple[int, int, int]:
    """Returns the greatest divisors of all widths of a model, of its experts and of their numbers; of nothing 0."""
    model = jax.eval_shape(job.plain)
    axes, variables = nn.tree.axes(model), nn.tree.variables(model)
    named = [
        (name, n) for path, x in variables.items() for name, n in zip(axes[path], x.get_value().shape, strict=False)
    ]

    def divisor(wanted):
        return math.gcd(*(n for name, n in named if name == wanted))

    return divisor("embed"), divisor("expert_embed"), divisor("expert")


def _attempt(make: Callable[[Job], Plan], job: Job) -> Plan | tuple[str, str]:
    """Returns the plan, or a description of the job and the error: one layout that fails does not end a search."""
    try:
        return make(job)
    except Exception as error:
        return f"{job.degrees}, remat {job.remat}, {job.per_device_batch_size:g} per chip", str(error) or repr(error)


def _sorted(attempts: Iterable[Plan | tuple[str, str]]) -> tuple[list[Plan], tuple[tuple[str, str], ...]]:
    """Returns the plans, the best first, and the refused jobs."""
    attempts = list(attempts)
    plans = [attempt for attempt in attempts if isinstance(attempt, Plan)]
    plans = sorted(plans, key=lambda plan: (not plan.fits, -_speed(plan)))
    return plans, tuple(attempt for attempt in attempts if not isinstance(attempt, Plan))


def _speed(plan: Plan) -> float:
    """Returns tokens per second without overlap, which still ranks layouts that are all bound by arithmetic."""
    return plan.tokens / plan.estimate.serial if plan.estimate and math.isfinite(plan.estimate.serial) else 0.0


def _words(plan: Plan) -> str:
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one device"
    return f"{mesh}, remat {plan.job.remat}, {plan.job.per_device_batch_size:g} per chip"


def _row(plan: Plan) -> list[str]:
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one device"
    mfu = f"{plan.estimate.mfu_serial:.1%}" if plan.estimate else "-"
    state = ("compiled" if plan.compiled else "estimated") + ("" if plan.fits else ", too large")
    sizes = [f"{size / GIB:.2f}" for size in (plan.peak, plan.analytic.total)]
    return [
        mesh,
        preset_name(plan.job.layout.strategy),
        str(plan.job.remat),
        f"{plan.job.per_device_batch_size:g}",
        *sizes,
        f"{_speed(plan):,.0f}",
        mfu,
        state,
    ]
