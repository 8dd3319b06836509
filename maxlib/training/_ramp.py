"""Batches that grow during a run, in rows or in the length of rows."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlib.observability import collect_metrics
from maxlib.training._prefetch import Follows, as_loader
from maxlib.training.losses import Batch


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
        return {"loader": self.loader.get_state(), "step": self._step}

    def set_state(self, state: Any) -> None:
        self.loader.set_state(state["loader"])
        self._step = state["step"]

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
