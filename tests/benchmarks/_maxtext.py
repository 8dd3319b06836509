"""MaxText's own ahead-of-time compile of a training step, beside which maxlib's is measured.

    python -m tests.benchmarks._maxtext FOLDER SETTING=VALUE ...

compiles a step by MaxText's settings, and writes its sizes and its program into FOLDER; a process can describe one
topology only.
"""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from maxlib.distributed.xla_flags import WITHOUT_TPU
from maxlib.plan._hlo import read_costs
from maxlib.plan._run import _needed

GIB = 2**30
SIZES, PROGRAM = "sizes.json", "program.txt"
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
    with tempfile.TemporaryDirectory(prefix="maxtext-plan-") as folder:
        command = [sys.executable, "-m", "tests.benchmarks._maxtext", folder, *SETTINGS, *sizes, *degrees, *settings]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if _needed(done.stderr, 0.0):
            print(done.stderr.strip().splitlines()[-1], file=sys.stderr)
            return Peer(None)
        if done.returncode:
            raise RuntimeError(f"MaxText ended with code {done.returncode}, and said at last:\n{done.stderr[-4000:]}")
        peak = sum(json.loads(Path(folder, SIZES).read_text()))
        costs = read_costs(Path(folder, PROGRAM).read_text(), mesh)
    written, moved = sum(c.written for c in costs.collectives), sum(c.bytes for c in costs.collectives)
    return Peer(peak / GIB, written, moved / GIB)


def main() -> None:
    from maxtext.trainers.pre_train import train_compile

    folder, *words = sys.argv[1:]
    jit_and_compile = train_compile.jit_and_compile

    def compile_step(*args):
        compiled = jit_and_compile(*args)
        sizes = compiled.memory_analysis()
        Path(folder, SIZES).write_text(json.dumps([sizes.argument_size_in_bytes, sizes.temp_size_in_bytes]))
        Path(folder, PROGRAM).write_text(compiled.as_text())
        sys.exit()  # what follows analyses the costs for minutes

    train_compile.jit_and_compile = compile_step
    train_compile.main(["", str(Path(train_compile.__file__).parents[2] / "configs" / "base.yml"), *words])


if __name__ == "__main__":
    main()
