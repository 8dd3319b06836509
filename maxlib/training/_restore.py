"""Restoring the state at the start of a run, and saving it."""

import dataclasses
import difflib
import hashlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlib import checkpoint, distributed, nn, sharding
from maxlib.training._optimizer_wrappers import holds_parameters
from maxlib.training._state import TrainState


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """Where a run starts from: a description for the log, its position in the data, and the metrics saved with it."""

    text: str
    data_state: Any = None
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)


def initial_state(
    state: TrainState,
    make: Callable[[], TrainState],
    checkpointer: checkpoint.Checkpointer | checkpoint.Tiers | None,
    resume_from: str | Path | None,
    params_from: str | Path | None,
    *,
    restart: Callable[[TrainState], TrainState],
    layout: sharding.Layout | None,
) -> tuple[TrainState, ResumePoint]:
    """Returns the initial state, as `Trainer.restore` describes.

    A resumed state has the structure and shardings of `state`, whose arrays are deleted first to free their memory.

    Args:
        state: The state, or its shapes and shardings (`abstract_state`).
        make: Returns the state in arrays; called only where its values are needed.
        checkpointer: As in `Trainer`.
        resume_from: As in `Trainer.restore`.
        params_from: As in `Trainer.restore`.
        restart: Returns a state with a new optimizer state.
        layout: As in `Trainer`.
    """
    base = None if checkpointer is None else checkpointer.base
    leaves = jax.tree.leaves(state.rest, is_leaf=lambda x: isinstance(x, nnx.Variable))
    if base is not None or not all(isinstance(leaf, nnx.Variable) for leaf in leaves):
        state = make()  # frozen weights are compared with the base; checkpoints have no arrays outside of variables
    if checkpointer is not None:
        checkpointer.groupings = checkpointer.groupings or nn.tree.groupings(state.rest)
        if any(step is not None for step in distributed.allgather_json(checkpointer.latest())):
            restored = _read(lambda like: checkpointer.restore(like=like), state, base, checkpointer.directory)
            return _resumed(state, restored, f"this run's own checkpoint in {checkpointer.directory}")
    groupings = nn.tree.groupings(state.rest)
    if resume_from is not None:
        restored = _read(lambda like: checkpoint.load(resume_from, like, groupings=groupings), state, base, resume_from)
        return _resumed(state, restored, f"the checkpoint in {resume_from}")
    state = make()
    if params_from is not None:
        return _with_parameters(state, Path(params_from), groupings, restart=restart, layout=layout)
    if step := int(state.step):
        return state, ResumePoint(f"nothing to restore, the state of step {step} stays")
    return state, ResumePoint(f"a new run, {nn.num_parameters(state.trainable):,} trained parameters")


def _with_parameters(
    state: TrainState,
    directory: Path,
    groupings: Any,
    *,
    restart: Callable[[TrainState], TrainState],
    layout: sharding.Layout | None,
) -> tuple[TrainState, ResumePoint]:
    """Returns the state with the model in `directory`; before the first step, with a new optimizer state too."""
    step = int(state.step)
    if step and holds_parameters(state.opt_state):
        raise ValueError(
            f"at step {step} the optimizer holds averages or copies of the parameters that params_from would replace: "
            "restore before the first step"
        )
    values = _model_values(state, directory, groupings, layout)
    trainable = {path: values.pop(path) for path in state.trainable}
    new = dataclasses.replace(state, trainable=trainable, rest=nn.combine(values, state.rest))
    if step:
        return new, ResumePoint(f"parameters from {directory}, step {step} with this run's optimizer state")
    # The optimizer state may contain the old parameters, as averages do.
    jax.tree.map(lambda x: x.delete(), state.opt_state)
    return restart(new), ResumePoint(f"parameters from {directory}, step 0")


def save(
    checkpointer: checkpoint.Checkpointer | checkpoint.Tiers,
    state: TrainState,
    step: int,
    data_state: Any,
    metrics: dict[str, float],
    *,
    base: dict[str, str] | None = None,
) -> None:
    """Starts saving the items that `initial_state` restores, without frozen weights if `base` records them."""
    checkpointer.groupings = checkpointer.groupings or nn.tree.groupings(state.rest)
    meta = {"key": jax.random.key_data(state.key).tolist(), "key_impl": str(jax.random.key_impl(state.key))}
    meta["model"] = config_text(state.rest)
    meta |= {} if base is None else {"base": base}
    checkpointer.save(step, items_of(state, base), data=data_state, meta=meta, metrics=metrics, overwrite=False)


def items_of(state: TrainState, base: Any = None) -> dict[str, Any]:
    """Returns the items of a checkpoint of `state`: trained parameters, optimizer state, and the frozen rest.

    With a base, frozen weights are omitted, but not other values that a step may change (router biases, counters).
    """
    frozen = {path: v for path, v in nn.variables(state.rest).items() if path not in state.trainable}
    kept = {path: v.get_value() for path, v in frozen.items() if base is None or not _is_weight(v)}
    return {"params": state.trainable, "opt": state.opt_state, "rest": kept}


def record_of(state: TrainState, base: str | Path) -> dict[str, str]:
    """Returns a checkpoint's record of the base of `state`: its directory, and a checksum of its frozen weights."""
    frozen = {path: v for path, v in nn.variables(state.rest).items() if path not in state.trainable and _is_weight(v)}
    sums = checkpoint.checksums({path: v.get_value() for path, v in sorted(frozen.items())})
    text = "\n".join(f"{path} {checksum}" for path, checksum in sums.items())
    return {"directory": str(base), "checksum": hashlib.sha256(text.encode()).hexdigest()[:32]}


def _is_weight(variable: nnx.Variable) -> bool:
    """Returns True for parameters, and for the arrays of quantized weights and frozen adapters."""
    return type(variable) is nnx.Param or (type(variable) is nnx.Variable and variable.get_value().ndim > 1)


def _read(read: Callable[[Any], dict[str, Any]], state: TrainState, base: Any, where: Any) -> dict[str, Any]:
    """Reads a checkpoint for `state`; raises ValueError unless both have the same base."""
    known = None if base is None else record_of(state, base)
    try:
        restored = read(_make_room(state, base))
    except ValueError as error:
        error.add_note("A run with Checkpointer(base=...) saves no frozen weights: pass the same base to continue it.")
        raise
    saved = restored["meta"].get("base")
    if known is not None and saved is not None and known["checksum"] != saved["checksum"]:
        raise _other_base(where, saved, known)
    return restored


def _other_base(where: Any, saved: dict[str, str], here: dict[str, str]) -> ValueError:
    return ValueError(
        f"{where} was trained on the base in {saved['directory']} (checksum {saved['checksum']}), but this model's "
        f"frozen weights differ ({here['checksum']}): build the model from that base, with the same dtype, quantization "
        "and grouping of stacks"
    )


def _make_room(state: TrainState, base: Any) -> dict[str, Any]:
    """Returns shapes and shardings to restore into, and deletes the arrays of `state` to free their memory."""
    items = items_of(state, base)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), items)
    for x in jax.tree.leaves(items):
        if isinstance(x, jax.Array):
            x.delete()
    return like


def _resumed(state: TrainState, restored: dict[str, Any], where: str) -> tuple[TrainState, ResumePoint]:
    meta = restored["meta"]
    step, key_data = meta["step"], jnp.asarray(np.array(meta["key"], np.uint32))
    _warn_of_changes(meta.get("model"), config_text(state.rest), where)
    key = jax.random.wrap_key_data(key_data, impl=meta.get("key_impl"))

    def place(new: Any, old: Any) -> Any:
        return jax.device_put(new, old.sharding)

    new = TrainState(
        trainable=restored["params"],
        rest=nn.combine(restored["rest"], state.rest),
        opt_state=restored["opt"],
        step=place(jnp.asarray(step, jnp.int32), state.step),
        key=place(key, state.key),
    )
    return new, ResumePoint(f"resumed after step {step}, from {where}", restored["data"], meta.get("metrics", {}))


def config_text(model: Any) -> str:
    """Returns a model's config as text, "None" if it has none; functions without their addresses, which change."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(getattr(model, "cfg", None)))


def _warn_of_changes(saved: str | None, here: str, where: str) -> None:
    """Warns if a model's config differs from the checkpoint's: a different rotary base, window or epsilon does not
    change shapes.
    """
    if saved in (None, "None", here) or here == "None":
        return

    def fields(text: str) -> list[str]:
        # One line for each field, nested ones too:
        # "Config(vocab=61, rope=Rope(dim=12" -> "vocab=61", "rope=Rope(dim=12"
        return re.split(r", (?=\w+=)|(?<=Config)\(", text)

    changed = [line for line in difflib.ndiff(fields(saved), fields(here)) if line[0] in "-+"]
    if changed:
        listed = "\n".join(["", *changed])
        warnings.warn(
            f"the model's configuration differs from when {where} was saved (-, now +):{listed}\nIf that is not intended, "
            "build the model as before (weights.read_model gives the configuration of a Hugging Face directory)",
            stacklevel=2,
        )


def _model_values(state: TrainState, directory: Path, groupings: Any, layout: sharding.Layout | None) -> dict[str, Any]:
    """Reads all of the model, trained and frozen, from a Hugging Face directory or a checkpoint."""
    wanted = {path: v.get_value() for path, v in nn.variables(state.model).items()}
    if not (directory / "config.json").exists():
        return _from_checkpoint(state, wanted, directory, groupings)
    from maxlib import weights

    model = weights.from_pretrained(directory, layout=layout, dtype=jnp.float32)
    parameters = {path: v.get_value() for path, v in nn.variables(model).items()}
    wrong = [
        f"{path}: {want.shape} here, {parameters[path].shape if path in parameters else 'absent'} there"
        for path, want in wanted.items()
        if path not in parameters or parameters[path].shape != want.shape
    ]
    if wrong:
        raise ValueError(
            f"{directory} has a different model than the one being trained: {'; '.join(wrong[:10])}. "
            "Build the model of that directory (weights.read_model gives its configuration)"
        )
    _warn_of_changes(config_text(model), config_text(state.rest), str(directory))
    return {path: parameters[path].astype(want.dtype) for path, want in wanted.items()}


def _from_checkpoint(state: TrainState, wanted: dict[str, Any], directory: Path, groupings: Any) -> dict[str, Any]:
    """Reads a checkpoint's items `params` and `rest`; a path may be in either."""
    stored = checkpoint.read_records(directory)
    _warn_of_changes(stored.meta.get("model"), config_text(state.rest), str(directory))
    if "base" in stored.meta:  # frozen weights were not saved: the current ones must be the same
        saved = stored.meta["base"]
        if (here := record_of(state, saved["directory"]))["checksum"] != saved["checksum"]:
            raise _other_base(directory, saved, here)
        frozen = {path for path, v in nn.variables(state.rest).items() if _is_weight(v)} - state.trainable.keys()
        wanted = {path: value for path, value in wanted.items() if path not in frozen}

    # Paths of single layers, because the checkpoint may group its stacks in another way.
    def layers_of(paths: Iterable[str], groupings: Any) -> set[str]:
        return {layer for path in paths for layer, _ in checkpoint.layer_paths(path, groupings)}

    params, rest = (layers_of(stored.items.get(item, ()), stored.meta["layouts"]) for item in ("params", "rest"))
    like: dict[str, dict[str, Any]] = {"params": {}, "rest": {}}
    for path, value in wanted.items():
        layers = layers_of([path], groupings)
        is_param = bool(layers & params) or (path in state.trainable and not layers & rest)
        like["params" if is_param else "rest"][path] = value
    read = checkpoint.load(directory, {k: v for k, v in like.items() if v}, groupings=groupings, cast=True)
    return read.get("params", {}) | read.get("rest", {})
