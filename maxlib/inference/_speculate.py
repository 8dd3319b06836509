"""Speculative decoding (Leviathan et al. 2023, arXiv:2211.17192) with drafts of the model's own MTP module (DeepSeek
V3, arXiv:2412.19437).
"""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxlib import nn
from maxlib.inference._generate import (
    Generator,
    Prompts,
    check_inputs,
    check_length,
    check_room,
    check_stop,
    right_padded,
    shared_capacity,
)


@dataclasses.dataclass(frozen=True)
class Speculated:
    """Result of `speculate`.

    Attributes:
        texts: New tokens of each prompt.
        acceptance: Share of drafts that were accepted.
        steps: Forward passes after that of the prompts.
    """

    texts: list[list[int]]
    acceptance: float
    steps: int


@nn.pytree
class _State:
    """State between two passes: `token` is decided but not cached yet, `draft` is the guess at the token after it."""

    cache: nn.Cache
    draft_cache: nn.Cache
    token: Int[Array, " B"]
    draft: Int[Array, " B"]


def speculate(
    generator: Generator,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    stop_token_ids: Collection[int] = (),
    capacity: int | None = None,
) -> Speculated:
    """Generates the same tokens as `generator.generate` does greedily, with its caches, in fewer forward passes.

    Each pass also checks one draft of the model's first MTP module (Leviathan et al. 2023, arXiv:2211.17192).

    Args:
        generator: A generator whose model drafts (DeepSeek: read it with `num_mtp=1`).
        prompts: Token ids of each prompt.
        max_new_tokens: Most new tokens per prompt.
        stop_token_ids: Ids that end a prompt's completion and are its last token.
        capacity: Tokens that a row of the cache holds, by default as many as needed.

    Returns:
        The texts, and how well the drafts did.

    Raises:
        ValueError: when the model does not draft, or has caches that cannot be rewound, from which a rejected draft
            could not be removed, when a prompt has placeholders of images, or when prompt and new tokens are more than
            the model was made for.
    """
    model, dtype, cache_dtype = generator.model, generator.dtype, generator.cache_dtype
    tokens, valid = right_padded(prompts, generator.vocab)
    stop = check_stop(stop_token_ids, generator.vocab)
    longest = max(map(len, prompts)) + max_new_tokens
    check_length(model, longest)
    capacity = shared_capacity(longest + 1) if capacity is None else capacity
    check_room(prompts, max_new_tokens + 1, capacity)  # a refused draft takes a place, too
    capacity = max(capacity, tokens.shape[1])
    _check_drafts(model, capacity, cache_dtype)
    check_inputs(model, tokens, None)  # the module reads text only
    state = _start(model, tokens, valid, capacity=capacity, dtype=dtype, cache_dtype=cache_dtype)
    rows = [_Row(max_new_tokens, stop) for _ in prompts]
    steps, new, taken = 0, np.asarray(state.token)[:, None], np.zeros(len(rows), bool)
    for row, found in zip(rows, new, strict=True):
        row.add(found)
    while any(row.running for row in rows):
        state, new, taken = _step(model, state, dtype=dtype)
        steps += 1
        for row, found, took in zip(rows, np.asarray(new), np.asarray(taken), strict=True):
            row.check(found, bool(took))
    drafts, accepted = sum(row.drafts for row in rows), sum(row.accepted for row in rows)
    return Speculated([row.text for row in rows], accepted / max(drafts, 1), steps)


class _Row:
    """The text of one prompt so far."""

    def __init__(self, limit: int, stop: frozenset[int]):
        self.limit, self.stop = limit, stop
        self.text: list[int] = []
        self.running, self.drafts, self.accepted = True, 0, 0

    def check(self, found: np.ndarray, took: bool) -> None:
        """Adds the first token of a pass, and the one after the draft if that was accepted."""
        if self.running:
            self.drafts, self.accepted = self.drafts + 1, self.accepted + took
            self.add(found[: 1 + took])

    def add(self, found: np.ndarray) -> None:
        """Adds tokens until the row stops."""
        for token in map(int, found):
            if self.running:
                self.text.append(token)
            self.running = self.running and token not in self.stop and len(self.text) < self.limit


@functools.partial(jax.jit, static_argnames=("capacity", "dtype", "cache_dtype"))
def _start(model, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"], *, capacity, dtype, cache_dtype) -> _State:
    """Runs the prompts, and returns the first token of each and a draft of the second."""
    cache = model.init_cache(tokens.shape[0], capacity, dtype=cache_dtype)
    out = model(tokens, valid=valid, cache=cache, dtype=dtype)
    last = valid.sum(axis=1) - 1
    token = _best(model, _at(out.hidden, last))
    # The draft module needs the next token at each place: the prompt moved left, and at its end the new token.
    after = jnp.roll(tokens, -1, axis=1)
    after = jnp.where(jnp.arange(tokens.shape[1])[None] == last[:, None], token[:, None], after)
    drafts = model.init_draft_cache(tokens.shape[0], capacity, dtype=cache_dtype)
    hidden, drafts = model.draft(out.hidden, after, valid=valid, cache=drafts)
    return _State(out.cache, drafts, token, _best(model, _at(hidden, last)))


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="state")
def _step(model, state: _State, *, dtype) -> tuple[_State, Int[Array, "B 2"], Bool[Array, " B"]]:
    """Runs one pass over `state.token` and its draft.

    Returns:
        The new state, the tokens after both, and True where the draft was right.
    """
    out = model(jnp.stack([state.token, state.draft], axis=1), cache=state.cache, dtype=dtype)
    new = jnp.argmax(model.logits(out.hidden), axis=-1).astype(jnp.int32)
    taken = new[:, 0] == state.draft
    cache = dataclasses.replace(out.cache, length=state.cache.length + 1 + taken)  # later slots are overwritten
    valid = jnp.stack([jnp.ones_like(taken), taken], axis=1)
    hidden, drafts = model.draft(out.hidden, new, valid=valid, cache=state.draft_cache)
    last = taken.astype(jnp.int32)
    token = jnp.take_along_axis(new, last[:, None], axis=1)[:, 0]
    return _State(cache, drafts, token, _best(model, _at(hidden, last))), new, taken


def _at(hidden, place):
    """Returns the hidden states at one place of each row, `B 1 D`."""
    return jnp.take_along_axis(hidden, place[:, None, None], axis=1)


def _best(model, hidden) -> Int[Array, " B"]:
    """Returns the token with the highest score in each row."""
    return jnp.argmax(model.logits(hidden)[:, 0], axis=-1).astype(jnp.int32)


def _check_drafts(model: Any, capacity: int, dtype: Any) -> None:
    """Raises ValueError if the model does not draft, or its caches cannot be rewound."""
    if not isinstance(model, nn.mtp.SupportsDrafting):
        raise ValueError(f"{type(model).__name__} does not draft: it lacks the methods of nn.mtp.SupportsDrafting")
    if any(rope.needs_length for rope in getattr(model, "ropes", ())):
        raise ValueError(
            f"{type(model).__name__} rotates by the length of the text so far, which a draft that is refused makes wrong; "
            "use generator.generate"
        )
    make = lambda: (model.init_cache(1, capacity, dtype=dtype), model.init_draft_cache(1, capacity, dtype=dtype))
    caches = jax.eval_shape(make)
    if not all(nn.cache.can_rewind(cache.layers) for cache in caches):
        kept = {type(one).__name__ for cache in caches for one in nn.cache.layer_caches(cache.layers)}
        raise ValueError(
            f"{type(model).__name__} has layers that keep only a window or a state ({', '.join(sorted(kept))}), from which "
            "a refused draft cannot be taken back; use generator.generate"
        )
