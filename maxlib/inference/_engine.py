"""Engines, which sample completions of prompts locally or on a server."""

import contextlib
import contextvars
import dataclasses
import functools
import threading
from collections.abc import Collection, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Int, Key

from maxlib.inference._sampling import GREEDY, Sampler

FinishReason = Literal["stop", "length"]


@dataclasses.dataclass(frozen=True)
class Completion:
    """A completion of a prompt as token ids, with the data for a policy loss.

    Attributes:
        tokens: Sampled ids, including the one that ended it.
        log_probs: Log-probability of each under the model at the sampler's temperature (1 for greedy), before its
            filters; these are the `old_log_probs` or `sampler_log_probs` of a policy loss.
        finish_reason: "stop" if the last token is one of `stop_token_ids`, "length" if it was truncated.
        sampler: The sampler, if the engine reports it: a policy loss compares its temperature with the sampler's.
        versions: Version of the weights that drew each token, if the engine reports it. It changes where an update
            came between two tokens.
        routes: Experts of each token of prompt and completion but the last, `_ L X`, if the engine records them.
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    sampler: Sampler | None = None
    versions: list[int] | None = dataclasses.field(default=None, compare=False)
    routes: Int[np.ndarray, "_ L X"] | None = dataclasses.field(default=None, compare=False)

    @property
    def version(self) -> int | None:
        """Returns the version of the oldest weights that drew a token."""
        return min(self.versions) if self.versions else None


@runtime_checkable
class Engine(Protocol):
    """Protocol of engines, which sample completions and accept updated weights."""

    def update(self, weights: Any, version: int | None = None) -> None:
        """Replaces the weights. Completions report their version, by default one more than that of the last ones."""
        ...

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | Sequence[int],
        num_samples: int = 1,
        sampler: Sampler = GREEDY,
        stop_token_ids: Collection[int] = (),
        key: Key[Array, ""] | None = None,
    ) -> list[list[Completion]]:
        """Returns `num_samples` completions of each prompt; without `key`, every call uses a new key."""
        ...


class Turns:
    """A lock that is fair to those who wait: without the door a thread that steps would get in first again."""

    def __init__(self):
        self._lock, self._door = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Background:
    """A thread that steps an engine until nothing is left."""

    def __init__(self):
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, engine: Any) -> None:
        """Starts the thread, unless it runs already."""
        with self._lock:
            if self._thread is None:
                run = functools.partial(contextvars.copy_context().run, self._run, engine)
                self._thread = threading.Thread(target=run, name="maxlib-engine", daemon=True)
                self._thread.start()

    def _run(self, engine: Any) -> None:
        while True:
            with contextlib.suppress(Exception):  # its requests raise it
                while engine.step():
                    pass
            with self._lock:
                if engine.is_idle:
                    self._thread = None
                    return
