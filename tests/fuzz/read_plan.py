"""The arguments of `maxlib plan`, up to tracing the model."""

import contextlib
import io
from pathlib import Path

from maxlib._command import parser
from maxlib._command.plan import _job
from maxlib.plan import _program as program
from maxlib.plan import parse_target
from maxlib.plan._job import check_names
from tests.fuzz.run import Target

COMMANDS = [
    "llama3-8b --target h100x16 --sequence 4096 --mesh fsdp=-1,tensor=2 --dcn data=2 --strategy fsdp_tp --remat full",
    "llama3-70b --target v5p-128 --per-device-batch-size 0.5 --mesh fsdp=8 context=8 --strategy fsdp+cp_ring",
    "llama3-70b --target v5e-256x2 --dcn data=-1 --flags tpu-overlap --microbatches 2 --attention splash",
    "mixtral-8x7b --target h200x32 --strategy ep+pp_1f1b:8x2 --mesh stage=4,expert=8",
    "llama3-8b --target h100x8 --lora rank=16,alpha=32,dora --base nf4 --remat q,k,v=offload --optimizer sgd",
    "llama3-8b --target cpu --loss maxlib.training:NextToken --batch a.b:c --search --compile 2",
]


def make(directory: Path) -> None:
    for i, line in enumerate(COMMANDS):
        (directory / str(i)).mkdir()
        (directory / str(i) / "command").write_text(line)


def read(directory: Path) -> None:
    words = (directory / "command").read_bytes().decode(errors="replace").split()
    status = 0
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            args = parser("plan").parse_args(["plan", *words])
    except SystemExit as error:
        args, status = None, error.code
    assert status in (0, 2), status  # 0 for --help
    if args is None:
        return
    job = _job(args)
    check_names(job)
    if parse_target(job.target).platform == "cuda":
        program._rows(job, program._layout(job))


KINDS = {f"{i}/command": "arguments" for i in range(len(COMMANDS))}
TARGET = Target(make, read, KINDS, errors=(ValueError, ImportError), names_file=False, alone=True)
