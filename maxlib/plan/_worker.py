"""The process that compiles one job: `python -m maxlib.plan._worker DUMP PARENT < job.json`, a JSON object per line of
news. PARENT is the number of the process that started it.

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
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AbstractMesh

from maxlib.ops.trip_counts import attention_trips, grouped_matmul_trips
from maxlib.plan._job import MARK, Job, from_json
from maxlib.plan._memory import estimate_memory
from maxlib.plan._program import Program, bytes_on_device, bytes_on_host, make_program, mesh_of_places
from maxlib.plan._roofline import link_speeds
from maxlib.plan._targets import Target, parse_target
from maxlib.sharding import ExpertParallel


def describe(job: Job) -> tuple[Program, dict[str, Any]]:
    """Returns the program of a job, and the facts that are known without lowering it.

    Args:
        job: The training step and its target.
    """
    target = parse_target(job.target)
    program = make_program(job)
    state = program.state
    news = {
        "mesh": dict(program.mesh.shape),
        "links": link_speeds(_mesh_with_places(program, target), target),
        "rows": program.rows,
        "parameters": sum(math.prod(matrix.shape) for matrix in program.matrices.values()),
        "bytes": {
            "parameters": bytes_on_device((state.trainable, state.rest)),
            "optimizer": bytes_on_device((state.opt_state, state.step, state.key)),
            "batch": bytes_on_device(program.batch),
            "host": bytes_on_host(state),
        },
        "analytic": dataclasses.asdict(estimate_memory(program)),
        "model_flops": program.model_flops,
    }
    return program, news


def _mesh_with_places(program: Program, target: Target) -> Any:
    abstract = isinstance(program.mesh, AbstractMesh) and target.platform == "tpu"
    return mesh_of_places(program.job) if abstract else program.mesh


def compile_job(job: Job, dump: Path, tell: Any) -> None:
    """Compiles a job.

    Args:
        job: The training step and its target.
        dump: Folder for the compiler's files, which include the optimized program.
        tell: Called with the name of each finished stage and its results.
    """
    program, news = describe(job)
    tell("described", **news)
    begin = time.perf_counter()
    lowered = program.lower()
    tell("lowered", seconds=time.perf_counter() - begin, trips=_trips(program, lowered.as_text()))
    begin = time.perf_counter()
    dumps = {} if parse_target(job.target).platform == "cpu" else {"xla_dump_to": str(dump)}
    compiled = lowered.compile(compiler_options=_options(job) | dumps)
    seconds = time.perf_counter() - begin
    if not dumps:
        (dump / "text").write_text(compiled.as_text() or "")
    sizes: Any = compiled.memory_analysis()
    tell(
        "compiled",
        seconds=seconds,
        arguments=sizes.argument_size_in_bytes,
        temporaries=sizes.temp_size_in_bytes,
        code=sizes.generated_code_size_in_bytes,
        # The compiler adds up both memories.
        peak=0 if (host := _host(sizes)) else getattr(sizes, "peak_memory_in_bytes", 0),
        host=host,
    )


def _trips(program: Program, text: str) -> dict[str, float]:
    room = ExpertParallel.room if program.layout.axis_size("act_expert") > 1 else 1
    platform = parse_target(program.job.target).platform.replace("cuda", "gpu")
    return {"attention": attention_trips(text, platform), "room": room} | grouped_matmul_trips(text, room)


def _options(job: Job) -> dict[str, Any]:
    """Returns compiler options; without a GPU, its compiler must not tune by timing."""
    absent = {"xla_gpu_autotune_level": 0} if parse_target(job.target).platform == "cuda" else {}
    return absent | dict(job.options)


def _host(sizes: Any) -> int:
    return sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes


def end_with(parent: int) -> None:
    """Ends this process as soon as the one that started it is gone; the compiler would run on for minutes."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    threading.Thread(target=end_with, args=(int(sys.argv[2]),), daemon=True).start()

    def tell(stage: str, **news: Any) -> None:
        print(MARK + json.dumps({"stage": stage} | news), flush=True)

    try:
        compile_job(from_json(sys.stdin.read()), Path(sys.argv[1]), tell)
    except Exception as error:
        tell("failed", kind=type(error).__name__, message=str(error), trace=traceback.format_exc())


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
