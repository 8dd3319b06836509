"""What a run begins with, and what it leaves for the next one."""

import dataclasses
from pathlib import Path
from typing import Any, Protocol

from jax.sharding import Mesh

from maxlib import nn, sharding
from maxlib.training.step import TrainState


class Checkpoints(Protocol):
    """What a trainer asks of a checkpointer; `Checkpointer` is one."""

    every: int

    def save(self, step: int, items: dict[str, Any], *, data_state: Any, meta: dict[str, Any]) -> None: ...
    def latest(self) -> int | None: ...
    def restore(self, step: int | None, *, like: dict[str, Any]) -> dict[str, Any]: ...
    def wait(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a state came from, in words, and where in the data it stands."""

    text: str
    data_state: Any = None


def initial_state(
    state: TrainState,
    checkpointer: Checkpoints | None,
    resume_from: str | Path | None,
    params_from: str | Path | None,
    *,
    mesh: Mesh | None,
    rules: sharding.Rules,
) -> tuple[TrainState, Origin]:
    """See `Trainer.restore`."""
    return state, Origin(f"fresh start, {nn.num_parameters(state.trainable):,} trained parameters")


def save(checkpointer: Checkpoints, state: TrainState, step: int, data_state: Any) -> None:
    raise NotImplementedError
