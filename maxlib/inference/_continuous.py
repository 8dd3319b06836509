"""Continuous batching (Orca, Yu et al. 2022): a batch of slots; when a row ends, its slot gets the next prompt."""

import asyncio
import collections
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
import queue
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from maxlib import nn
from maxlib.inference._arguments import Ids, Prompts, StopIds, check_limits, check_prompts, check_stop, integer
from maxlib.inference._engine import Completion, FinishReason
from maxlib.inference._generate import (
    Audio,
    Generator,
    Images,
    check_inputs,
    check_length,
    check_prefix,
    prepared,
    right_padded,
    shared_capacity,
)
from maxlib.inference._ngrams import NGrams
from maxlib.inference._sampling import GREEDY, Keys, Sampler, check_sampler
from maxlib.inference._slots import (
    Caches,
    Draws,
    Features,
    History,
    Making,
    Settings,
    Slots,
    empty_slots,
    extend,
    grown,
    insert,
    prefill,
    score_tokens,
    step,
    take_row,
)
from maxlib.inference._text import StopTexts

LogitsProcessor = Callable[["Request"], Float[np.ndarray, " V"]]
_SHORTEST_PREFIX = 16  # tokens that are worth copying instead of computing them


class Request:
    """A completion in progress, made by `LocalEngine.submit`.

    Iterate over it for its tokens as they are drawn, with `for` or `async for`; `result` waits for its end.

    Attributes:
        prompt: Ids of the prompt.
        tokens: Ids drawn so far.
        log_probs: Their log-probabilities, as in `Completion`.
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
        sampler: Sampler,
        stop_token_ids: frozenset[int],
        stop_texts: StopTexts | None,
        processors: tuple[LogitsProcessor, ...],
        alternatives: int,
    ):
        self._engine, self.prompt, self._inputs, self._limit, self._key = engine, prompt, inputs, limit, key
        self._sampler, self._stop, self._stop_texts = sampler, stop_token_ids, stop_texts
        self._processors, self._alternatives = processors, alternatives
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.best: list[tuple[list[int], list[float]]] = []
        self.finish_reason: FinishReason | None = None
        self.cached = 0
        self._issued = 0  # number of draws started for it; their tokens arrive later
        self._error: BaseException | None = None
        self._cancelled = False
        self._notify: Callable[[], Any] | None = None
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
        assert self.finish_reason is not None
        return Completion(self.tokens, self.log_probs, self.finish_reason, self._sampler)

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
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        self._notify = functools.partial(loop.call_soon_threadsafe, news.set)
        self._engine.run_in_background()
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

    def _add(self, token: int, log_prob: float) -> None:
        """Appends a token, which may be the last one."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        if token in self._stop or (self._stop_texts is not None and self._stop_texts.end(self.tokens)):
            self.finish_reason = "stop"
        elif len(self.tokens) == self._limit:
            self.finish_reason = "length"

    def _tell(self) -> None:
        if self._notify is not None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                self._notify()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._tell()


@dataclasses.dataclass
class _Prefill:
    """A prompt that is being computed, chunk by chunk."""

    request: Request
    slot: int
    caches: Caches | None = None
    hidden: Any = None
    num_done: int = 0


class _Turns:
    """A lock that is fair to those who wait: without the door a thread that steps would get in first again."""

    def __init__(self):
        self._lock, self._door = threading.Lock(), threading.Lock()

    def __enter__(self) -> None:
        with self._door:
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class _Drawing(NamedTuple):
    """A row that draws in a step: its index among the step's rows, and its slot."""

    index: int
    slot: int
    row: Request


class LocalEngine:
    """An engine on this machine's devices, with continuous batching.

    When a row ends, its slot gets the next prompt, so no slot waits for the longest row. Requests may be added while it
    runs. A prompt is computed once for all its completions, and what a slot's cache shares with the beginning of a new
    prompt is reused: a common system prompt, or the turns of a conversation so far. Samples of a row only depend on its
    key, not on its slot, other rows or reuse. To run on several devices, call it inside `sharding.use(layout)`.

        engine = inference.LocalEngine(model, slots=4)
        groups = engine.generate([[1, 2, 3], [4, 5]], num_samples=2, max_new_tokens=2)  # two of each prompt
        request = engine.submit([1, 2, 3], max_new_tokens=2)  # runs beside other requests
        for token in request:
            print(token)

    Args:
        model: Any `nn.Model`.
        slots: Number of rows decoded at once.
        capacity: Maximum number of tokens in a slot, including the prompt; by default as many as its requests need,
            rounded up: slots grow when a longer request arrives.
        chunk: Number of tokens of prompts computed between two decoding steps. Longer prompts are computed in chunks,
            so that running rows need not wait for them.
        reuse: False computes every prompt anew, except for completions of one prompt.
        num_drafts: Number of tokens that a step drafts for each row and verifies at once. Texts do not change.
        drafter: What drafts: "ngram" takes the tokens after the last occurrence of the row's last tokens in its text;
            "mtp" the model's own MTP module, with `num_drafts=1`; or a model that drafts for this one
            (`nn.mtp.Drafter`), such as a `models.gemma4_assistant.Gemma4Assistant`.
        tokenizer: Tokenizer for `stop`, texts that end a completion.
        dtype: Dtype of the computation.
        cache_dtype: Dtype of cached keys and values, by default `dtype`.
        seed: Seed of the random keys of calls without a key.

    Attributes: `num_steps`, the decoding steps so far; `num_drafted` and `num_accepted`, the drafts in them.

    Raises:
        ValueError: when a layer's cache cannot be addressed by row, the model or drafter does not draft, or a rejected
            draft could not be removed from a cache.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: SupportsIndex = 8,
        capacity: SupportsIndex | None = None,
        chunk: SupportsIndex = 512,
        reuse: bool = True,
        num_drafts: SupportsIndex = 0,
        drafter: Any = "ngram",
        tokenizer: Any = None,
        dtype: Any = jnp.bfloat16,
        cache_dtype: Any = None,
        seed: int = 0,
    ):
        self.slots, self.chunk, self.reuse = integer("slots", slots), integer("chunk", chunk), reuse
        self.num_drafts, self.tokenizer = integer("num_drafts", num_drafts, least=0), tokenizer
        self.capacity = None if capacity is None else integer("capacity", capacity)
        self.generator, self._keys = Generator(model, dtype=dtype, cache_dtype=cache_dtype), Keys(seed)
        model = self.generator.model
        _check_rows(model)
        # With these, keys depend on tokens of the prompt after them.
        needs_length = any(rope.needs_length for rope in getattr(model, "ropes", ()))
        self._splits = not needs_length and not any(mask.prefix for mask in getattr(model, "masks", ()))
        self._mtp, self._drafter = self.num_drafts > 0 and drafter == "mtp", None
        if self.num_drafts:
            _check_drafter(model, drafter, self.num_drafts)
            self._drafter = None if isinstance(drafter, str) else prepared(drafter, dtype)
            self._check_rewinds(needs_length)
        self._rewinds = all(nn.cache.can_rewind(cache.layers) for cache in self._cache_shapes(0))
        self.num_steps, self.num_drafted, self.num_accepted = 0, 0, 0
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()  # other threads may submit
        self._turns = _Turns()
        self._driver: threading.Thread | None = None
        self._driver_lock = threading.Lock()
        self._impl = ""
        self._reset()

    def _reset(self) -> None:
        """Empties all slots and queues."""
        self._waiting: collections.deque[Request] = collections.deque()
        self._rows: list[Request | None] = [None] * self.slots
        self._cached: list[Request | None] = [None] * self.slots  # whose tokens the slots' caches hold
        self._last_use = [0] * self.slots
        self._clock = itertools.count(1)
        self._job: _Prefill | None = None
        self._prompt: _Prefill | None = None  # the last prompt that was computed
        self._size = 0  # tokens of a slot
        self._state: Slots | None = None
        self._features = Features()
        self._pending: collections.deque[tuple[list[_Drawing], Draws]] = collections.deque()

    def _making(self, capacity: int, num_drafts: int) -> Making:
        """Returns how caches of a capacity are made."""
        return Making(capacity, self.generator.cache_dtype, num_drafts, self._mtp)

    def _cache_shapes(self, num_drafts: int) -> list[nn.cache.Cache]:
        """Returns the shapes of the caches of one row, in which all rings are shorter than the text."""
        caches = jax.eval_shape(lambda: self._making(1 << 20, num_drafts).caches(self.generator.model, 1))
        return [cache for cache in (caches.model, caches.mtp) if cache is not None]

    def _check_rewinds(self, needs_length: bool) -> None:
        """Raises ValueError if a rejected draft cannot be removed from the caches."""
        name, layers = type(self.generator.model).__name__, [c.layers for c in self._cache_shapes(self.num_drafts)]
        if needs_length:
            raise ValueError(f"{name} rotates by the length of the text so far, which a rejected draft makes wrong")
        if not all(map(nn.cache.can_rewind, layers)):
            kinds = {type(cache).__name__ for cache in nn.cache.layer_caches(layers)}
            raise ValueError(
                f"{name} has layers that only keep a state ({', '.join(sorted(kinds))}), from which a rejected draft "
                "cannot be removed: generate without drafts"
            )

    def update(self, weights: Any) -> None:
        """Replaces weights as `Generator.update` does; compiled programs stay in use.

        What is cached for reuse is dropped, because it is of the old weights. Rows in progress keep their caches and go
        on with the new weights.
        """
        with self._turns:
            self.generator.update(weights)
            self._cached, self._prompt = [None] * self.slots, None
            if self._job is not None:
                self._waiting.appendleft(self._job.request)
                self._job = None

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: SupportsIndex | Ids,
        images: Sequence[Images | None] | None = None,
        audio: Sequence[Audio | None] | None = None,
        num_samples: SupportsIndex = 1,
        sampler: Sampler = GREEDY,
        stop_token_ids: StopIds = (),
        stop: Collection[str] = (),
        processors: Sequence[LogitsProcessor] = (),
        key: Key[Array, ""] | None = None,
    ) -> list[list[Completion]]:
        """Returns `num_samples` completions of each prompt; the arguments are those of `stream`."""
        completions = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            images=images,
            audio=audio,
            num_samples=num_samples,
            sampler=sampler,
            stop_token_ids=stop_token_ids,
            stop=stop,
            processors=processors,
            key=key,
        )
        groups: list[list[Any]] = [[None for _ in range(num_samples)] for _ in prompts]
        for prompt, number, completion in completions:
            groups[prompt][number] = completion
        return groups

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: SupportsIndex | Ids,
        images: Sequence[Images | None] | None = None,
        audio: Sequence[Audio | None] | None = None,
        num_samples: SupportsIndex = 1,
        sampler: Sampler = GREEDY,
        stop_token_ids: StopIds = (),
        stop: Collection[str] = (),
        processors: Sequence[LogitsProcessor] = (),
        key: Key[Array, ""] | None = None,
    ) -> Iterator[tuple[int, int, Completion]]:
        """Yields completions as they end, each with the index of its prompt and its index within the prompt.

        Args:
            prompts: Token ids of each prompt, of any length.
            max_new_tokens: Maximum number of new tokens, for all prompts or for each.
            images: For vision models: the images of each prompt in the order of their placeholders, None for a prompt
                without. `nn.vision.pad_patches` pads images of any size, so that similar prompts share a program.
            audio: For models that hear: the clips of each prompt in the same way (`nn.audio.pad_clips`).
            num_samples: Number of completions of each prompt.
            sampler: Draws tokens; greedy by default.
            stop_token_ids: Ids that end a completion and are its last token.
            stop: Texts that end a completion, whose last token completes one of them. They need a `tokenizer`.
            processors: Functions that map a `Request` to what is added to the logits of its next token, an array of the
                vocabulary's size: `-inf` forbids a token. `LogitBias` and `Grammar` are such.
            key: Random key for sampling. Without it each call of this engine uses a new key: the n-th call always uses
                the same key for a given `seed`. Pass a key derived from the step number if a resumed run must reproduce
                its samples.

        Raises:
            ValueError: when a prompt is empty or does not fit with its new tokens, when ids are outside the vocabulary,
                when the model does not read images or audio, or when they and their placeholders do not match.
        """
        texts, count = check_prompts(prompts, self.generator.vocab), integer("num_samples", num_samples)
        images, audio = (_of_prompts("images", images, len(texts)), _of_prompts("audio", audio, len(texts)))
        limits = check_limits(max_new_tokens, len(texts))
        inputs = [
            check_inputs(self.generator.model, ids[None], seen, heard)
            for ids, seen, heard in zip(right_padded(texts)[0], images, audio, strict=True)
        ]
        key = self._keys(key)
        # The same keys as `Generator.generate` with each prompt repeated `num_samples` times.
        keys = np.asarray(jax.random.key_data(jax.random.split(key, len(texts) * count)))
        make = functools.partial(
            self._request,
            impl=str(jax.random.key_impl(key)),
            sampler=sampler,
            stop_token_ids=check_stop(stop_token_ids, self.generator.vocab),
            stop=stop,
            processors=processors,
            alternatives=0,
        )
        requests = {
            make(text, inputs[n], limits[n], keys[n * count + i]): (n, i)
            for n, text in enumerate(texts)
            for i in range(count)
        }
        return self._completions(requests)

    def submit(
        self,
        prompt: Ids,
        *,
        max_new_tokens: SupportsIndex,
        images: Images | None = None,
        audio: Audio | None = None,
        sampler: Sampler = GREEDY,
        stop_token_ids: StopIds = (),
        stop: Collection[str] = (),
        processors: Sequence[LogitsProcessor] = (),
        alternatives: SupportsIndex = 0,
        key: Key[Array, ""] | None = None,
    ) -> Request:
        """Adds a prompt to those that run, and returns its completion in progress. Any thread may call it.

        It is the completion of `generate([prompt], key=key)`. The engine runs when a request is iterated over, or
        `step` is called.

        Args:
            prompt: Token ids.
            max_new_tokens: Maximum number of new tokens.
            images: Its images, as for `stream`.
            audio: Its clips, as for `stream`.
            sampler: Draws tokens; greedy by default.
            stop_token_ids: Ids that end the completion and are its last token.
            stop: Texts that end it, as for `stream`.
            processors: Functions that change logits, as for `stream`.
            alternatives: Number of the best tokens in `Request.best`, with their log-probabilities.
            key: Random key for sampling; without it each call uses a new one.

        Raises:
            ValueError: for the same reasons as `stream`.
        """
        (text,) = check_prompts([prompt], self.generator.vocab)
        key = self._keys(key)
        request = self._request(
            text,
            check_inputs(self.generator.model, np.asarray(text)[None], images, audio),
            integer("max_new_tokens", max_new_tokens),
            np.asarray(jax.random.key_data(jax.random.split(key, 1)))[0],
            impl=str(jax.random.key_impl(key)),
            sampler=sampler,
            stop_token_ids=check_stop(stop_token_ids, self.generator.vocab),
            stop=stop,
            processors=processors,
            alternatives=integer("alternatives", alternatives, least=0),
        )
        self._inbox.put(request)
        return request

    def score(
        self, prompt: Ids, alternatives: SupportsIndex = 0
    ) -> tuple[list[float], list[tuple[list[int], list[float]]]]:
        """Returns the log-probabilities of a prompt's tokens after its first one, and the best tokens in their places.

        Args:
            prompt: Token ids.
            alternatives: Number of the best tokens, each with its log-probability.
        """
        (text,), model = check_prompts([prompt], self.generator.vocab), self.generator.model
        check_length(model, len(text))
        tokens, valid = (np.zeros((1, _bucket(len(text))), dtype) for dtype in (np.int32, bool))
        tokens[0, : len(text)], valid[0, : len(text)] = text, True
        count = integer("alternatives", alternatives, least=0)
        with self._turns:
            scores = score_tokens(model, tokens, valid, alternatives=_power(count), dtype=self.generator.dtype)
        log_probs, best, best_log_probs = (np.asarray(x)[: len(text) - 1] for x in scores)
        best, best_log_probs = best[:, :count].tolist(), best_log_probs[:, :count].tolist()
        return log_probs.tolist(), list(zip(best, best_log_probs, strict=True))

    def step(self) -> bool:
        """Computes the next chunk of waiting prompts and a token of each row, and returns False if nothing is left."""
        with self._turns:
            try:
                self._step()
                return not self.is_idle
            except BaseException as error:
                self._fail_all(error)
                raise

    @property
    def is_idle(self) -> bool:
        """Returns whether no request waits or runs."""
        return not (self.num_waiting or any(self._rows) or self._pending)

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests without a slot."""
        return self._inbox.qsize() + len(self._waiting) + (self._job is not None)

    @property
    def num_running(self) -> int:
        """Returns the number of requests with a slot."""
        return self.slots - self._rows.count(None)

    def run_in_background(self) -> None:
        """Starts a thread that calls `step` until nothing is left, unless it runs already."""
        with self._driver_lock:
            if self._driver is None:
                run = functools.partial(contextvars.copy_context().run, self._run)
                self._driver = threading.Thread(target=run, name="maxlib-engine", daemon=True)
                self._driver.start()

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Exception):  # its requests raise it
                while self.step():
                    pass
            with self._driver_lock:
                if self.is_idle:
                    self._driver = None
                    return

    def _request(
        self,
        prompt: list[int],
        inputs: dict[str, Any],
        limit: int,
        key: np.ndarray,
        *,
        impl: str,
        sampler: Sampler,
        stop_token_ids: frozenset[int],
        stop: Collection[str],
        processors: Sequence[LogitsProcessor],
        alternatives: int,
    ) -> Request:
        """Returns a request that is not queued yet; raises ValueError for one that the engine cannot run."""
        check_sampler(sampler)
        if isinstance(stop, str):
            raise ValueError(f"stop must be a list of texts, got {stop!r}: put it in a list")
        if stop and self.tokenizer is None:
            raise ValueError("stop needs the text of tokens: make the engine with tokenizer=")
        if self._impl not in ("", impl):
            raise ValueError(f"an engine's keys must be of one implementation, got {impl} after {self._impl}")
        self._impl = impl
        if inputs and self._mtp:
            raise ValueError(f'{type(self.generator.model).__name__} drafts from text only: use drafter="ngram"')
        self._check_length(prompt, limit)
        stop_texts = StopTexts(self.tokenizer.decode, stop) if stop else None
        return Request(
            self, prompt, inputs, limit, key, sampler, stop_token_ids, stop_texts, tuple(processors), alternatives
        )

    def _check_length(self, prompt: list[int], limit: int) -> None:
        """Raises ValueError for a prompt that the model cannot continue."""
        model, length = self.generator.model, len(prompt) + limit
        check_length(model, length)
        check_prefix(model, [prompt])
        switch = getattr(model, "recompute_cache_at", None)
        if switch is not None and len(prompt) < switch <= length:
            raise ValueError(
                f"{type(model).__name__} rotates keys differently from {switch} tokens on, and a row must not cross "
                "that length while decoding: use inference.Generator, which recomputes its cache"
            )
        if self.capacity is not None and length > self.capacity:
            raise ValueError(f"prompt and new tokens must fit the slots' capacity of {self.capacity}, got {length}")

    def _completions(self, requests: dict[Request, tuple[int, int]]) -> Iterator[tuple[int, int, Completion]]:
        """Runs requests, and yields their completions as they end."""
        # Start the longest rows first, so that no slot is left with a long row at the end.
        running = sorted(requests, key=lambda request: -request._limit)
        for request in running:
            self._inbox.put(request)
        try:
            while running:
                ended = [request for request in running if request.done]
                running = [request for request in running if not request.done]
                for request in ended:
                    yield *requests[request], request.result()
                if not ended:
                    self.step()
        finally:
            for request in running:
                request.cancel()

    def _step(self) -> None:
        if not (any(self._rows) or self._pending or self._job):
            self._features = Features()
        while not self._inbox.empty():
            self._waiting.append(self._inbox.get())
        self._free_ended()
        self._admit()
        # Start the next step before reading the tokens of the last one, so that devices need not wait; but not if its
        # rows depend on these tokens, or a row that has ended must not take part.
        ahead = self._rewinds and not self.num_drafts and not any(row and row._processors for row in self._rows)
        if not ahead:
            self._read_all_but(0)
        is_running = any(self._rows)
        if is_running:
            self._start()
        self._read_all_but(1 if ahead and is_running else 0)

    def _free_ended(self) -> None:
        """Frees the slots of requests that were cancelled or failed."""
        for slot, row in enumerate(self._rows):
            if row is not None and row._cancelled and not row.done:
                row._fail(RuntimeError("the request was cancelled"))
            if row is not None and row.done:
                self._rows[slot] = None

    def _admit(self) -> None:
        """Computes waiting prompts for free slots: all if no row is running, else up to a chunk of tokens."""
        num_computed = 0
        while num_computed < self.chunk or not any(self._rows):
            if self._job is None:
                self._job = self._next_job()
            if self._job is None:
                return
            num_computed += self._advance(self._job)

    def _next_job(self) -> _Prefill | None:
        """Assigns the next request to a free slot."""
        while self._waiting and self._waiting[0]._cancelled:
            self._waiting.popleft()._fail(RuntimeError("the request was cancelled"))
        if not self._waiting or None not in self._rows:
            return None
        self._fit_slots()
        request = self._waiting.popleft()
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        oldest = min(free, key=lambda slot: self._last_use[slot])
        last = self._prompt
        if last is not None and _have_equal_prompts(last.request, request):
            return dataclasses.replace(last, request=request, slot=oldest)
        source, length = self._longest_prefix(request) if self.reuse else (0, 0)
        if not length:
            return _Prefill(request, oldest)
        assert self._state is not None
        request.cached = length
        # A conversation goes on in its slot; what only begins alike leaves the other one in place.
        row = self._cached[source]
        goes_on = source in free and row is not None and length >= len(row.prompt)
        caches = take_row(self._state.caches, source, length)
        return _Prefill(request, source if goes_on else oldest, caches, num_done=length)

    def _fit_slots(self) -> None:
        """Makes the slots large enough for all that wait, and smaller when they are much too large and none is used."""
        limit = getattr(self.generator.model, "max_length", None) or 1 << 62
        needed = max(len(request.prompt) + request._limit for request in self._waiting)
        size = self.capacity or min(shared_capacity(needed), limit)
        if self._state is not None and size > self._size:
            caches = grown(self.generator.model, self._state.caches, self._making(size, self.num_drafts))
            self._state = dataclasses.replace(self._state, caches=caches)
        elif self._state is None or (4 * size <= self._size and not any(self._rows)):
            self._state, self._cached = None, [None] * self.slots
        else:
            return
        self._size, self._prompt = size, None

    def _longest_prefix(self, request: Request) -> tuple[int, int]:
        """Returns the slot whose cache has the longest beginning of a prompt, and its length; 0 if none is useful."""
        best = (0, 0)
        if request._inputs or not self._splits:
            return best
        for slot, row in enumerate(self._cached):
            if row is None or row._inputs:
                continue
            cached = row.prompt + row.tokens[:-1]  # the last token has not been run
            length = _common_length(cached, request.prompt)
            if self._rewinds:
                # The hidden state of the last one is needed, and the MTP module also read the token after each one.
                length = min(length - self._mtp, len(request.prompt) - 1)
            elif self._rows[slot] is not None or length < len(cached) or length == len(request.prompt):
                continue  # a state is that of all its tokens
            if length >= max(best[1] + 1, _SHORTEST_PREFIX):
                best = (slot, length)
        return best

    def _advance(self, job: _Prefill) -> int:
        """Computes the next chunk of a prompt, starts its row after the last one, and returns the number of tokens."""
        request, make = job.request, self.generator
        if request._cancelled:
            request._fail(RuntimeError("the request was cancelled"))
            self._job = None
            return 0
        num_left = len(request.prompt) - job.num_done
        count = min(num_left, self.chunk) if self._splits and not request._inputs else num_left
        if count:
            shape = (1, min(_bucket(count), self._size))
            tokens, valid, after = np.zeros(shape, np.int32), np.zeros(shape, bool), np.full(shape, -1, np.int32)
            tokens[0, :count], valid[0, :count] = request.prompt[job.num_done : job.num_done + count], True
            following = request.prompt[job.num_done + 1 : job.num_done + 1 + count]
            after[0, : len(following)] = following
            if job.caches is None:
                making = self._making(self._size, self.num_drafts)
                job.caches, job.hidden = prefill(
                    make.model, tokens, valid, after, request._inputs, making=making, dtype=make.dtype
                )
            else:
                job.caches, job.hidden = extend(make.model, job.caches, tokens, valid, after, dtype=make.dtype)
            job.num_done += count
        if job.num_done == len(request.prompt):
            self._insert(job)
            self._prompt, self._job = job, None
        return count

    def _insert(self, job: _Prefill) -> None:
        """Starts the row of a prompt that is computed."""
        request, slot, vocab = job.request, job.slot, self.generator.vocab
        state = self._state
        if state is None:
            count = self.num_drafts if self._mtp or self._drafter is not None else 0
            state = empty_slots(job.caches, request._key, slots=self.slots, num_drafts=count)
        if request._sampler.penalizes and state.history is None:
            shape = (self.slots, vocab)
            history = History(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))
            state = dataclasses.replace(state, history=history)
        prompt = None
        if state.history is not None:
            prompt = np.zeros((1, vocab), bool)
            prompt[0, request.prompt] = True
        self._state, draws = insert(
            self.generator.model,
            self._drafter,
            state,
            job.caches,
            job.hidden,
            request._key,
            slot,
            prompt,
            _settings([request], vocab),
            self._bias([request]),
            features=self._features_of([request]),
            impl=self._impl,
        )
        request._issued = 1
        self._rows[slot] = None if request._limit == 1 else request
        self._cached[slot], self._last_use[slot] = request, next(self._clock)
        self._pending.append(([_Drawing(0, slot, request)], draws))

    def _start(self) -> None:
        """Starts a step of all rows, whose tokens are read later."""
        assert self._state is not None
        rows, bias = list(self._rows), self._bias(self._rows)
        self.num_steps += 1
        drafts, num_drafts = self._drafts(rows)
        self._state, draws = step(
            self.generator.model,
            self._drafter,
            self._state,
            np.array([row is not None for row in rows]),
            drafts,
            num_drafts,
            _settings(rows, self.generator.vocab),
            bias,
            features=self._features_of(rows),
            dtype=self.generator.dtype,
            impl=self._impl,
        )
        for slot, row in enumerate(rows):
            if row is not None:
                row._issued += 1
                # The slot becomes free after the row's last step.
                self._rows[slot] = None if row._issued == row._limit else row
        self._pending.append(([_Drawing(n, n, row) for n, row in enumerate(rows) if row is not None], draws))

    def _features_of(self, rows: Sequence[Request | None]) -> Features:
        """Returns what a step must compute: also what earlier rows needed, so that a mixture of rows has few programs,
        until the engine is idle.
        """
        self._features |= _features(rows)
        return self._features

    def _drafts(self, rows: Sequence[Request | None]) -> tuple[np.ndarray | None, np.ndarray]:
        """Returns drafts of each row, `S N`, and how many there are. N is 0 if no row has drafts; None stands for the
        drafts of a model, which the devices have.
        """
        drafts, counts = np.zeros((len(rows), self.num_drafts), np.int32), np.zeros(len(rows), np.int32)
        has_model = self._mtp or self._drafter is not None
        for n, row in enumerate(rows):
            # What processors and penalties do to later tokens depends on the drafts.
            if row is None or not self.num_drafts or row._processors or row._sampler.penalizes:
                continue
            counts[n] = min(self.num_drafts, row._limit - len(row.tokens))
            if not has_model:
                row._ngrams = row._ngrams or NGrams(row.prompt)
                guesses = row._ngrams.drafts(row.tokens, int(counts[n]))
                drafts[n, : len(guesses)], counts[n] = guesses, len(guesses)
            self.num_drafted += int(counts[n])
        return (None if has_model else drafts if counts.any() else drafts[:, :0]), counts

    def _bias(self, rows: Sequence[Request | None]) -> np.ndarray | None:
        """Returns what processors add to the logits of each row; None without processors. A row whose processor fails
        ends with its error.
        """
        if not any(row is not None and row._processors for row in rows):
            return None
        bias = np.zeros((len(rows), self.generator.vocab), np.float32)
        for row, values in zip(rows, bias, strict=True):
            if row is None:
                continue
            try:
                for process in row._processors:
                    values += process(row)
            except Exception as error:
                row._fail(error)
        return bias

    def _read_all_but(self, count: int) -> None:
        """Reads the tokens of all steps but the last `count`."""
        while len(self._pending) > count:
            self._read(*self._pending.popleft())

    def _read(self, drawings: list[_Drawing], draws: Draws) -> None:
        """Appends the tokens of a step to its rows, and frees the slots of those that end."""
        draws = jax.device_get(draws)
        for n, slot, row in drawings:
            self.num_accepted += int(draws.taken[n])
            # A row that stopped may be in one more step, which had already been started.
            for place in range(0 if row.done else 1 + int(draws.taken[n])):
                if row._alternatives and draws.best is not None:
                    tokens, log_probs = (x[n, place, : row._alternatives].tolist() for x in draws.best)
                    row.best.append((tokens, log_probs))
                row._add(int(draws.token[n, place]), float(draws.log_prob[n, place]))
                if row.done:
                    break
            row._issued = max(row._issued, len(row.tokens))
            if row.done and self._rows[slot] is row:
                self._rows[slot] = None
            row._tell()

    def _fail_all(self, error: BaseException) -> None:
        """Ends all requests with an error: after it the caches are lost."""
        job = [] if self._job is None else [self._job.request]
        pending = [drawing.row for drawings, _ in self._pending for drawing in drawings]
        for row in [*self._waiting, *self._rows, *job, *pending]:
            if row is not None and not row.done:
                row._fail(error)
        self._reset()


def _of_prompts(name: str, inputs: Any, count: int) -> Sequence[Any]:
    """Returns the images or clips of each prompt; raises ValueError unless it is a list of as many."""
    if inputs is None:
        return [None] * count
    if not isinstance(inputs, Sequence) or len(inputs) != count:
        got = f"{len(inputs)} of them" if isinstance(inputs, Sequence) else type(inputs).__name__
        raise ValueError(
            f"{name} must be a list with the {name} of each of the {count} prompts (None for a prompt without), got {got}"
        )
    return inputs


def _settings(rows: Sequence[Request | None], vocab: int) -> Settings:
    """Returns the settings of rows as arrays; slots without a row are greedy."""
    samplers = [GREEDY if row is None else row._sampler for row in rows]
    log_min_p = [-math.inf if sampler.min_p is None else math.log(sampler.min_p) for sampler in samplers]
    penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in samplers]
    return Settings(
        temperature=jnp.asarray([sampler.temperature for sampler in samplers], jnp.float32),
        top_k=jnp.asarray([min(sampler.top_k or 0, vocab) for sampler in samplers], jnp.int32),
        top_p=jnp.asarray([sampler.top_p or 1.0 for sampler in samplers], jnp.float32),
        log_min_p=jnp.asarray(log_min_p, jnp.float32),
        penalties=jnp.asarray(penalties, jnp.float32),
    )


def _features(rows: Sequence[Request | None]) -> Features:
    """Returns what a step of these rows must compute."""
    requests = [row for row in rows if row is not None]
    samplers = [row._sampler for row in requests if row._sampler.temperature > 0]
    return Features(
        samples=bool(samplers),
        top_k=_power(max((sampler.top_k or 0 for sampler in samplers), default=0)),
        top_p=any((sampler.top_p or 1.0) < 1 for sampler in samplers),
        min_p=any(sampler.min_p is not None for sampler in samplers),
        alternatives=_power(max((row._alternatives for row in requests), default=0)),
    )


def _power(number: int) -> int:
    """Rounds a number up to a power of two, so that similar ones share a program; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def _check_drafter(model: Any, drafter: Any, num_drafts: int) -> None:
    """Raises ValueError if there is no such source of drafts for the model."""
    if drafter == "ngram":
        return
    if isinstance(drafter, str):
        if drafter != "mtp" or num_drafts != 1:
            raise ValueError(
                f'drafter must be "ngram", "mtp" with num_drafts=1, or a model, got {drafter!r} with {num_drafts}'
            )
        if not isinstance(model, nn.mtp.SupportsDrafting):
            raise ValueError(
                f"{type(model).__name__} does not draft: it lacks the methods of nn.mtp.SupportsDrafting; pass "
                "drafter=, a model that drafts for it"
            )
        return
    if not isinstance(drafter, nn.mtp.Drafter):
        raise ValueError(
            f"drafter must have the methods of nn.mtp.Drafter, as a gemma4_assistant does, got {type(drafter).__name__}"
        )
    drafter.check_target(model)


def _have_equal_prompts(a: Request, b: Request) -> bool:
    same_inputs = a._inputs is b._inputs or not (a._inputs or b._inputs)
    return same_inputs and a.prompt == b.prompt


def _common_length(a: list[int], b: list[int]) -> int:
    """Returns the number of tokens that two texts have in common at their beginning."""
    if a[:_SHORTEST_PREFIX] != b[:_SHORTEST_PREFIX]:  # most often
        return 0
    size = min(len(a), len(b))
    differs = np.asarray(a[:size]) != np.asarray(b[:size])
    return int(differs.argmax()) if differs.any() else size


def _bucket(length: int) -> int:
    """Rounds a prompt's length up by less than a quarter, or to 16, so that four programs cover each doubling."""
    multiple = max(16, (1 << (length - 1).bit_length()) // 8)
    return -(-length // multiple) * multiple


def _check_rows(model: Any) -> None:
    """Raises ValueError if some array of the cache does not begin with the axis of rows."""
    small, large = (jax.eval_shape(lambda rows=rows: model.init_cache(rows, 16)) for rows in (2, 3))
    of_three = dict(jax.tree_util.tree_leaves_with_path(large))
    for path, a in jax.tree_util.tree_leaves_with_path(small):
        b = of_three.get(path)
        if b is None or a.shape[:1] != (2,) or b.shape != (3, *a.shape[1:]):
            raise ValueError(
                f"{type(model).__name__}: the first axis of the cache's array {jax.tree_util.keystr(path)} must be "
                f"rows, got {a.shape} for 2 rows; without it a slot cannot get a new row: use inference.Generator"
            )
