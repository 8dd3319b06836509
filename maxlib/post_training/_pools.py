"""Rewards and environments in processes (or threads) with a deadline for each call; failures never become scores."""

import collections
import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from maxlib._utils.timed_process import TimedProcess, results

Reward = Callable[[Any], float | None]
FAILURES = "timeout", "error", "nan"


class _Pool(contextlib.AbstractContextManager):
    """Workers that answer calls, each within `timeout` seconds."""

    def __init__(self, workers: Sequence[TimedProcess], timeout: float):
        self._workers, self.timeout, self._lock = workers, timeout, threading.Lock()

    def _results(self, queues: Sequence[collections.deque]) -> Iterator[tuple[Any, Any, Any]]:
        with self._lock:  # engines in several threads may share the workers
            yield from results(self._workers, queues, self.timeout)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self._workers:
            worker.end()

    def __exit__(self, *_: Any) -> None:
        self.close()


class RewardPool(_Pool):
    """Processes that score completions.

    A reward is a function of one item, such as a dict of a document and a completion, that returns a number, or None
    for "not scored". A call that exceeds `timeout`, raises, crashes its process, or returns no finite number gives NaN
    and increments a count. Functions and items are pickled, so functions must be importable from a module.

    Args:
        rewards: A reward, or several.
        processes: Number of processes.
        timeout: Time limit in seconds of one reward for one item.
    """

    def __init__(self, rewards: Reward | Sequence[Reward], *, processes: int = 4, timeout: float = 10.0):
        if processes < 1 or not timeout > 0:
            raise ValueError(f"processes and timeout must be positive, got {processes} and {timeout}")
        self.rewards = list(rewards) if isinstance(rewards, Sequence) else [rewards]
        self.outcomes = collections.Counter[str]()
        score = [functools.partial(_score, reward) for reward in self.rewards]
        super().__init__([TimedProcess(score) for _ in range(processes)], timeout)

    def __call__(self, items: Sequence[Any]) -> Float[np.ndarray, "N K"]:
        """Scores N items with K rewards; NaN for items that were not scored."""
        scores = np.full((len(items), len(self.rewards)), np.nan)
        queue = collections.deque(((n, k), k, items[n]) for n, k in np.ndindex(scores.shape))
        for job, scored, failure in self._results([queue] * len(self._workers)):
            kind, scores[job] = scored or ("timeout" if failure == "timeout" else "error", math.nan)
            self.outcomes[kind] += 1
        return scores

    def metrics(self) -> dict[str, int]:
        """Returns the failures so far: `reward_timeout`, `reward_error` and `reward_nan`."""
        return {f"reward_{kind}": self.outcomes[kind] for kind in FAILURES}


def _score(reward: Reward, item: Any) -> tuple[str, float]:
    """Returns the kind of the outcome, and the score, NaN if there is none."""
    try:
        if (value := reward(item)) is None:
            return "unscored", math.nan
        score = float(value)
    except Exception:
        return "error", math.nan
    return ("scored", score) if math.isfinite(score) else ("nan", math.nan)


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


class EnvironmentPool(_Pool):
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
        self._added = 0
        super().__init__([TimedProcess([_Host(make)], in_thread=in_threads) for _ in range(workers)], timeout)

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
        for number, answer, failure in self._results(queues):
            if failure == "timeout":
                answer = Answer(failure="timeout", error=f"no answer within {self.timeout:g} s")
            answers[number] = answer or Answer(failure="crash", error="its process ended")
        return {number: answers[number] for number in calls}  # in the order of the calls, whoever answered first


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
