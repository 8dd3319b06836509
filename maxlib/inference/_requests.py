"""Completions in progress, and what the rows of a step ask for."""

import asyncio
import collections
import contextlib
import functools
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from maxlib.inference._drafts import NGrams
from maxlib.inference._engine import Completion, FinishReason
from maxlib.inference._generate import power_of_two
from maxlib.inference._sampling import GREEDY, Sampler
from maxlib.inference._slots import Features, Settings
from maxlib.inference._text import StopTexts

if TYPE_CHECKING:
    from maxlib.inference._continuous import LocalEngine

LogitsProcessor = Callable[["Request"], Float[np.ndarray, " V"]]
"""A function of a request that returns numbers to add to the logits of its next token; -inf forbids a token."""


class Options(NamedTuple):
    """What requests of one call have in common; see `LocalEngine.submit`."""

    sampler: Sampler
    stop_token_ids: frozenset[int]
    stop: StopTexts | None
    processors: tuple[LogitsProcessor, ...]
    alternatives: int


class Request:
    """A completion in progress, made by `LocalEngine.submit`.

    Iterate over it for its tokens as they are drawn, with `for` or `async for`; `result` waits for its end.

    Attributes:
        prompt: Ids of the prompt.
        tokens: Ids drawn so far.
        log_probs: Their log-probabilities, as in `Completion`.
        versions: Version of the weights that drew each, see `LocalEngine.update`.
        best: For each of them the best tokens and their log-probabilities, best first; empty without `alternatives`.
        finish_reason: None until it has ended.
        cached: Number of tokens of the prompt that did not have to be computed.
    """

    def __init__(
        self,
        engine: "LocalEngine",
        prompt: list[int],
        inputs: dict[str, Any],
        limit: int,
        key: np.ndarray,
        options: Options,
    ):
        self._engine, self.prompt, self._inputs, self._limit, self._key = engine, prompt, inputs, limit, key
        self._options = options
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.best: list[tuple[list[int], list[float]]] = []
        self.finish_reason: FinishReason | None = None
        self.cached = 0
        self._issued = 0  # number of draws started for it; their tokens arrive later
        self._blocks: list[int] = []
        self._routes: list[np.ndarray] = []  # of the tokens that were run, in pieces
        self._slot = self._order = 0  # the order is that of the first start
        self._error: BaseException | None = None
        self._cancelled = False
        self._notify: Callable[[], Any] | None = None
        self._at_end = False  # notify when it has ended only
        self._ngrams: NGrams | None = None

    @property
    def done(self) -> bool:
        """Returns whether it has ended, was cancelled or failed."""
        return self.finish_reason is not None or self._error is not None

    def cancel(self) -> None:
        """Ends it without a result; its slot is free in the next step."""
        self._cancelled = True

    def result(self) -> Completion:
        """Runs the engine until this completion has ended, and returns it.

        Raises:
            RuntimeError: when it was cancelled.
        """
        collections.deque(self, maxlen=0)
        return self._completion()

    async def completion(self) -> Completion:
        """Returns the completion when it has ended, while a thread runs the engine; it is cancelled if this is."""
        news = self._listen(at_end=True)
        try:
            if not self.done:
                await news.wait()
        finally:
            self.cancel()
        if self._error is not None:
            raise self._error
        return self._completion()

    def _completion(self) -> Completion:
        assert self.finish_reason is not None
        routes = np.concatenate(self._routes) if self._routes else None
        return Completion(self.tokens, self.log_probs, self.finish_reason, self._options.sampler, self.versions, routes)

    def __iter__(self) -> Iterator[int]:
        """Yields tokens; runs the engine, with all its requests, while there is no new one."""
        for count in itertools.count():
            while len(self.tokens) <= count and not self.done:
                self._engine.step()
            if self._error is not None:
                raise self._error
            if len(self.tokens) <= count:
                return
            yield self.tokens[count]

    async def __aiter__(self) -> AsyncIterator[int]:
        """Yields tokens, while a thread runs the engine. A request whose iterator is closed is cancelled."""
        news = self._listen(at_end=False)
        try:
            for count in itertools.count():
                while len(self.tokens) <= count and not self.done:
                    news.clear()
                    if len(self.tokens) <= count and not self.done:  # both may have changed before `clear`
                        await news.wait()
                if self._error is not None:
                    raise self._error
                if len(self.tokens) <= count:
                    return
                yield self.tokens[count]
        finally:
            self.cancel()

    def _listen(self, *, at_end: bool) -> asyncio.Event:
        """Returns an event that each new token sets, or only the last one, and runs the engine."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._notify, self._at_end = functools.partial(loop.call_soon_threadsafe, news.set), at_end
        self._engine.run_in_background()
        return news

    def _add(self, token: int, log_prob: float, version: int) -> None:
        """Appends a token, which may be the last one."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        stop = self._options.stop
        if token in self._options.stop_token_ids or (stop is not None and stop.end(self.prompt, self.tokens)):
            self.finish_reason = "stop"
        elif len(self.tokens) == self._limit:
            self.finish_reason = "length"

    def _tell(self) -> None:
        if self._notify is not None and (self.done or not self._at_end):
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._notify()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._tell()


def inputs_by_prompt(name: str, inputs: Any, count: int) -> Sequence[Any]:
    """Returns the images or clips of each prompt; raises ValueError unless it is a list of as many."""
    if inputs is None:
        return [None] * count
    if not isinstance(inputs, Sequence) or len(inputs) != count:
        got = f"{len(inputs)} of them" if isinstance(inputs, Sequence) else type(inputs).__name__
        raise ValueError(
            f"{name} must be a list with the {name} of each of the {count} prompts (None for a prompt without), got {got}"
        )
    return inputs


def settings_of(rows: Sequence[Request | None], vocab: int) -> Settings:
    """Returns the settings of rows as arrays; slots without a row are greedy."""
    samplers = [GREEDY if row is None else row._options.sampler for row in rows]
    log_min_p = [-math.inf if sampler.min_p is None else math.log(sampler.min_p) for sampler in samplers]
    penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplers]
    temperature = np.array([sampler.temperature for sampler in samplers], np.float32)
    top_k = np.array([min(sampler.top_k or 0, vocab) for sampler in samplers], np.int32)
    top_p = np.array([sampler.top_p or 1.0 for sampler in samplers], np.float32)
    arrays = temperature, top_k, top_p, np.array(log_min_p, np.float32), np.array(penalties, np.float32)
    return Settings(*jax.device_put(arrays))  # in one call, each of which takes longer than the copies


def features_of(rows: Sequence[Request | None]) -> Features:
    """Returns what a step of these rows must compute."""
    requests = [row for row in rows if row is not None]
    samplers = [row._options.sampler for row in requests if row._options.sampler.temperature > 0]
    return Features(
        samples=bool(samplers),
        top_k=power_of_two(max((sampler.top_k or 0 for sampler in samplers), default=0)),
        top_p=any((sampler.top_p or 1.0) < 1 for sampler in samplers),
        min_p=any(sampler.min_p is not None for sampler in samplers),
        alternatives=power_of_two(max((row._options.alternatives for row in requests), default=0)),
    )


def bias_of(rows: Sequence[Request | None], vocab: int) -> np.ndarray | None:
    """Returns what processors add to the logits of each row; None without processors. A row whose processor fails ends
    with its error.
    """
    if not any(row is not None and row._options.processors for row in rows):
        return None
    bias = np.zeros((len(rows), vocab), np.float32)
    for row, values in zip(rows, bias, strict=True):
        if row is None:
            continue
        try:
            for process in row._options.processors:
                values += process(row)
        except Exception as error:
            row._fail(error)
    return bias
