"""The result of a plan, and its report."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from rich import box
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from maxlib import adapters, sharding
from maxlib._utils.text import to_text
from maxlib.adapters import as_rules
from maxlib.hardware import GIB
from maxlib.plan._hlo import Costs
from maxlib.plan._job import Job
from maxlib.plan._memory import Memory, estimate_memory
from maxlib.plan._program import make_program, refused
from maxlib.plan._roofline import Estimate
from maxlib.plan._targets import Target
from maxlib.sharding import preset_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The memory and time of a training step on a target; prints as a report. Sizes are bytes on one device.

    Args:
        job: The training step.
        target: The hardware.
        mesh: From mesh axis to size.
        compiled: True if the numbers come from the compiler, False if from the analytic model.
        num_parameters: Parameters of the whole model.
        rows: Rows of the global batch.
        parameters: Bytes of parameters.
        optimizer: Bytes of the optimizer's state.
        batch: Bytes of the inputs.
        host: Bytes that the host stores for the device, such as moments.
        gradients: Bytes of gradients; part of `temporaries`.
        temporaries: Bytes of arrays that only exist during the step.
        code: Bytes of machine code; None unless the compiler ran to its end.
        peak: Bytes at the worst moment.
        analytic: The analytic memory model.
        model_flops: The model's FLOPs of a step on all devices.
        costs: One device's work; None if the program's text could not be read.
        estimate: The time of a step by the roofline; None without `costs`.
        lower_seconds: Seconds of tracing and lowering.
        compile_seconds: Seconds of compiling.
    """

    job: Job
    target: Target
    mesh: dict[str, int]
    compiled: bool = False
    num_parameters: int
    rows: int
    parameters: float
    optimizer: float
    batch: float
    host: float
    gradients: float
    temporaries: float
    code: float | None = None
    peak: float
    analytic: Memory
    model_flops: float
    costs: Costs | None
    estimate: Estimate | None
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def fits(self) -> bool:
        """Returns True if the peak fits in the device's memory."""
        return self.peak <= self.target.chip.memory

    @property
    def flops_factor(self) -> float | None:
        """Compiled or estimated FLOPs over the model's; None where the program's text could not be read."""
        return self.costs.flops * self.target.devices / self.model_flops if self.costs else None

    @property
    def tokens(self) -> int:
        """Tokens of the global batch."""
        return self.rows * self.job.sequence

    def __str__(self) -> str:
        return to_text(Group(*_report(self)), width=118)

    __repr__ = __str__


def _report(plan: Plan) -> list[Any]:
    job = plan.job
    mesh = ", ".join(f"{axis} {n}" for axis, n in plan.mesh.items() if n > 1) or "one device"
    strategy = preset_name(job.layout.strategy)
    head = [
        f"{job.title}, {plan.num_parameters / 1e9:.2f} billion parameters, on {plan.target}",
        f"mesh: {mesh}; strategy: {strategy}; remat: {job.remat}; optimizer: {getattr(job.optimizer, '__name__', job.optimizer)}",
        *_adapters(job),
        f"batch: {plan.rows} x {job.sequence} tokens ({job.per_device_batch_size:g} per chip); {job.dtype} arithmetic",
        "",
    ]
    return [*head, _memory(plan), verdict(plan), "", *_work(plan)]


def _adapters(job: Job) -> list[str]:
    """Returns a line about the adapters and the frozen base, if the job trains adapters."""
    if job.lora is None:
        return []
    adapters = [rule.adapter for rule in as_rules(job.lora) if rule.adapter]
    names = [
        f"{'DoRA' if adapter.dora else 'LoRA'} rank {adapter.rank}, alpha {adapter.alpha:g}"
        for adapter in dict.fromkeys(adapters)
    ]
    return [f"adapters: {'; '.join(names)}; their base is frozen, in {job.base or job.dtype}"]


def _memory(plan: Plan) -> Table:
    table = Table(box=box.SIMPLE, title="memory of one device", title_justify="left")
    table.add_column("")
    table.add_column("GiB", justify="right")
    table.add_column("")

    def show(size):
        return "-" if size is None else f"{size / GIB:.2f}"

    rest = max(0.0, plan.temporaries - plan.gradients)
    table.add_row("parameters", show(plan.parameters), "")
    table.add_row("optimizer", show(plan.optimizer), "")
    table.add_row("batch", show(plan.batch), "")
    table.add_row(
        "gradients",
        show(plan.gradients),
        "by their shapes; the compiler counts them as temporaries" if plan.compiled else "by their shapes",
    )
    table.add_row(
        "activations, temporaries",
        show(rest),
        "the compiler's temporaries without gradients" if plan.compiled else "estimated",
    )
    unknown = "needs a full compilation (--full)" if plan.code is None else "the compiler does not say"
    table.add_row("code", show(plan.code or None), "" if plan.code else unknown)
    table.add_row("peak", show(plan.peak), "compiled" if plan.compiled else "analytic model only")
    table.add_row("capacity", show(plan.target.chip.memory), "")
    if plan.host:
        table.add_row("on the host", show(plan.host), "not in the peak")
    return table


def verdict(plan: Plan) -> str:
    """Returns a sentence about whether the plan fits, and if not, by how much and what would help."""
    capacity = plan.target.chip.memory
    spare = capacity - plan.peak
    if plan.fits:
        fits = f"fits: {spare / GIB:.2f} GiB to spare ({100 * plan.peak / capacity:.0f}% used)"
        fill = "A larger batch per chip or a lighter remat would use the rest, and raise MFU; plan.search (--search) compares."
        return f"{fits}. {fill}" if spare > plan.peak else fits
    changes = remedies(plan.job, capacity, lambda job: estimate_memory(make_program(job)).total)
    more = "More devices on fsdp (or tensor, expert) split parameters and optimizer further."
    return " ".join([f"does not fit: {-spare / GIB:.2f} GiB too much.", *([changes] if changes else []), more])


def _work(plan: Plan) -> list[Any]:
    lines = [f"model FLOPs of a step: {plan.model_flops:.4g} ({plan.model_flops / plan.tokens:.4g} a token)"]
    if plan.costs is None or plan.estimate is None:
        return [*lines, "the program's text could not be read: no collectives, no estimate", *_times(plan)]
    total, how = plan.costs.flops * plan.target.devices, "compiled" if plan.compiled else "estimated"
    lines.append(f"{how} FLOPs of a step: {total:.4g} ({total / plan.model_flops:.2f} times the model's)")
    if plan.costs.unknown_loops:
        lines.append(
            f"{plan.costs.unknown_loops} loops depend on data: counted for a causal mask, experts with equal shares"
        )
    return [
        *lines,
        _collectives(plan.costs, plan.compiled),
        *_host(plan.costs),
        *_estimate(plan.estimate, plan.target.platform),
        *_times(plan),
    ]


def _host(costs: Costs) -> list[str]:
    if not costs.to_host + costs.from_host:
        return []
    return [f"copies in a step: {costs.from_host / GIB:.3f} GiB from the host, {costs.to_host / GIB:.3f} GiB to it", ""]


def _collectives(costs: Costs, compiled: bool) -> Table | str:
    if not costs.collectives:
        return "no collectives"
    title = "collectives of one device in a step" if compiled else "a device's collectives, estimated"
    table = Table(box=box.SIMPLE, title=title, title_justify="left")
    for name in ("kind", "mesh axes"):
        table.add_column(name)
    for name in ("written", "run", "GiB") if compiled else ("GiB",):
        table.add_column(name, justify="right")
    for collective in costs.collectives:
        counts = [str(collective.written), f"{collective.runs:g}"] if compiled else []
        table.add_row(collective.kind, " ".join(collective.axes) or "-", *counts, f"{collective.bytes / GIB:.3f}")
    return table


def _estimate(estimate: Estimate, platform: str) -> list[str]:
    took = (
        "steps on one H100 took 1.8 to 2 times, with experts 3.2 times"
        if platform == "cuda"
        else "published runs on TPUs took 1.25 to 1.5 times"
    )
    host = f", host {estimate.host:.4g} s" if estimate.host else ""
    return [
        f"roofline: arithmetic {estimate.compute:.4g} s, memory {estimate.memory:.4g} s, network {estimate.network:.4g} s{host}",
        f"a step takes at least {estimate.seconds:.4g} s, bound by {estimate.bound}: {estimate.tokens_per_second:,.0f} tokens/s, "
        f"MFU {estimate.mfu:.1%}; with no overlap {estimate.serial:.4g} s, MFU {estimate.mfu_serial:.1%}",
        f"a bound, not a forecast: {took} as long",
        "MFU is the model's FLOPs over what the devices could do in that time; what runs twice for remat does not count",
        *[f"  assumes {line}" for line in estimate.assumptions],
    ]


def _times(plan: Plan) -> list[str]:
    if not plan.compiled:
        why = refused(plan.job)
        return [f"not compiled: {escape(why)}" if why else "not compiled"]
    end = "to the end" if plan.code is not None else "memory only; --full compiles the rest"
    return [f"lowered in {plan.lower_seconds:.1f} s, compiled in {plan.compile_seconds:.1f} s ({end})"]


_RANK = 16


def remedies(job: Job, capacity: float, peak_of: Callable[[Job], float]) -> str:
    """Returns a sentence about the changes of a job that fit by an estimate; if none does, about the closest.

    Args:
        job: A step that does not fit.
        capacity: Bytes of one device.
        peak_of: Estimates the peak of a job in bytes on one device.
    """
    sizes: dict[str, float] = {}
    for words, change in _changes(job):
        if "lora" in words and any("lora" in remedy and size <= capacity for remedy, size in sizes.items()):
            continue  # adapters of a bfloat16 base fit: a smaller base is not needed
        try:
            sizes[words] = peak_of(change)
        except (ValueError, TypeError):  # the model or the layout does not take this change
            continue
    if not sizes:
        return ""
    fitting = {words: size for words, size in sizes.items() if size <= capacity}
    best = min(sizes, key=sizes.__getitem__)
    verb, listed = ("fits", fitting) if fitting else ("comes closest", {best: sizes[best]})
    each = "; ".join(f"{words} {verb}, {size / GIB:.1f} GiB" for words, size in listed.items())
    return f"By estimates for {capacity / GIB:.1f} GiB: {each}."


def _changes(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields changes that save memory and what they are called, the one that changes least first."""
    also = ""
    if job.remat != "full":
        job, also = dataclasses.replace(job, remat="full"), "remat='full', "
        yield "remat='full'", job
    if job.sequence > 1024:
        half = job.sequence // 2
        yield f"{also}sequence={half}", dataclasses.replace(job, sequence=half)
    if job.lora is None and job.optimizer == "adamw" and not job.offloads and job.layout.pipeline is None:
        strategy = job.layout.strategy | sharding.OFFLOAD_OPTIMIZER
        layout = dataclasses.replace(job.layout, strategy=strategy)
        name = preset_name(strategy)
        yield f"{also}strategy={name} (moments on the host)", dataclasses.replace(job, layout=layout)
    if job.lora is None:
        lora = dataclasses.replace(job, lora=adapters.LoRA(_RANK, 2 * _RANK))
        yield f"{also}lora=LoRA({_RANK}) (adapters of a frozen base)", lora
        yield f"{also}lora=LoRA({_RANK}) base='nf4' (QLoRA)", dataclasses.replace(lora, base="nf4")
    elif job.base != "nf4":
        yield f"{also}base='nf4'", dataclasses.replace(job, base="nf4")
