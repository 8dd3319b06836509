"""MaxText's own ahead-of-time compile of a training step, beside which maxlib's is measured.

    python -m tests.benchmarks._maxtext FOLDER PARENT SETTING=VALUE ...

writes the compiler's files into FOLDER, named as those of `maxlib.plan`, until buffers are assigned. PARENT is the
number of the process that started it; a process can describe one topology only. The settings are MaxText's.
"""

import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from maxlib.distributed.xla_flags import WITHOUT_TPU
from maxlib.plan._hlo import read_costs
from maxlib.plan._run import _ASSIGNED, _PROGRAM, _assigned, _needed
from maxlib.plan._worker import _end_early

GIB = 2**30
SETTINGS = [
    "run_name=plan",
    f"base_output_directory={tempfile.gettempdir()}",
    "jax_cache_dir=",
    "log_config=False",
    "override_model_config=True",
    "enable_checkpointing=False",
    "dataset_type=synthetic",
    "compile_topology_num_slices=1",
    # As in maxlib's step: a flash kernel, float32 parameters and moments, full remat, AdamW without clipping.
    "attention=flash",
    "weight_dtype=float32",
    "dtype=bfloat16",
    "remat_policy=full",
    "opt_type=adamw",
    "gradient_clipping_threshold=0",
    "enable_dropout=False",
    "per_device_batch_size=1",
]


@dataclasses.dataclass(frozen=True)
class Peer:
    """The peer's step: its peak in GiB, None where it does not fit; how many collectives are written in its program,
    and the GiB that they move in a step, read by `maxlib.plan` as its own, None where its program was not read.
    """

    peak: float | None
    written: int | None = None
    moved: float | None = None


def compiled(target: str, sequence: int, mesh: dict[str, int], settings: list[str]) -> Peer:
    """Compiles MaxText's step, one sequence a chip.

    Args:
        target: The slice, by the name that both libraries have for it.
        sequence: Tokens of a sequence.
        mesh: Degrees of the mesh.
        settings: MaxText's settings besides `SETTINGS`, which they may not repeat.

    Raises:
        RuntimeError: with the last words of MaxText, if it did not compile.
    """
    sizes = [f"compile_topology={target}", f"max_target_length={sequence}"]
    degrees = [f"ici_{axis}_parallelism={degree}" for axis, degree in mesh.items()]
    environment = WITHOUT_TPU | dict(os.environ) | {"JAX_PLATFORMS": "cpu", "DECOUPLE_GCLOUD": "TRUE"}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # a program from there writes no files
    with tempfile.TemporaryDirectory(prefix="maxtext-plan-") as temporary:
        folder = Path(temporary)
        command = [sys.executable, "-m", "tests.benchmarks._maxtext", temporary, str(os.getpid())]
        words = [*command, *SETTINGS, *sizes, *degrees, *settings]
        done = subprocess.run(words, env=environment, capture_output=True, text=True)
        arguments, temporaries, _ = _assigned(folder)
        if not arguments and _needed(done.stderr, 0.0):
            print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
            return Peer(None)
        if not arguments:
            raise RuntimeError(f"MaxText ended with code {done.returncode}, and said at last:\n{done.stderr[-4000:]}")
        costs = read_costs(next(folder.glob(_PROGRAM)).read_text(), mesh)
        written, moved = sum(c.written for c in costs.collectives), sum(c.bytes for c in costs.collectives)
        return Peer((arguments + temporaries) / GIB, written, moved / GIB)


def main() -> None:
    folder, parent, words = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    threading.Thread(target=_end_early, args=(parent, folder, _ASSIGNED["tpu"]), daemon=True).start()
    from maxtext.trainers.pre_train import train_compile

    jit_and_compile = train_compile.jit_and_compile

    def compile_step(function, *args, **options):
        function.__name__ = "step"  # names the compiler's files
        jit_and_compile(function, *args, **options)

    train_compile.jit_and_compile = compile_step
    train_compile.max_utils.parse_libtpu_flags_to_dict = lambda _: {"xla_dump_to": str(folder)}
    train_compile.main(["", str(Path(train_compile.__file__).parents[2] / "configs" / "base.yml"), *words])


if __name__ == "__main__":
    main()
