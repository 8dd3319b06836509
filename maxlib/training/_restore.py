"""The state that a run begins with, and the state that it saves for the next one."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib import checkpoint, distributed, nn, sharding
from maxlib.training._step import TrainState


@dataclasses.dataclass(frozen=True)
class Origin:
    """Origin of a state: a description for the log, its position in the data, and the metrics saved with it."""

    text: str
    data_state: Any = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def initial_state(
    state: TrainState,
    checkpointer: checkpoint.Checkpointer | checkpoint.Tiers | None,
    resume_from: str | Path | None,
    params_from: str | Path | None,
    *,
    layout: sharding.Layout | None,
) -> tuple[TrainState, Origin]:
    """Returns the state to begin with, as `Trainer.restore` describes.

    A resumed state has the structure and the shardings of `state`, whose arrays are deleted first to free their memory.
    """
    if checkpointer is not None:
        checkpointer.layouts = checkpointer.layouts or checkpoint.layouts(state.rest)
        if any(step is not None for step in distributed.allgather_json(checkpointer.latest())):
            restored = checkpointer.restore(like=_make_room(state))
            return _resumed(state, restored, f"this run's own checkpoint in {checkpointer.directory}")
    layouts = checkpoint.layouts(state.rest)
    if resume_from is not None:
        restored = checkpoint.load(resume_from, _make_room(state), layouts=layouts)
        return _resumed(state, restored, f"the checkpoint in {resume_from}")
    if params_from is not None:
        params = _parameters(state, Path(params_from), layouts, layout)
        return dataclasses.replace(state, trainable=params), Origin(f"parameters from {params_from}, step 0")
    return state, Origin(f"a fresh start, {nn.num_parameters(state.trainable):,} trained parameters")


def save(
    checkpointer: checkpoint.Checkpointer | checkpoint.Tiers,
    state: TrainState,
    step: int,
    data_state: Any,
    metrics: dict[str, float],
) -> None:
    """Starts to save everything that `initial_state` restores."""
    checkpointer.layouts = checkpointer.layouts or checkpoint.layouts(state.rest)
    meta = {"key": jax.random.key_data(state.key).tolist(), "model": repr(getattr(state.rest, "cfg", None))}
    checkpointer.save(step, items_of(state), data=data_state, meta=meta, metrics=metrics)


def items_of(state: TrainState) -> dict[str, Any]:
    """Returns the items of a checkpoint of `state`: trained parameters, optimizer state, and the frozen rest."""
    frozen = {path: v.get_value() for path, v in nn.variables(state.rest).items() if path not in state.trainable}
    return {"params": state.trainable, "opt": state.opt_state, "rest": frozen}


def _make_room(state: TrainState) -> dict[str, Any]:
    """Returns shapes and shardings to restore into, and deletes the arrays of `state` to free their memory."""
    items = items_of(state)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items)
    jax.tree.map(lambda x: x.delete(), items)
    return like


def _resumed(state: TrainState, restored: dict[str, Any], where: str) -> tuple[TrainState, Origin]:
    step = restored["meta"]["step"]
    key = jax.random.wrap_key_data(jnp.asarray(np.array(restored["meta"]["key"], np.uint32)))
    place = lambda new, old: jax.device_put(new, old.sharding)
    new = TrainState(
        trainable=restored["params"],
        rest=nn.combine(restored["rest"], state.rest),
        opt_state=restored["opt"],
        step=place(jnp.asarray(step, jnp.int32), state.step),
        key=place(key, state.key),
    )
    return new, Origin(f"step {step} of {where}", restored["data"], restored["meta"].get("metrics", {}))


def _parameters(state: TrainState, directory: Path, layouts: Any, layout: sharding.Layout | None) -> dict[str, Any]:
    """Reads the parameters only, from a Hugging Face directory or a checkpoint."""
    if not (directory / "config.json").exists():
        like = {"params": state.trainable}
        return checkpoint.load(directory, like, layouts=layouts, cast=True)["params"]
    from maxlib import weights

    model = weights.from_pretrained(directory, layout=layout, dtype=jnp.float32)
    params = {path: v.get_value() for path, v in nn.variables(model).items()}
    wrong = [
        f"{path}: {want.shape} here, {params[path].shape if path in params else 'absent'} there"
        for path, want in state.trainable.items()
        if path not in params or params[path].shape != want.shape
    ]
    if wrong:
        raise ValueError(
            f"{directory} holds another model than the one that is trained: {'; '.join(wrong[:10])}. "
            "Build the model of that directory (weights.read_model gives its configuration)"
        )
    return {path: params[path].astype(want.dtype) for path, want in state.trainable.items()}
