"""Schedules of the learning rate, from step to rate; and batches that grow during a run, in rows or in their length."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlib._utils.arguments import check_choice
from maxlib.observability import collect_metrics
from maxlib.training._prefetch import Follows, as_loader
from maxlib.training.losses import Batch


def warmup_cosine(peak: float, steps: int, *, warmup: int, end_fraction: float = 0.1) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, then a half cosine down to `end_fraction * peak` at `steps`.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        end_fraction: Last learning rate, as a fraction of `peak`.

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    decay = steps - warmup
    return warmup_stable_decay(peak, steps, warmup=warmup, decay=decay, end_fraction=end_fraction, shape="cosine")


def warmup_linear(peak: float, steps: int, *, warmup: int, end_fraction: float = 0.0) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, then a linear decay to `end_fraction * peak` at `steps`.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        end_fraction: Last learning rate, as a fraction of `peak`.

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    return warmup_stable_decay(peak, steps, warmup=warmup, decay=steps - warmup, end_fraction=end_fraction)


def warmup_stable_decay(
    peak: float,
    steps: int,
    *,
    warmup: int,
    decay: int,
    end_fraction: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> optax.Schedule:
    """Returns a schedule with a linear warm-up, a plateau, and a decay to `end_fraction * peak`
    (WSD, arXiv:2404.06395).

    A run may be extended from any checkpoint of its plateau.

    Args:
        peak: Largest learning rate.
        steps: Number of steps of the run.
        warmup: Number of steps of the warm-up.
        decay: Number of steps of the decay at the end.
        end_fraction: Last learning rate, as a fraction of `peak`.
        shape: Shape of the decay: "linear", "cosine" (half a cosine), or "sqrt", `1 - √progress` (arXiv:2405.18392).

    Raises:
        ValueError: when the parts do not fit into `steps`.
    """
    if warmup < 0 or decay < 1 or warmup + decay > steps:
        raise ValueError(
            f"a schedule needs warmup >= 0, a decay of at least one step, and both within its steps; "
            f"got steps={steps}, warmup={warmup}, decay={decay}"
        )
    check_choice("shape", shape, ("linear", "cosine", "sqrt"))
    begin, rising = float(steps - decay), float(warmup)  # too large for an integer of 32 bits, if they are tokens

    def schedule(step: Any) -> Any:
        progress = jnp.clip((step - begin) / float(decay), 0.0, 1.0)
        left = {
            "linear": 1 - progress,
            "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "sqrt": 1 - jnp.sqrt(progress),
        }[shape]
        rise = jnp.minimum(1.0, (step + 1) / (rising + 1))
        return peak * jnp.where(step < rising, rise, end_fraction + (1 - end_fraction) * left)

    return schedule


def by_tokens(schedule: optax.Schedule, tokens_per_step: int | Callable[[Any], Any]) -> optax.Schedule:
    """Returns a schedule of steps from one whose lengths are in tokens.

        schedule = training.warmup_stable_decay(3e-4, 100_000_000_000, warmup=1_000_000_000, decay=20_000_000_000)
        optimizer = training.adamw(training.by_tokens(schedule, tokens_per_step=4_000_000))

    Args:
        schedule: Maps a number of tokens, those before a step, to a rate.
        tokens_per_step: Tokens of a step; or a function from a step to the tokens of all steps before it, such as
            that of `Ramp.tokens_before`.
    """

    def by_steps(step: Any) -> Any:
        return schedule(tokens_per_step(step) if callable(tokens_per_step) else step * float(tokens_per_step))

    return by_steps


class Ramp:
    """Loader whose batches grow during a run: from fewer rows to more, or from short rows to long ones.

        ramp = training.Ramp(loader, batches={0: 1, 5000: 2, 20000: 4})  # joins 1, then 2, then 4 batches
        ramp = training.Ramp(loader, pieces={0: 4, 5000: 2, 20000: 1})  # cuts rows into 4, then 2, then none

    Each size is compiled once. A cut row continues with the same positions, and attends to its own piece alone.

    Args:
        loader: As for a `Trainer`.
        batches: How many of the loader's batches make one, from a step on.
        pieces: Into how many rows of equal length a row is cut, from a step on.

    Raises:
        ValueError: when a ramp does not begin at step 0, or has a number below 1; when a batch is read, for rows that
            cannot be cut into so many pieces.
    """

    def __init__(
        self, loader: Any, *, batches: Mapping[int, int] | None = None, pieces: Mapping[int, int] | None = None
    ):
        self.loader = as_loader(loader, "loader")
        self._batches, self._pieces = (
            {0: 1} if ramp is None else dict(sorted(ramp.items())) for ramp in (batches, pieces)
        )
        for ramp in (self._batches, self._pieces):
            if 0 not in ramp or min(ramp) < 0 or min(ramp.values()) < 1:
                raise ValueError(f"a ramp must begin at step 0 and have numbers of at least 1, got {ramp}")
        self._step = 0

    def __iter__(self) -> "Ramp":
        return self

    def __next__(self) -> Batch:
        parts = [next(self.loader) for _ in range(_at(self._batches, self._step))]
        pieces = _at(self._pieces, self._step)
        self._step += 1
        return jax.tree.map(lambda *rows: _cut(np.concatenate(rows), pieces), *parts)

    def follow(self, sharding: Any) -> None:
        if isinstance(self.loader, Follows):
            self.loader.follow(sharding)

    def metrics(self) -> dict[str, Any]:
        return dict(collect_metrics(self.loader))

    def reset(self) -> None:
        self.loader.reset()
        self._step = 0

    def get_state(self) -> dict[str, Any]:
        # Beside the loader's shards, as a checkpoint joins the states of all hosts by the names of shards.
        return self.loader.get_state() | {"ramp": self._step}

    def set_state(self, state: Any) -> None:
        self.loader.set_state({shard: x for shard, x in state.items() if shard != "ramp"})
        self._step = state["ramp"]

    def tokens_before(self, tokens_per_batch: int) -> Callable[[Any], Any]:
        """Returns a function from a step to the number of tokens before it, for `by_tokens`.

        Args:
            tokens_per_batch: Tokens of one of the loader's batches, of all processes.
        """
        starts = np.array(list(self._batches))
        lengths = np.append(np.diff(starts), np.inf)
        sizes = tokens_per_batch * np.array(list(self._batches.values()), np.float32)

        def tokens(step: Any) -> Any:
            return jnp.sum(sizes * jnp.clip(step - starts, 0, lengths))

        return tokens


def _at(ramp: Mapping[int, int], step: int) -> int:
    """Returns the number that holds at a step."""
    return next(number for start, number in reversed(list(ramp.items())) if start <= step)


def _cut(x: np.ndarray, pieces: int) -> np.ndarray:
    """Cuts rows `B T` into `B * pieces` rows of equal length."""
    if pieces == 1:
        return x
    if x.ndim != 2 or x.shape[1] % pieces:
        raise ValueError(f"rows of shape {x.shape[1:]} cannot be cut into {pieces} pieces of equal length")
    return x.reshape(len(x) * pieces, -1)
