"""Dumps a training step as JAX's and XLA's intermediate representations."""

from pathlib import Path
from typing import Any

import jax


def dump_program(step: Any, *args: Any, directory: str | Path, name: str = "step") -> dict[str, Path]:
    """Writes the jaxpr of the jitted `step(*args)`, its StableHLO, the compiled HLO, and its memory and FLOPs.

    args: arrays or `jax.ShapeDtypeStruct`s; nothing runs. Call it inside `sharding.use` if the step runs there.
    Compiles once more, unless JAX's persistent compilation cache has it. Returns the files by kind.
    """
    traced = step.trace(*args)
    lowered = traced.lower()
    compiled = lowered.compile()
    texts = {
        "jaxpr": str(traced.jaxpr),
        "stablehlo": lowered.as_text(),
        "hlo": compiled.as_text(),
        "memory": _memory(compiled),
    }
    Path(directory).mkdir(parents=True, exist_ok=True)
    files = {kind: Path(directory) / f"{name}.{kind}.txt" for kind in texts}
    for kind, text in texts.items() if jax.process_index() == 0 else ():
        files[kind].write_text(text or "this backend does not say\n")
    return files


class DumpProgram:
    """Callback that runs `dump_program` once for a Trainer's step: `callbacks=[(1, DumpProgram("run/program"))]`."""

    def __init__(self, directory: str | Path):
        self._directory, self.files = directory, {}

    def __call__(self, trainer: Any) -> None:
        if not self.files:
            with trainer.sharded():
                self.files = dump_program(trainer.train_step, trainer.state, trainer.batch, directory=self._directory)


def _memory(compiled: Any) -> str:
    """Formats one device's bytes by purpose."""
    analysis, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    kinds = ("argument", "output", "alias", "temp", "generated_code")
    lines = [] if analysis is None else [f"{k:16}{getattr(analysis, f'{k}_size_in_bytes'):>18,} bytes" for k in kinds]
    lines += [f"{k:16}{cost[k]:>18,.0f}" for k in ("flops", "bytes accessed") if k in cost]
    return "\n".join(lines) + "\n"
