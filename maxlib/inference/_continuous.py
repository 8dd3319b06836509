"""Continuous batching (Orca, Yu et al. 2022): a batch of slots; when a row ends, its slot gets the next prompt."""

import collections
import dataclasses
import itertools
import queue
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key

from maxlib import nn
from maxlib._utils.text import check_texts
from maxlib.inference._arguments import Ids, Prompts, StopIds, check_limits, check_prompts, check_stop, integer
from maxlib.inference._drafts import check_drafter, check_rewinds, draft_tokens
from maxlib.inference._engine import Background, Completion, Turns
from maxlib.inference._generate import (
    Audio,
    Generator,
    Images,
    Packed,
    bucket,
    check_inputs,
    check_length,
    check_prefix,
    max_length,
    power_of_two,
    prepared,
    right_padded,
    row_counts,
    shared_capacity,
    without_rows,
)
from maxlib.inference._memory import Memory, Prefill
from maxlib.inference._pages import (
    NOWHERE,
    Making,
    Paging,
    gather_view,
    most_tokens,
    read_row,
    tables_of,
    with_blocks,
)
from maxlib.inference._requests import (
    LogitsProcessor,
    Options,
    Request,
    bias_of,
    features_of,
    inputs_by_prompt,
    settings_of,
)
from maxlib.inference._sampling import GREEDY, Keys, Sampler, check_sampler
from maxlib.inference._slots import (
    Draws,
    Features,
    History,
    Settings,
    Slots,
    empty_slots,
    extend,
    insert,
    prefill,
    score_tokens,
    split_key,
    step,
)
from maxlib.inference._text import StopTexts


class _Drawing(NamedTuple):
    """A row that draws in a step: its index among the step's rows, its slot, and the version of the weights."""

    index: int
    slot: int
    row: Request
    version: int


class LocalEngine:
    """An engine on this machine's devices, with continuous batching.

    When a row ends, its slot gets the next prompt, so no slot waits for the longest row. Requests may be added while it
    runs. A prompt is computed once for all its completions, and what a slot's cache shares with the beginning of a new
    prompt is reused: a common system prompt, or the turns of a conversation so far. Samples of a row only depend on its
    key, not on its slot, other rows or reuse. To run on several devices, call it inside `sharding.use(layout)`.

    Rows take memory in blocks of 64 tokens as they grow, and share those of a common beginning. While there is no free
    block, requests wait; when a row needs one, the newest row gives back its blocks and is computed again later.

        engine = inference.LocalEngine(model, slots=4)
        groups = engine.generate([[1, 2, 3], [4, 5]], num_samples=2, max_new_tokens=2)  # two of each prompt
        request = engine.submit([1, 2, 3], max_new_tokens=2)  # runs beside other requests
        for token in request:
            print(token)

    Args:
        model: Any `nn.Model`.
        slots: Number of rows decoded at once.
        capacity: Maximum number of tokens in a row, including the prompt; by default as many as its requests need.
        cache_tokens: Number of tokens for which there is memory, of running rows and of texts kept for reuse. By
            default as many as `slots` rows of the longest request need, and more when a longer one arrives; and the
            engine keeps a copy of what a step reads, instead of gathering it from blocks in each step.
        chunk: Number of tokens of prompts computed between two decoding steps. Longer prompts are computed in chunks,
            so that running rows need not wait for them.
        reuse: False computes every prompt anew, except for completions of one prompt.
        num_drafts: Number of tokens that a step drafts for each row and verifies at once. Texts do not change.
        drafter: What drafts: "ngram" takes the tokens after the last occurrence of the row's last tokens in its text;
            "mtp" the model's own MTP module, with `num_drafts=1`; or a model that drafts for this one
            (`nn.mtp.Drafter`), such as a `models.gemma4_assistant.Gemma4Assistant`.
        record_routes: True records the experts of each token in `Completion.routes`, for models with experts.
        tokenizer: Tokenizer for `stop`, texts that end a completion.
        dtype: Dtype of the computation.
        cache_dtype: Dtype of cached keys and values, by default `dtype`.
        seed: Seed of the random keys of calls without a key.

    Attributes: `num_steps`, the decoding steps so far; `num_drafted` and `num_accepted`, the drafts in them; `version`
    of the weights, 0 until the first update.

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
        cache_tokens: SupportsIndex | None = None,
        chunk: SupportsIndex = 512,
        reuse: bool = True,
        num_drafts: SupportsIndex = 0,
        drafter: Any = "ngram",
        record_routes: bool = False,
        tokenizer: Any = None,
        dtype: Any = jnp.bfloat16,
        cache_dtype: Any = None,
        seed: int = 0,
    ):
        self.slots, self.chunk, self.reuse = integer("slots", slots), integer("chunk", chunk), reuse
        self._row_counts = row_counts(self.slots)
        self.num_drafts, self.tokenizer = integer("num_drafts", num_drafts, least=0), tokenizer
        self.capacity = None if capacity is None else integer("capacity", capacity)
        self.generator, self._keys = Generator(model, dtype=dtype, cache_dtype=cache_dtype), Keys(seed)
        model = self.generator.model
        _check_rows(model)
        # Read once: layers are searched for them.
        self._max_length, self._masks = max_length(model), getattr(model, "masks", ())
        # With these, keys depend on tokens of the prompt after them.
        needs_length = any(rope.needs_length for rope in getattr(model, "ropes", ()))
        self._splits = not needs_length and not any(mask.prefix for mask in self._masks)
        self._mtp, self._drafter = self.num_drafts > 0 and drafter == "mtp", None
        if self.num_drafts:
            check_drafter(model, drafter, self.num_drafts)
            self._drafter = None if isinstance(drafter, str) else Packed.of(prepared(drafter, dtype))
            check_rewinds(model, self._cache_shapes(self.num_drafts), needs_length=needs_length)
        self._rewinds = all(nn.cache.can_rewind(cache.layers) for cache in self._cache_shapes(0))
        self._block = Paging.of(model, self._making(most_tokens(model))).block
        self.cache_tokens = None if cache_tokens is None else integer("cache_tokens", cache_tokens, least=self._block)
        if self.cache_tokens is not None:
            self.cache_tokens -= self.cache_tokens % self._block
        self.num_steps, self.num_drafted, self.num_accepted, self.version = 0, 0, 0, 0
        self.record_routes = record_routes
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()  # other threads may submit
        self._turns, self._background = Turns(), Background()
        self._impl = ""
        self._reset()

    def _reset(self) -> None:
        """Empties all slots and queues."""
        self._waiting: collections.deque[Request] = collections.deque()
        self._rows: list[Request | None] = [None] * self.slots
        self._clock = itertools.count(1)
        self._job: Prefill | None = None
        self._width, self._last_slots = 0, list[int]()  # blocks of a row, and slots, in the last step
        self._features = Features()
        self._rows_of_settings: list[Request | None] = []
        self._settings: Settings | None = None
        self._pending: collections.deque[tuple[list[_Drawing], Draws]] = collections.deque()
        self._drop_caches()

    def _making(self, capacity: int) -> Making:
        """Returns how caches of a capacity are made."""
        return Making(capacity, self.generator.cache_dtype, self.num_drafts, self._mtp)

    def _cache_shapes(self, num_drafts: int) -> list[nn.cache.Cache]:
        """Returns the shapes of the caches of one row, in which all rings are shorter than the text."""
        model = self.generator.model
        making = dataclasses.replace(self._making(most_tokens(model)), num_drafts=num_drafts)
        caches = making.shapes(model)
        return [cache for cache in (caches.model, caches.mtp) if cache is not None]

    def update(self, weights: Any, version: int | None = None) -> None:
        """Replaces weights as `Generator.update` does; compiled programs stay in use.

        What is cached for reuse is dropped, because it is of the old weights. Rows in progress keep their caches and go
        on with the new weights.

        Args:
            weights: As for `Generator.update`.
            version: Their number in `Completion.versions`, by default one more than that of the last weights.
        """
        with self._turns:
            self.generator.update(weights)
            self.version = self.version + 1 if version is None else version
            self._memory.forget_all()
            if self._job is not None:
                self._put_back(self._job.request)

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
        images, audio = (inputs_by_prompt("images", images, len(texts)), inputs_by_prompt("audio", audio, len(texts)))
        limits = check_limits(max_new_tokens, len(texts))
        inputs = [
            check_inputs(self.generator.model, ids[None], seen, heard)
            for ids, seen, heard in zip(right_padded(texts)[0], images, audio, strict=True)
        ]
        # The same keys as `Generator.generate` with each prompt repeated `num_samples` times.
        keys = self._row_keys(key, len(texts) * count)
        options = self._options(sampler, stop_token_ids, stop, processors, 0)
        requests = {
            self._request(text, inputs[n], limits[n], keys[n * count + i], options): (n, i)
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
        request = self._request(
            text,
            check_inputs(self.generator.model, np.asarray(text)[None], images, audio),
            integer("max_new_tokens", max_new_tokens),
            self._row_keys(key, 1)[0],
            self._options(sampler, stop_token_ids, stop, processors, alternatives),
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
        (text,) = check_prompts([prompt], self.generator.vocab)
        check_length(self._max_length, len(text))
        tokens, valid = (np.zeros((1, bucket(len(text))), dtype) for dtype in (np.int32, bool))
        tokens[0, : len(text)], valid[0, : len(text)] = text, True
        count = integer("alternatives", alternatives, least=0)
        least = power_of_two(max(count, 1))  # `jax.lax.map` returns no arrays without elements
        with self._turns:
            scores = score_tokens(self.generator.packed, tokens, valid, alternatives=least, dtype=self.generator.dtype)
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
    def cache_bytes(self) -> int:
        """Returns the size of all caches; 0 before the first request."""
        state = self._state
        return 0 if state is None else sum(x.nbytes for x in jax.tree.leaves((state.caches, state.view)))

    @property
    def num_waiting(self) -> int:
        """Returns the number of requests without a slot."""
        return self._inbox.qsize() + len(self._waiting) + (self._job is not None)

    @property
    def num_running(self) -> int:
        """Returns the number of requests with a slot."""
        return self.slots - self._rows.count(None)

    def _running(self) -> list[Request]:
        """Returns the requests with a slot."""
        return [row for row in self._rows if row is not None]

    def run_in_background(self) -> None:
        """Starts a thread that calls `step` until nothing is left, unless it runs already."""
        self._background.start(self)

    def _row_keys(self, key: Key[Array, ""] | None, count: int) -> np.ndarray:
        """Returns the data of the keys of rows."""
        key = self._keys(key)
        impl = str(jax.random.key_impl(key))
        if self._impl not in ("", impl):
            raise ValueError(f"an engine's keys must be of one implementation, got {impl} after {self._impl}")
        self._impl = impl
        return np.asarray(split_key(key, count))

    def _options(
        self,
        sampler: Sampler,
        stop_token_ids: StopIds,
        stop: Collection[str],
        processors: Sequence[LogitsProcessor],
        alternatives: SupportsIndex,
    ) -> Options:
        """Returns the options of requests; raises ValueError for those that the engine cannot follow."""
        check_sampler(sampler)
        check_texts("stop", stop)
        if stop and self.tokenizer is None:
            raise ValueError("stop needs the text of tokens: make the engine with tokenizer=")
        ends = check_stop(stop_token_ids, self.generator.vocab)
        texts = StopTexts(self.tokenizer, stop) if stop else None
        return Options(sampler, ends, texts, tuple(processors), integer("alternatives", alternatives, least=0))

    def _request(
        self, prompt: list[int], inputs: dict[str, Any], limit: int, key: np.ndarray, options: Options
    ) -> Request:
        """Returns a request that is not queued yet; raises ValueError for one that the engine cannot run."""
        if inputs and self._mtp:
            raise ValueError(f'{type(self.generator.model).__name__} drafts from text only: use drafter="ngram"')
        self._check_length(prompt, limit)
        return Request(self, prompt, inputs, limit, key, options)

    def _check_length(self, prompt: list[int], limit: int) -> None:
        """Raises ValueError for a prompt that the model cannot continue."""
        model, length = self.generator.model, len(prompt) + limit
        check_length(self._max_length, length)
        check_prefix(self._masks, [prompt])
        switch = getattr(model, "recompute_cache_at", None)
        if switch is not None and len(prompt) < switch <= length:
            raise ValueError(
                f"{type(model).__name__} rotates keys differently from {switch} tokens on, and a row must not cross "
                "that length while decoding: use inference.Generator, which recomputes its cache"
            )
        if self.capacity is not None and length > self.capacity:
            raise ValueError(f"prompt and new tokens must fit the slots' capacity of {self.capacity}, got {length}")
        if self.cache_tokens is not None and length > self.cache_tokens:
            raise ValueError(
                f"prompt and new tokens must fit the engine's memory of {self.cache_tokens} tokens, got {length}: "
                "shorten them, or make the engine with more cache_tokens="
            )

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
        ahead = self._rewinds and not self.num_drafts and not any(row and row._options.processors for row in self._rows)
        if not ahead:
            self._read_all_but(0)
        self._take_blocks()
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
                self._memory.end(row)

    def _admit(self) -> None:
        """Computes waiting prompts for free slots: all if no row is running, else up to a chunk of tokens."""
        num_computed = 0
        while num_computed < self.chunk or not any(self._rows):
            if self._job is None:
                self._job = self._next_job()
            if self._job is None:
                return
            num_computed += self._advance(self._job)

    def _next_job(self) -> Prefill | None:
        """Assigns the next request to a free slot, if there are blocks for it."""
        while self._waiting and self._waiting[0]._cancelled:
            self._waiting.popleft()._fail(RuntimeError("the request was cancelled"))
        if not self._waiting or None not in self._rows or not self._fit():
            return None
        assert self._paging is not None
        memory, request = self._memory, self._waiting[0]
        text = [*request.prompt, *request.tokens]
        free = [slot for slot, row in enumerate(self._rows) if row is None]
        slot, source, length, shared = min(free, key=self._age), None, 0, []
        last = memory.prompt_of(request, text)
        if last is not None:
            shared = last.shared
        elif self._is_kept(request):
            source, length = memory.longest_prefix(text, self._rows, rewinds=self._rewinds, num_ahead=int(self._mtp))
            shared = [] if source is None else source._blocks[: length // self._block]
        # Rows that cannot be computed again in the same way get all their blocks at once.
        total = len(text) + 1 if self._splits else len(request.prompt) + request._limit
        num_new = memory.num_blocks(total) - len(shared)
        memory.share(shared)
        # What the source's blocks hold stays until something else is stored there, also if it must give them back.
        of_source = [] if source is None else list(source._blocks)
        # A block for each row that grows, which would otherwise soon take this row's.
        num_growing = sum(memory.num_blocks(len(row.prompt) + row._limit) > len(row._blocks) for row in self._running())
        if not memory.make_room(num_new + num_growing):
            memory.release(shared)
            return None
        self._waiting.popleft()
        request._blocks = [*shared, *memory.take(num_new)]
        request._order = request._order or next(self._clock)
        if last is not None:
            request.cached = len(request.prompt)
            return dataclasses.replace(last, request=request, slot=slot)
        job = Prefill(request, text, slot, shared, memory.num_read(len(text) + 1))
        if source is not None:
            assert self._state is not None
            (table,) = tables_of([of_source[: memory.num_blocks(length)]], job.num_blocks)
            job.caches = read_row(self._state.caches, table, np.int32(source._slot), length, paging=self._paging)
            job.num_done, request.cached = length, min(length, len(request.prompt))
            job.routes = [np.concatenate(source._routes)[:length]] if source._routes else []
            # A conversation goes on in its slot; what only begins alike leaves the other one in place.
            if source._slot in free and self._owners[source._slot] is source and length >= len(source.prompt):
                job.slot = source._slot
        return job

    def _age(self, slot: int) -> int:
        """Returns a number that is smaller for a slot whose last row began earlier."""
        owner = self._owners[slot]
        return 0 if owner is None else owner._order

    def _is_kept(self, request: Request) -> bool:
        """Returns whether the text of a request is kept for others, and may begin as one that is."""
        return self.reuse and self._splits and not request._inputs

    def _fit(self) -> bool:
        """Makes room for the longest request that waits; returns False while rows run that must end before."""
        limit = self._max_length or 1 << 62
        needed = max(len(request.prompt) + request._limit for request in self._waiting)
        length = self.capacity or self.cache_tokens or min(shared_capacity(needed), limit)
        size = self._memory.num_blocks(length) * self._block
        if 4 * size <= self._memory.size and not (any(self._rows) or self._pending):
            self._drop_caches()
        if size <= self._memory.size:
            return True
        paging = Paging.of(self.generator.model, self._making(size))
        if self._paging not in (None, paging):  # a window has become shorter than the rows
            if any(self._rows) or self._pending:
                return False
            self._drop_caches()
        self._paging, count = paging, (self.cache_tokens or self.slots * size) // self._block
        self._memory.grow(size, count)
        if self._state is not None:
            caches = with_blocks(self._state.caches, paging=paging, num_blocks=count)
            self._state = dataclasses.replace(self._state, caches=caches)
        return True

    def _drop_caches(self) -> None:
        """Forgets all caches; no row is running."""
        self._owners: list[Request | None] = [None] * self.slots  # whose state a slot holds
        self._memory = Memory(self._block)
        self._paging: Paging | None = None
        self._state: Slots | None = None

    def _take_blocks(self) -> None:
        """Gives each row the blocks that its next step needs; if there are none, the newest row must wait again."""
        for row in sorted(self._running(), key=lambda row: row._order):
            while row in self._rows:
                length = len(row.prompt) + min(row._issued + self.num_drafts, row._limit)
                missing = self._memory.num_blocks(length) - len(row._blocks)
                if missing <= 0 or self._memory.make_room(missing):
                    row._blocks += self._memory.take(max(missing, 0))
                    break
                if self._pending:  # rows may have ended
                    self._read_all_but(0)
                elif self._job is not None:
                    self._put_back(self._job.request)
                else:
                    self._put_back(max(self._running(), key=lambda row: row._order))

    def _put_back(self, request: Request) -> None:
        """Lets a request wait again, without its blocks; its text is computed again later."""
        if self._job is not None and self._job.request is request:
            self._job = None
        else:
            self._rows[self._rows.index(request)] = None
        self._memory.forget(request)
        self._memory.end(request)
        self._waiting.appendleft(request)

    def _advance(self, job: Prefill) -> int:
        """Computes the next chunk of a prompt, starts its row after the last one, and returns the number of tokens."""
        request, make = job.request, self.generator
        if request._cancelled:
            request._fail(RuntimeError("the request was cancelled"))
            self._memory.end(request)
            self._job = None
            return 0
        num_left = len(job.text) - job.num_done
        count = min(num_left, self.chunk) if self._splits and not request._inputs else num_left
        if count:
            shape = (1, min(bucket(count), job.num_blocks * self._block))
            tokens, valid, after = np.zeros(shape, np.int32), np.zeros(shape, bool), np.full(shape, -1, np.int32)
            tokens[0, :count], valid[0, :count] = job.text[job.num_done : job.num_done + count], True
            following = job.text[job.num_done + 1 : job.num_done + 1 + count]
            after[0, : len(following)] = following
            if job.caches is None:
                job.caches, job.hidden, routes = prefill(
                    make.packed,
                    tokens,
                    valid,
                    after,
                    request._inputs,
                    making=self._making(self._memory.size),
                    paging=self._paging,
                    num_blocks=job.num_blocks,
                    record=self.record_routes,
                    dtype=make.dtype,
                )
            else:
                job.caches, job.hidden, routes = extend(
                    make.packed, job.caches, tokens, valid, after, record=self.record_routes, dtype=make.dtype
                )
            job.num_done += count
            if routes is not None:
                job.routes.append(np.asarray(routes)[:count])
        if job.num_done == len(job.text):
            self._insert(job)
            self._job = None
        return count

    def _insert(self, job: Prefill) -> None:
        """Starts the row of a text that is computed."""
        request, slot, vocab = job.request, job.slot, self.generator.vocab
        state, paging = self._state, self._paging
        assert job.caches is not None and paging is not None
        if state is None:
            state = empty_slots(
                job.caches,
                request._key,
                slots=self.slots,
                num_blocks=len(self._memory),
                num_drafts=self.num_drafts if self._mtp or self._drafter is not None else 0,
                paging=paging,
            )
        if request._options.sampler.penalizes and state.history is None:
            shape = (self.slots, vocab)
            history = History(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))
            state = dataclasses.replace(state, history=history)
        history = None
        if state.history is not None:
            seen, counts = (np.bincount(np.asarray(ids, int), minlength=vocab) for ids in (job.text, request.tokens))
            history = History(jnp.asarray(seen[None] > 0), jnp.asarray(counts[None], jnp.int32))
        (table,) = tables_of([request._blocks], job.num_blocks)
        table[: len(job.shared)] = NOWHERE
        if state.view is not None:
            state = dataclasses.replace(state, view=None)  # it lacks this row
        self._state, draws = insert(
            self.generator.packed,
            self._drafter,
            state,
            job.caches,
            job.hidden,
            table,
            request._key,
            slot,
            np.array([len(request.tokens)], np.int32),
            history,
            settings_of([request], vocab),
            bias_of([request], vocab),
            features=self._features_of([request]),
            paging=paging,
            impl=self._impl,
        )
        request._issued, request._slot = len(request.tokens) + 1, slot
        if job.routes:  # a row that is computed again keeps those of its draws
            request._routes.append(np.concatenate(job.routes)[sum(map(len, request._routes)) :])
        self._rows[slot] = None if request._issued == request._limit else request
        former, self._owners[slot] = self._owners[slot], request
        if former is not None and not self._rewinds:  # its state is gone
            self._memory.forget(former)
        if self._is_kept(request):
            self._memory.cached.append(request)
        self._memory.keep_prompt(job)
        self._pending.append(([_Drawing(0, slot, request, self.version)], draws))

    def _start(self) -> None:
        """Starts a step of all rows, whose tokens are read later."""
        assert self._state is not None
        slots = self._slots_to_run()
        rows = [self._rows[slot] if slot < self.slots else None for slot in slots]
        bias = bias_of(rows, self.generator.vocab)
        rows = [None if row is None or row.done else row for row in rows]  # a row whose processor fails does not run
        if rows != self._rows_of_settings:
            self._rows_of_settings, self._settings = rows, settings_of(rows, self.generator.vocab)
        self.num_steps += 1
        drafts, num_drafts = draft_tokens(rows, self.num_drafts, by_model=self._mtp or self._drafter is not None)
        self.num_drafted += int(num_drafts.sum())
        width = self._memory.num_read(max(len(row.prompt) + row._issued + self.num_drafts for row in self._running()))
        tables = tables_of([[] if row is None else row._blocks for row in rows], width)
        if self.cache_tokens is None and (
            self._state.view is None or (slots, width) != (self._last_slots, self._width)
        ):
            self._width, view = width, gather_view(self._state.caches, tables, paging=self._paging)
            self._state = dataclasses.replace(self._state, view=view)
        self._state, draws = step(
            self.generator.packed,
            self._drafter,
            self._state,
            None if len(slots) == self.slots else np.array(slots, np.int32),
            tables,
            np.array([row is not None for row in rows]),
            drafts,
            num_drafts,
            self._settings,
            bias,
            features=self._features_of(rows),
            paging=self._paging,
            record=self.record_routes,
            dtype=self.generator.dtype,
            impl=self._impl,
        )
        self._last_slots, drawings = slots, []
        for n, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            if row is not None:
                row._issued += 1
                # The slot becomes free after the row's last step.
                self._rows[slot] = None if row._issued == row._limit else row
                drawings.append(_Drawing(n, slot, row, self.version))
        self._pending.append((drawings, draws))

    def _slots_to_run(self) -> list[int]:
        """Returns the slots whose rows take part in a step: all, or fewer when most have no row, the last ones of which
        may not exist.
        """
        active = [slot for slot, row in enumerate(self._rows) if row is not None]
        count = min(count for count in self._row_counts if count >= len(active))
        if count == self.slots:
            return list(range(count))
        if len(self._last_slots) == count and set(active) <= set(self._last_slots):  # their view is kept
            return self._last_slots
        return active + [self.slots] * (count - len(active))

    def _features_of(self, rows: Sequence[Request | None]) -> Features:
        """Returns what a step must compute: also what earlier rows needed, so that a mixture of rows has few programs,
        until the engine is idle.
        """
        self._features |= features_of(rows)
        return self._features

    def _read_all_but(self, count: int) -> None:
        """Reads the tokens of all steps but the last `count`."""
        while len(self._pending) > count:
            self._read(*self._pending.popleft())

    def _read(self, drawings: list[_Drawing], draws: Draws) -> None:
        """Appends the tokens of a step to its rows, and frees the slots of those that end."""
        draws = jax.device_get(draws)
        tokens, log_probs, taken = (x.tolist() for x in (draws.token, draws.log_prob, draws.taken))
        for n, slot, row, version in drawings:
            self.num_accepted += taken[n]
            # A row that stopped may be in one more step, which had already been started.
            for place in range(0 if row.done else 1 + taken[n]):
                if row._options.alternatives and draws.best is not None:
                    best, best_log_probs = (x[n, place, : row._options.alternatives].tolist() for x in draws.best)
                    row.best.append((best, best_log_probs))
                if draws.routes is not None:
                    row._routes.append(np.asarray(draws.routes[n, place : place + 1]))
                row._add(tokens[n][place], log_probs[n][place], version)
                if row.done:
                    break
            row._issued = max(row._issued, len(row.tokens))
            if row.done:
                self._rows[slot] = None if self._rows[slot] is row else self._rows[slot]
                self._memory.end(row)
            row._tell()

    def _fail_all(self, error: BaseException) -> None:
        """Ends all requests with an error: after it the caches are lost."""
        job = [] if self._job is None else [self._job.request]
        pending = [drawing.row for drawings, _ in self._pending for drawing in drawings]
        for row in [*self._waiting, *self._rows, *job, *pending]:
            if row is not None and not row.done:
                row._fail(error)
        self._reset()


def _check_rows(model: Any) -> None:
    """Raises ValueError if some array of the cache does not begin with the axis of rows."""
    if (fault := without_rows(model)) is not None:
        raise ValueError(
            f"{type(model).__name__}: the first axis of the cache's array {fault}; without it a slot cannot get a new row: "
            "use inference.Generator"
        )
