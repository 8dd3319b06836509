"""Environments that answer a model's turns, run in threads or processes with a deadline for each call."""

import collections
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from maxlib._utils.timed_process import TimedProcess, results


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a model continues in its turn.

    Attributes:
        tokens: Token ids of the whole session so far, beginning with those of the turn before if they did not change.
        images: For vision models, the `nn.vision.Patches` of its placeholders, or None.
    """

    tokens: Sequence[int]
    images: Any = None


@runtime_checkable
class Environment(Protocol):
    """Protocol of environments: one task, from its first prompt to a reward."""

    def reset(self) -> Prompt:
        """Returns the prompt of the first turn."""
        ...

    def step(self, tokens: Sequence[int]) -> Prompt | None:
        """Takes what the model sampled in its turn; returns the prompt of the next turn, or None at the end."""
        ...

    def reward(self) -> float | None:
        """Returns the reward of the session so far; None or NaN for "not scored"."""
        ...


@dataclasses.dataclass(frozen=True)
class Answer:
    """Result of a call of an environment: its value, or why there is none.

    Attributes:
        value: What the method returned.
        failure: "timeout" or "crash".
        error: The exception of a crash, in words.
    """

    value: Any = None
    failure: Literal["timeout", "crash"] | None = None
    error: str = ""


class EnvironmentPool(contextlib.AbstractContextManager):
    """Workers that run environments, each call with a deadline.

    A call that exceeds `timeout` or raises ends its environment and no other one, with one exception: a process that is
    killed takes all its environments with it. In processes, `make`, tasks and prompts are pickled, so `make` must be
    importable from a module; a thread that hangs cannot be killed, and is left behind.

    Args:
        make: Takes a task and returns its `Environment`.
        workers: Number of processes or threads.
        timeout: Time limit in seconds of one call.
        in_threads: True for threads, for environments that mostly wait.
    """

    def __init__(
        self, make: Callable[[Any], Environment], *, workers: int = 4, timeout: float = 10.0, in_threads: bool = False
    ):
        if workers < 1 or not timeout > 0:
            raise ValueError(f"workers and timeout must be positive, got {workers} and {timeout}")
        self.timeout, self._added, self._lock = timeout, 0, threading.Lock()
        self._workers = [TimedProcess([_Host(make)], in_thread=in_threads) for _ in range(workers)]

    def reset(self, tasks: Sequence[Any]) -> dict[int, Answer]:
        """Makes an environment for each task; returns their first prompts by their new numbers."""
        with self._lock:
            first, self._added = self._added, self._added + len(tasks)
        return self._call({first + i: ("reset", task) for i, task in enumerate(tasks)})

    def step(self, sampled: Mapping[int, Sequence[int]]) -> dict[int, Answer]:
        """Passes each environment what the model sampled; returns its next prompt, or None."""
        return self._call({number: ("step", tokens) for number, tokens in sampled.items()})

    def reward(self, numbers: Sequence[int]) -> dict[int, Answer]:
        """Returns the rewards of environments, and removes these."""
        return self._call(dict.fromkeys(numbers, ("reward", None)))

    def _call(self, calls: Mapping[int, tuple[str, Any]]) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        queues = [collections.deque() for _ in self._workers]
        for number, call in calls.items():
            queues[number % len(queues)].append((number, 0, (number, *call)))
        with self._lock:  # engines in several threads may share the workers
            for number, answer, failure in results(self._workers, queues, self.timeout):
                if failure == "timeout":
                    answer = Answer(failure="timeout", error=f"no answer within {self.timeout:g} s")
                answers[number] = answer or Answer(failure="crash", error="its process ended")
        return {number: answers[number] for number in calls}  # in the order of the calls, whoever answered first

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.end()

    def __exit__(self, *_: Any) -> None:
        self.close()


class _Host:
    """The environments of one worker, by number."""

    def __init__(self, make: Callable[[Any], Environment]):
        self.make, self.environments = make, {}

    def __call__(self, call: tuple[int, str, Any]) -> Answer:
        number, method, argument = call
        try:
            return Answer(self._run(number, method, argument))
        except Exception as error:
            self.environments.pop(number, None)
            return Answer(failure="crash", error=f"{type(error).__name__}: {error}")

    def _run(self, number: int, method: str, argument: Any) -> Any:
        if method == "reset":
            self.environments[number] = self.make(argument)
            return self.environments[number].reset()
        if number not in self.environments:
            raise RuntimeError("its process ended in a call of another environment")
        if method == "step":
            return self.environments[number].step(argument)
        reward = self.environments.pop(number).reward()
        return math.nan if reward is None or not math.isfinite(reward) else float(reward)
