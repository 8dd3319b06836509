"""What would make a step fit: estimates of the same job with one thing changed."""

import dataclasses
from collections.abc import Callable, Iterator

from maxlib import adapters, sharding
from maxlib.hardware import GIB
from maxlib.plan._job import Job
from maxlib.sharding._presets import preset_name

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
