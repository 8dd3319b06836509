"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) with drafts of the model's own MTP module (DeepSeek
V3, arXiv:2412.19437), or of a separate drafter that reads the model's keys (Gemma 4).

Shapes: B rows, T tokens of the longest prompt with padding, N drafts.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxlib import nn
from maxlib.inference._arguments import Prompts, StopIds, check_prompts, check_stop, integer
from maxlib.inference._generate import (
    Audio,
    Generator,
    Images,
    cast_matrices,
    check_inputs,
    check_length,
    check_prefix,
    check_room,
    right_padded,
    shared_capacity,
)


@dataclasses.dataclass(frozen=True)
class Speculated:
    """Result of `speculate`.

    Attributes:
        texts: New tokens of each prompt.
        acceptance: Share of drafts that were accepted.
        steps: Number of forward passes after the prefill.
    """

    texts: list[list[int]]
    acceptance: float
    steps: int


@nn.pytree
class _State:
    """State between two passes: `token` is final but not cached yet, `drafts` are guesses of the next tokens."""

    cache: nn.cache.Cache
    draft_cache: nn.cache.Cache | None  # None with a drafter, which has no keys of its own
    token: Int[Array, " B"]
    drafts: Int[Array, "B N"]


def speculate(
    generator: Generator,
    prompts: Prompts,
    *,
    max_new_tokens: SupportsIndex,
    drafter: Any = None,
    num_drafts: SupportsIndex = 4,
    images: Images | None = None,
    audio: Audio | None = None,
    stop_token_ids: StopIds = (),
    capacity: SupportsIndex | None = None,
) -> Speculated:
    """Generates the same tokens as greedy `generator.generate`, with the same kinds of caches, in fewer forward passes.

    Each pass also verifies drafts (Leviathan et al. 2023, arXiv:2211.17192): one from the model's first MTP module, or
    `num_drafts` from a drafter. Sliding-window caches get an extra slot per draft, to rewind rejected drafts.

    Args:
        generator: A generator whose model drafts (DeepSeek: load it with `num_mtp=1`), or the drafter's target.
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens per prompt.
        drafter: A model that drafts for this one (`nn.mtp.Drafter`), such as a
            `models.gemma4_assistant.Gemma4Assistant`; None uses the model's own module.
        num_drafts: Number of the drafter's drafts in each pass.
        images: With a drafter, images as for `generator.stream`.
        audio: With a drafter, clips as for `generator.stream`.
        stop_token_ids: Ids that end a prompt's completion and are its last token.
        capacity: Maximum number of tokens in a row of the cache, by default as many as needed.

    Returns:
        The texts, and statistics of the drafts.

    Raises:
        ValueError: when the model does not draft, the drafter is for another model, a cache cannot be rewound to
            remove a rejected draft, images or audio do not fit the prompts, or another argument is out of range.
    """
    model, dtype = generator.model, generator.dtype
    texts, stop = check_prompts(prompts, generator.vocab), check_stop(stop_token_ids, generator.vocab)
    limit, longest = integer("max_new_tokens", max_new_tokens), max(map(len, texts))
    check_length(model, longest + limit)
    check_prefix(model, texts)
    _check_source(model, drafter, images if audio is None else audio)
    count = 1 if drafter is None else integer("num_drafts", num_drafts)
    capacity = shared_capacity(longest + limit + count) if capacity is None else integer("capacity", capacity)
    check_room(longest, limit + count, capacity)  # rejected drafts need slots, too
    tokens, valid = right_padded(texts)
    made = _Made(max(capacity, tokens.shape[1]), count, dtype, generator.cache_dtype)
    _check_caches(model, drafter, made)
    seen = check_inputs(model, tokens, images, audio)  # an MTP module only reads text
    drafter = None if drafter is None else cast_matrices(nn.unstack(drafter), dtype)
    state = _start(model, drafter, tokens, valid, seen, made=made)
    rows, steps = [_Row(limit, stop) for _ in texts], 0
    for row, first in zip(rows, np.asarray(state.token), strict=True):
        row.add([first])
    while any(row.running for row in rows):
        state, new, taken = _step(model, drafter, state, made=made)
        steps += 1
        for row, tokens, accepted in zip(rows, np.asarray(new), np.asarray(taken), strict=True):
            row.check(tokens, int(accepted))
    drafts, accepted = sum(row.drafts for row in rows), sum(row.accepted for row in rows)
    return Speculated([row.text for row in rows], accepted / max(drafts, 1), steps)


class _Row:
    """The text of one prompt so far."""

    def __init__(self, limit: int, stop: frozenset[int]):
        self.limit, self.stop = limit, stop
        self.text: list[int] = []
        self.running, self.drafts, self.accepted = True, 0, 0

    def check(self, tokens: np.ndarray, accepted: int) -> None:
        """Adds the tokens of a pass: the accepted drafts and the token after them."""
        if self.running:
            self.drafts, self.accepted = self.drafts + len(tokens) - 1, self.accepted + accepted
            self.add(tokens[: 1 + accepted])

    def add(self, tokens: Iterable[Any]) -> None:
        """Adds tokens until the row stops."""
        for token in map(int, tokens):
            if self.running:
                self.text.append(token)
            self.running = self.running and token not in self.stop and len(self.text) < self.limit


@dataclasses.dataclass(frozen=True)
class _Made:
    """Static parameters of a compiled program: capacity of the cache, drafts per pass, and dtypes."""

    capacity: int
    count: int
    dtype: Any
    cache_dtype: Any

    def cache(self, init: Callable[..., nn.cache.Cache], batch: int) -> nn.cache.Cache:
        """Returns an empty cache from which the drafts of a pass can be rewound."""
        cache = init(batch, self.capacity, dtype=self.cache_dtype)
        # A drafter attends to one key more than the window has.
        return dataclasses.replace(cache, layers=nn.cache.make_rewindable(cache.layers, self.count + 1))


@functools.partial(jax.jit, static_argnames="made")
def _start(model, drafter, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"], seen, *, made: _Made) -> _State:
    """Runs the prompts, and returns the first token of each and drafts of the next ones."""
    out = model(tokens, valid=valid, cache=made.cache(model.init_cache, len(tokens)), dtype=made.dtype, **seen)
    last = valid.sum(axis=1) - 1
    token = _best(model, _at(out.hidden, last))
    if drafter is not None:
        drafts = drafter.draft(model, _at(out.hidden, last), token, out.cache, count=made.count)
        return _State(out.cache, None, token, drafts)
    # The draft module needs the next token at each position: the prompt shifted left, with the new token at its end.
    after = jnp.roll(tokens, -1, axis=1)
    after = jnp.where(jnp.arange(tokens.shape[1])[None] == last[:, None], token[:, None], after)
    drafts = made.cache(model.init_draft_cache, len(tokens))
    hidden, drafts = model.draft(out.hidden, after, valid=valid, cache=drafts)
    return _State(out.cache, drafts, token, _best(model, _at(hidden, last))[:, None])


@functools.partial(jax.jit, static_argnames="made", donate_argnames="state")
def _step(model, drafter, state: _State, *, made: _Made) -> tuple[_State, Int[Array, "B M"], Int[Array, " B"]]:
    """Runs one pass over `state.token` and its drafts.

    Returns:
        The new state, the tokens after each input, and the number of leading drafts that were right.
    """
    inputs = jnp.concatenate([state.token[:, None], state.drafts], axis=1)  # [B, N + 1]
    out = model(inputs, cache=state.cache, dtype=made.dtype)
    new = jnp.argmax(model.logits(out.hidden), axis=-1).astype(jnp.int32)
    # A draft only counts if all before it were right.
    taken = jnp.cumprod(new[:, :-1] == state.drafts, axis=1).sum(axis=1)
    cache = dataclasses.replace(out.cache, length=state.cache.length + 1 + taken)  # later slots are overwritten
    token = jnp.take_along_axis(new, taken[:, None], axis=1)[:, 0]
    if drafter is not None:
        drafts = drafter.draft(model, _at(out.hidden, taken), token, cache, count=made.count)
        return _State(cache, None, token, drafts), new, taken
    valid = jnp.arange(new.shape[1])[None] <= taken[:, None]
    hidden, drafts = model.draft(out.hidden, new, valid=valid, cache=state.draft_cache)
    return _State(cache, drafts, token, _best(model, _at(hidden, taken))[:, None]), new, taken


def _at(hidden, place):
    """Returns the hidden states at one position of each row, `B 1 D`."""
    return jnp.take_along_axis(hidden, place[:, None, None], axis=1)


def _best(model, hidden) -> Int[Array, " B"]:
    """Returns the token with the highest score in each row."""
    return jnp.argmax(model.logits(hidden)[:, 0], axis=-1).astype(jnp.int32)


def _check_source(model: Any, drafter: Any, inputs: Any) -> None:
    """Raises ValueError if there is no valid source of drafts for the model."""
    if drafter is None:
        if not isinstance(model, nn.mtp.SupportsDrafting):
            raise ValueError(
                f"{type(model).__name__} does not draft: it lacks the methods of nn.mtp.SupportsDrafting; pass "
                "drafter=, a model that drafts for it"
            )
        if inputs is not None:
            raise ValueError(
                f"{type(model).__name__} drafts from text only: use generator.generate for images and audio"
            )
        return
    if not isinstance(drafter, nn.mtp.Drafter):
        raise ValueError(
            f"drafter must have the methods of nn.mtp.Drafter, as a gemma4_assistant does, got {type(drafter).__name__}"
        )
    drafter.check_target(model)


def _check_caches(model: Any, drafter: Any, made: _Made) -> None:
    """Raises ValueError if a rejected draft cannot be removed from the caches."""
    if any(rope.needs_length for rope in getattr(model, "ropes", ())):
        raise ValueError(
            f"{type(model).__name__} rotates by the length of the text so far, which a rejected draft makes wrong; "
            "use generator.generate"
        )
    inits = [model.init_cache, *([model.init_draft_cache] if drafter is None else [])]
    caches = [jax.eval_shape(functools.partial(made.cache, init, 1)) for init in inits]
    if not all(nn.cache.can_rewind(cache.layers) for cache in caches):
        kinds = {type(layer).__name__ for cache in caches for layer in nn.cache.layer_caches(cache.layers)}
        raise ValueError(
            f"{type(model).__name__} has layers that only keep a state ({', '.join(sorted(kinds))}), from which a "
            "rejected draft cannot be removed; use generator.generate"
        )
