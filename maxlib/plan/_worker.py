"""The process that compiles one job: `python -m maxlib.plan._worker FOLDER PARENT ENOUGH < job.json`.

FOLDER is that of the compiler's files, to which it adds its own results. PARENT is the number of the process that
started it. ENOUGH is a pattern: once a file has such a name, nothing more is needed; "" compiles to the end.

Run by `maxlib.plan._run`; a process can describe one topology only.
"""

import dataclasses
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from maxlib._utils.files import write_atomically
from maxlib.ops.trip_counts import attention_trips, grouped_matmul_trips
from maxlib.plan._job import Job, from_json
from maxlib.plan._memory import estimate_memory
from maxlib.plan._program import Program, bytes_on_host, make_program, mesh_of
from maxlib.plan._roofline import link_speeds
from maxlib.plan._targets import parse_target
from maxlib.sharding import ExpertParallel

RESULTS = "maxlib.json"  # the results of each finished stage


def describe(job: Job) -> tuple[Program, dict[str, Any]]:
    """Returns the program of a job, and the facts that are known without lowering it.

    Args:
        job: The training step and its target.
    """
    program = make_program(job)
    facts = {
        "mesh": dict(program.mesh.shape),
        "links": link_speeds(mesh_of(job), parse_target(job.target)),
        "rows": program.rows,
        "parameters": sum(math.prod(matrix.shape) for matrix in program.matrices.values()),
        "host": bytes_on_host(program.state),
        "analytic": dataclasses.asdict(estimate_memory(program)),
        "model_flops": program.model_flops,
    }
    return program, facts


def compile_job(job: Job, folder: Path, tell: Callable[..., None]) -> None:
    """Compiles a job.

    Args:
        job: The training step and its target.
        folder: Folder for the compiler's files, which include the optimized program.
        tell: Called with the name of each finished stage and its results.
    """
    program, facts = describe(job)
    tell("described", **facts)
    begin = time.time()
    lowered = program.lower()
    trips = _trips(program, lowered.as_text())
    tell("lowered", seconds=time.time() - begin, at=time.time(), trips=trips)
    begin = time.time()
    on_cpu = parse_target(job.target).platform == "cpu"
    compiled = lowered.compile(compiler_options=_options(job) | ({} if on_cpu else {"xla_dump_to": str(folder)}))
    seconds = time.time() - begin
    if on_cpu:
        (folder / "text").write_text(compiled.as_text() or "")
    sizes: Any = compiled.memory_analysis()
    host = sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes
    tell(
        "compiled",
        seconds=seconds,
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        # The compiler adds up both memories.
        peak=0 if host else getattr(sizes, "peak_memory_in_bytes", 0),
        host=host,
    )


def _trips(program: Program, text: str) -> dict[str, float]:
    layout, platform = program.layout, parse_target(program.job.target).platform.replace("cuda", "gpu")
    ragged = (layout.experts or ExpertParallel()).is_ragged(platform, pipelined=layout.pipeline is not None)
    sent = layout.axis_size("act_expert") > 1
    # The exchange's first buffers, which are enough for about equal shares.
    room = 1 if not sent else ExpertParallel.even if ragged else ExpertParallel.room
    return {"attention": attention_trips(text, platform), "room": room} | grouped_matmul_trips(text, room)


def _options(job: Job) -> dict[str, Any]:
    """Returns compiler options; without a GPU, its compiler must not tune by timing."""
    absent = {"xla_gpu_autotune_level": 0} if parse_target(job.target).platform == "cuda" else {}
    return absent | dict(job.options)


def _end_early(parent: int, folder: Path, enough: str) -> None:
    """Ends this process when there is `enough`, or the one that started it is gone: it would run on for minutes."""
    while os.getppid() == parent and not (enough and any(folder.glob(enough))):
        time.sleep(0.2)
    time.sleep(1)  # the last files of that moment
    os._exit(0)


def main() -> None:
    folder, parent, enough = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    threading.Thread(target=_end_early, args=(parent, folder, enough), daemon=True).start()
    stages: dict[str, dict[str, Any]] = {}

    def tell(stage: str, **results: Any) -> None:
        stages[stage] = results
        write_atomically(folder / RESULTS, json.dumps(stages))

    try:
        compile_job(from_json(sys.stdin.read()), folder, tell)
    except Exception as error:
        tell("failed", kind=type(error).__name__, message=str(error), trace=traceback.format_exc())


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
