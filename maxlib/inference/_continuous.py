"""Continuous batching (Orca, Yu et al. 2022): a batch of slots; when a row ends, its slot gets the next prompt.

Shapes: S slots, T tokens of a prompt with padding, D width, V vocabulary. A slot stores the hidden state of the last
    token of its row, from which the next step samples.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

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
    empty_cache,
    right_padded,
    shared_capacity,
)
from maxlib.inference._sampling import GREEDY, Keys, Sampler, check_sampler, scaled


class LocalEngine:
    """An engine on this machine's devices, with continuous batching.

    When a row ends, its slot gets the next prompt, so no slot waits for the longest row. A prompt is computed once for
    all its completions. Samples of a row only depend on its key, not on its slot or other rows. To run on several
    devices, call it inside `sharding.use(layout)`.

        engine = inference.LocalEngine(model, slots=4)
        groups = engine.generate([[1, 2, 3], [4, 5]], num_samples=2, max_new_tokens=2)  # two of each prompt

    Args:
        model: Any `nn.Model`.
        slots: Number of rows decoded at once.
        capacity: Maximum number of tokens in a slot, including the prompt; by default as many as a call needs, rounded
            up.
        dtype: Dtype of the computation.
        cache_dtype: Dtype of cached keys and values, by default `dtype`.
        seed: Seed of the random keys of calls without a key.

    Raises:
        ValueError: when a layer's cache cannot be addressed by row.
    """

    def __init__(
        self,
        model: Any,
        *,
        slots: SupportsIndex = 8,
        capacity: SupportsIndex | None = None,
        dtype: Any = jnp.bfloat16,
        cache_dtype: Any = None,
        seed: int = 0,
    ):
        self.slots, self._keys = integer("slots", slots), Keys(seed)
        self.capacity = None if capacity is None else integer("capacity", capacity)
        self.generator = Generator(model, dtype=dtype, cache_dtype=cache_dtype)
        _check_rows(self.generator.model)

    def update(self, weights: Any) -> None:
        """Replaces weights as `Generator.update` does; compiled programs stay in use."""
        self.generator.update(weights)

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
            key: Random key for sampling. Without it each call of this engine uses a new key: the n-th call always uses
                the same key for a given `seed`. Pass a key derived from the step number if a resumed run must reproduce
                its samples.

        Raises:
            ValueError: when a prompt is empty or does not fit with its new tokens, when ids are outside the vocabulary,
                when the model does not read images or audio, or when they and their placeholders do not match.
        """
        check_sampler(sampler)
        texts, stop = check_prompts(prompts, self.generator.vocab), check_stop(stop_token_ids, self.generator.vocab)
        limits, count = check_limits(max_new_tokens, len(texts)), integer("num_samples", num_samples)
        seen = self._checked_inputs(texts, images, audio)
        capacity = self._checked_capacity(texts, limits)
        key = self._keys(key)
        # The same keys as `Generator.generate` with each prompt repeated `num_samples` times.
        keys = np.asarray(jax.random.key_data(jax.random.split(key, len(texts) * count)))
        rows = [
            _Row(n, i, text, seen[n], limits[n], keys[n * count + i])
            for n, text in enumerate(texts)
            for i in range(count)
        ]
        # Start the longest rows first, so that no slot is left with a long row at the end.
        rows.sort(key=lambda row: -row.limit)
        options = {"sampler": sampler, "impl": str(jax.random.key_impl(key))}
        return _Run(self.generator, self.slots, capacity, options, stop).completions(rows)

    def _checked_inputs(
        self, texts: list[list[int]], images: Sequence[Images | None] | None, audio: Sequence[Audio | None] | None
    ) -> list[dict[str, Images | Audio]]:
        """Returns each prompt's inputs besides its tokens; raises ValueError for images or audio that do not match."""
        images, audio = (_of_prompts("images", images, len(texts)), _of_prompts("audio", audio, len(texts)))
        inputs = zip(right_padded(texts)[0], images, audio, strict=True)
        return [check_inputs(self.generator.model, ids[None], seen, heard) for ids, seen, heard in inputs]

    def _checked_capacity(self, texts: list[list[int]], limits: list[int]) -> int:
        """Returns the required capacity of a slot; raises ValueError for prompts that the model cannot continue."""
        model = self.generator.model
        lengths = [len(text) + limit for text, limit in zip(texts, limits, strict=True)]
        check_length(model, max(lengths))
        check_prefix(model, texts)
        switch = getattr(model, "recompute_cache_at", None)
        if switch is not None and any(len(text) < switch <= n for text, n in zip(texts, lengths, strict=True)):
            raise ValueError(
                f"{type(model).__name__} rotates keys differently from {switch} tokens on, and a row must not cross "
                "that length while decoding: use inference.Generator, which recomputes its cache"
            )
        capacity = self.capacity
        if capacity is None:
            capacity = min(shared_capacity(max(lengths)), getattr(model, "max_length", None) or 1 << 62)
        if max(lengths) > capacity:
            raise ValueError(f"prompt and new tokens must fit the slots' capacity of {capacity}, got {max(lengths)}")
        return capacity


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


@dataclasses.dataclass(eq=False)
class _Row:
    """A completion in progress."""

    prompt: int
    number: int
    ids: list[int]
    seen: dict[str, Images | Audio]  # inputs besides the tokens
    limit: int
    key: np.ndarray
    issued: int = 0  # number of steps started for it; their tokens arrive later
    ended: bool = False
    tokens: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)

    def add(self, token: int, log_prob: float, stop: frozenset[int]) -> FinishReason | None:
        """Appends a token, and returns the finish reason if it is the last one."""
        self.tokens.append(token)
        self.log_probs.append(log_prob)
        reason = "stop" if token in stop else "length" if len(self.tokens) == self.limit else None
        self.ended = reason is not None
        return reason


@nn.pytree
class _Slots:
    """Arrays of all slots."""

    cache: nn.cache.Cache
    hidden: Float[Array, "S 1 D"]
    keys: UInt32[Array, "S K"]
    drawn: Int[Array, " S"]  # tokens drawn for the row


class _Run:
    """The schedule of one call: which row is in which slot."""

    def __init__(self, generator: Generator, slots: int, capacity: int, options: dict[str, Any], stop: frozenset[int]):
        self.generator, self.capacity, self.stop = generator, capacity, stop
        self.options = options | {"dtype": generator.dtype}
        self.rows: list[_Row | None] = [None] * slots
        self.prefilled: Any = (None, None)  # index of a prompt, and its cache and hidden state
        self.state: Any = None

    def completions(self, rows: list[_Row]) -> Iterator[tuple[int, int, Completion]]:
        """Yields completions as they end."""
        waiting, ahead = collections.deque(rows), None
        while True:
            self._fill(waiting)
            # Start the next step before reading the tokens of the last one, so that devices need not wait.
            last, ahead = ahead, self._step() if any(self.rows) else None
            if last is not None:
                yield from self._read(*last)
            elif ahead is None:
                return

    def _fill(self, waiting: collections.deque[_Row]) -> None:
        """Assigns waiting rows to free slots."""
        for slot, row in enumerate(self.rows):
            if row is None and waiting:
                new = self.rows[slot] = waiting.popleft()
                cache, hidden = self._prefill(new)
                if self.state is None:
                    self.state = _empty(cache, hidden, new.key, slots=len(self.rows))
                self.state = _insert(self.state, cache, hidden, new.key, slot)

    def _prefill(self, row: _Row) -> Any:
        """Returns the cache and the last hidden state of a row's prompt, computed once for all its completions."""
        if self.prefilled[0] != row.prompt:
            length = min(_bucket(len(row.ids)), self.capacity)
            tokens, valid = (np.zeros((1, length), dtype) for dtype in (np.int32, bool))
            tokens[0, : len(row.ids)], valid[0, : len(row.ids)] = row.ids, True
            make = self.generator
            options = {"capacity": self.capacity, "dtype": make.dtype, "cache_dtype": make.cache_dtype}
            self.prefilled = row.prompt, _prefill(make.model, tokens, valid, row.seen, **options)
        return self.prefilled[1]

    def _step(self) -> tuple[list[_Row | None], Array, Array]:
        """Starts a step; returns its rows, and their future tokens and log-probabilities."""
        rows, active = list(self.rows), np.array([row is not None for row in self.rows])
        self.state, token, log_prob = _step(self.generator.model, self.state, active, **self.options)
        for slot, row in enumerate(rows):
            if row is not None:
                row.issued += 1
                # The slot becomes free after the row's last step.
                self.rows[slot] = None if row.issued == row.limit else row
        return rows, token, log_prob

    def _read(self, rows: list[_Row | None], token: Array, log_prob: Array) -> Iterator[tuple[int, int, Completion]]:
        """Appends the tokens of a step to its rows, and yields the rows that end."""
        for slot, (row, t, p) in enumerate(zip(rows, np.asarray(token), np.asarray(log_prob), strict=True)):
            # A row that stopped may be in one more step, which had already been started.
            if row is None or row.ended or (reason := row.add(int(t), float(p), self.stop)) is None:
                continue
            if self.rows[slot] is row:
                self.rows[slot] = None
            yield row.prompt, row.number, Completion(row.tokens, row.log_probs, reason, self.options["sampler"])


@functools.partial(jax.jit, static_argnames=("capacity", "dtype", "cache_dtype"))
def _prefill(model, tokens: Int[Array, "1 T"], valid: Bool[Array, "1 T"], seen, *, capacity, dtype, cache_dtype):
    """Runs one prompt, and returns its cache and the hidden state of its last token, `1 1 D`."""
    cache = empty_cache(model, 1, capacity, cache_dtype)
    out = model(tokens, valid=valid, cache=cache, dtype=dtype, **seen)
    last = jax.lax.dynamic_slice_in_dim(out.hidden, valid.sum() - 1, 1, axis=1)
    return out.cache, last


@functools.partial(jax.jit, static_argnames="slots")
def _empty(cache, hidden, key, *, slots) -> _Slots:
    """Makes the arrays of empty slots, of the shapes of one row."""
    row = _Slots(cache, hidden, key[None], jnp.zeros(1, jnp.int32))
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), row)


@functools.partial(jax.jit, donate_argnames="state")
def _insert(state: _Slots, cache, hidden, key, slot) -> _Slots:
    """Writes a prompt's row into a slot, overwriting the previous row completely."""
    row = _Slots(cache, hidden, key[None], jnp.zeros(1, jnp.int32))
    return jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=0), state, row)


@functools.partial(jax.jit, static_argnames=("sampler", "dtype", "impl"), donate_argnames="state")
def _step(model, state: _Slots, active: Bool[Array, " S"], *, sampler, dtype, impl):
    """Draws the next token of each row and runs it.

    Returns:
        The new state, the tokens, and their log-probabilities.
    """
    keys = jax.random.wrap_key_data(state.keys, impl=impl)
    logits = model.logits(state.hidden)[:, 0].astype(jnp.float32)
    token = sampler(logits, jax.vmap(jax.random.fold_in)(keys, state.drawn))
    log_prob = drawn_log_probs(logits, token, sampler.temperature)
    out = model(token[:, None], cache=state.cache, dtype=dtype)
    # Keep free slots empty.
    cache = dataclasses.replace(out.cache, length=jnp.where(active, out.cache.length, 0))
    return _Slots(cache, out.hidden, state.keys, state.drawn + 1), token, log_prob


def drawn_log_probs(logits: Float[Array, "B V"], token: Int[Array, " B"], temperature: float) -> Float[Array, " B"]:
    """Returns the log-probability of each token at a temperature; 0 (greedy) counts as 1."""
    scores = jax.nn.log_softmax(scaled(logits, temperature or 1.0), axis=-1)
    return jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]


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
