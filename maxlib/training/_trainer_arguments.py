"""Checks of the Trainer's arguments, before anything is computed."""

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax

from maxlib import nn, sharding
from maxlib.training._evaluation import Evaluation
from maxlib.training._export import Export

# What is given to another part of a run -> where it belongs.
_ELSEWHERE = {
    "learning_rate": "optimizer=training.adamw(learning_rate)",
    "lr": "optimizer=training.adamw(learning_rate)",
    "weight_decay": "optimizer=training.adamw(learning_rate, weight_decay=...)",
    "accumulate": "microbatches",
    "gradient_accumulation_steps": "microbatches",
    "steps": "trainer.fit(steps)",
    "num_steps": "trainer.fit(steps)",
    "batch_size": "the loader",
    "mesh": "layout=sharding.Layout(mesh)",
    "seed": "key=seed",
}


def check_known(unknown: Mapping[str, Any], known: Collection[str]) -> None:
    """Raises TypeError for an argument that the Trainer does not have; `known` are those that it has."""
    for name in sorted(unknown):
        near = difflib.get_close_matches(name, known, 1)
        hint = f": give it as {_ELSEWHERE[name]}" if name in _ELSEWHERE else f"; it takes {', '.join(known)}"
        raise TypeError(f"Trainer takes no argument {name}{f' (did you mean {near[0]}?)' if near else hint}")


def check_layout(layout: Any) -> None:
    """Raises TypeError for what is no layout, and ValueError if several processes would train without one."""
    sharding.check_layout(layout)
    if layout is None and jax.process_count() > 1:
        raise ValueError(
            f"without a layout, each of the {jax.process_count()} processes would train its own model: pass layout=, for "
            "example sharding.Layout(sharding.make_mesh(fsdp=-1))"
        )


def check_arguments(model: Any, loader: Any, evaluation: Any, checkpointer: Any, callbacks: Iterable[Any]) -> None:
    """Raises TypeError for an argument of a wrong type, and ValueError for a loader that is used twice."""
    if not callable(model) and not nn.variables(model):
        raise TypeError(
            f"model must be an nnx.Module, a pytree of them or a function that builds one, got {type(model).__name__}"
        )
    if evaluation is not None and not isinstance(evaluation, Evaluation):
        raise TypeError(f"evaluation must be a training.Evaluation(loader, every=100), got {evaluation!r:.80}")
    if evaluation is not None and _innermost(evaluation.loader) is _innermost(loader):
        raise ValueError(
            "evaluation has the training loader, which each evaluation would reset to its first batch: give "
            "Evaluation a loader of its own, over held-out data"
        )
    if checkpointer is not None and not hasattr(checkpointer, "should_save"):
        raise TypeError(f"checkpointer must be a checkpoint.Checkpointer(directory) or Tiers, got {checkpointer!r}")
    for callback in callbacks:
        if not isinstance(callback, Export) and not _is_callback(callback):
            raise TypeError(
                f"callbacks must be pairs (every, function), such as (1, f), or exports such as HuggingFaceExport, got {callback!r}"
            )


def _innermost(loader: Any) -> Any:
    """Returns the loader inside `Prefetch` and other wrappers."""
    return _innermost(loader.loader) if hasattr(loader, "loader") else loader


def _is_callback(callback: Any) -> bool:
    """Returns True if a value is a pair of a positive number of steps and a function."""
    if not isinstance(callback, tuple) or len(callback) != 2:
        return False
    every, function = callback
    return type(every) is int and every > 0 and callable(function)
