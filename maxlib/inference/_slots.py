"""Programs of `LocalEngine`: what the devices compute for its slots.

Shapes: S slots, N drafts of a row in a step, M = N + 1 tokens that it runs, T tokens of a chunk with padding, D width,
    V vocabulary, A alternatives. A slot holds its row's cache, and the row's last token, which is drawn but not run.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from maxlib import nn
from maxlib.inference._generate import empty_cache
from maxlib.inference._sampling import in_nucleus, scaled, without_unlikely


@nn.pytree
class Settings:
    """Settings of the samplers of rows, as arrays: rows of one step may have different ones.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        log_min_p: Logarithm of `min_p`; `-inf` keeps all.
        penalties: The repetition, presence and frequency penalties.
    """

    temperature: Float[Array | np.ndarray, " S"]
    top_k: Int[Array | np.ndarray, " S"]
    top_p: Float[Array | np.ndarray, " S"]
    log_min_p: Float[Array | np.ndarray, " S"]
    penalties: Float[Array | np.ndarray, "S 3"]


@dataclasses.dataclass(frozen=True)
class Features:
    """What a step must compute besides the greedy token, because a row needs it; a static argument.

    Attributes:
        samples: Some row does not decode greedily.
        top_k: The largest `top_k` of the rows, rounded up to a power of two; 0 if none has this filter.
        top_p: Some row has this filter.
        min_p: Some row has this filter.
        alternatives: Number of the best tokens to return with their log-probabilities, rounded up as well.
    """

    samples: bool = False
    top_k: int = 0
    top_p: bool = False
    min_p: bool = False
    alternatives: int = 0

    def __or__(self, other: "Features") -> "Features":
        """Returns what serves the rows of both."""
        return Features(
            *(max(a, b) for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )


@nn.pytree
class History:
    """The tokens of rows, for penalties.

    Attributes:
        seen: Tokens that the prompt or the completion has.
        counts: How often the completion has each.
    """

    seen: Bool[Array, "S V"]
    counts: Int[Array, "S V"]


@nn.pytree
class Slots:
    """Arrays of all slots.

    Attributes:
        cache: Caches of the tokens that were run.
        token: The token after them.
        keys: Data of the rows' random keys.
        drawn: Number of tokens drawn for the row.
        history: None until a row has penalties.
    """

    cache: nn.cache.Cache
    token: Int[Array, " S"]
    keys: UInt32[Array, "S K"]
    drawn: Int[Array, " S"]
    history: History | None


@nn.pytree
class Draws:
    """Tokens that a step drew.

    Attributes:
        token: The token after each of the M that were run.
        log_prob: Its log-probability, before penalties, processors and filters.
        taken: Number of leading drafts that were right; the tokens after them do not count, but the first one.
        best: The best tokens and their log-probabilities; None without alternatives.
    """

    token: Int[Array | np.ndarray, "S M"]
    log_prob: Float[Array | np.ndarray, "S M"]
    taken: Int[Array | np.ndarray, " S"]
    best: tuple[Int[Array | np.ndarray, "S M A"], Float[Array | np.ndarray, "S M A"]] | None


@functools.partial(jax.jit, static_argnames=("capacity", "dtype", "cache_dtype"))
def prefill(model, tokens: Int[Array, "1 T"], valid: Bool[Array, "1 T"], inputs, *, capacity, dtype, cache_dtype):
    """Runs a prompt, or its first chunk, and returns its cache and the hidden state of its last token, `1 1 D`."""
    return _run(model, empty_cache(model, 1, capacity, cache_dtype), tokens, valid, inputs, dtype)


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="cache")
def extend(model, cache, tokens: Int[Array, "1 T"], valid: Bool[Array, "1 T"], *, dtype):
    """Runs the next chunk of a prompt, and returns the same as `prefill`."""
    return _run(model, cache, tokens, valid, {}, dtype)


def _run(model, cache, tokens, valid, inputs, dtype):
    out = model(tokens, valid=valid, cache=cache, dtype=dtype, **inputs)
    return out.cache, jax.lax.dynamic_slice_in_dim(out.hidden, valid.sum() - 1, 1, axis=1)


@jax.jit
def take_row(cache: nn.cache.Cache, slot, length) -> nn.cache.Cache:
    """Copies the first `length` tokens of a slot's cache as a cache of one row."""
    row = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, slot, 1), cache)
    return dataclasses.replace(row, length=jnp.full(1, length, jnp.int32))


@functools.partial(jax.jit, static_argnames="slots")
def empty_slots(cache, key, *, slots) -> Slots:
    """Makes the arrays of empty slots, of the shapes of one row."""
    row = Slots(cache, jnp.zeros(1, jnp.int32), key[None], jnp.zeros(1, jnp.int32), None)
    return jax.tree.map(lambda x: jnp.zeros((slots, *x.shape[1:]), x.dtype), row)


def grown(model: Any, cache: nn.cache.Cache, capacity: int, dtype: Any) -> nn.cache.Cache:
    """Returns a cache of a larger capacity with the same contents.

    Token `i` is in slot `i` of a cache that is not full, so arrays only get longer; also where a cache is a ring from
    some capacity on.
    """
    rows = len(cache.length)
    larger = jax.eval_shape(lambda: model.init_cache(rows, capacity, dtype=dtype))
    leaves, tree = jax.tree.leaves(cache), jax.tree.structure(larger)
    shapes = [x.shape for x in jax.tree.leaves(larger)]
    return tree.unflatten(_padded(leaves, shapes=tuple(shapes)))


@functools.partial(jax.jit, static_argnames="shapes")
def _padded(arrays, *, shapes):
    return [
        jnp.pad(x, [(0, new - old) for old, new in zip(x.shape, shape, strict=True)])
        for x, shape in zip(arrays, shapes, strict=True)
    ]


@functools.partial(jax.jit, static_argnames=("features", "impl"), donate_argnames="state")
def insert(model, state: Slots, cache, hidden, key, slot, prompt, settings: Settings, bias, *, features, impl):
    """Draws the first token of a prompt, and writes its row into a slot, overwriting the previous row completely.

    Args:
        model: The model.
        state: All slots.
        cache: The prompt's cache.
        hidden: The hidden state of its last token.
        key: Data of the row's key.
        slot: Index of the slot.
        prompt: Tokens that the prompt has, `1 V`; None unless the state has a history.
        settings: Settings of the row.
        bias: `1 V`, what processors add to the logits; None without any.
        features: What must be computed.
        impl: Implementation of the key.

    Returns:
        The new state, and the draws of one row.
    """
    history = None if prompt is None else History(prompt, jnp.zeros(prompt.shape, jnp.int32))
    logits = model.logits(hidden).astype(jnp.float32)
    draws = _draw(logits, key[None], jnp.zeros(1, jnp.int32), history, settings, bias, features, impl)
    token = draws.token[:, 0]
    if history is not None:
        history = _counted(history, token, jnp.array([True]))
    row = Slots(cache, token, key[None], jnp.ones(1, jnp.int32), history)
    state = jax.tree.map(lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new, slot, axis=0), state, row)
    return state, draws


@functools.partial(jax.jit, static_argnames=("features", "dtype", "impl"), donate_argnames="state")
def step(
    model,
    state: Slots,
    active: Bool[Array, " S"],
    drafts: Int[Array, "S N"],
    num_drafts: Int[Array, " S"],
    settings: Settings,
    bias: Float[Array, "S V"] | None,
    *,
    features,
    dtype,
    impl,
) -> tuple[Slots, Draws]:
    """Runs the last token of each active row and its drafts, and draws the tokens after them.

    A draft counts if it is the token that is drawn in its place. So a row has the same tokens as without drafts:
    this is rejection sampling (Leviathan et al. 2023, arXiv:2211.17192) with certain drafts, which are accepted with
    their probability under the model, and replaced by a draw among the other tokens.

    Returns:
        The new state, and the draws.
    """
    inputs = jnp.concatenate([state.token[:, None], drafts], axis=1)  # [S, M]
    place = jnp.arange(inputs.shape[1])[None]
    valid = active[:, None] & (place <= num_drafts[:, None])
    out = model(inputs, valid=valid, cache=state.cache, dtype=dtype)
    logits = model.logits(out.hidden).astype(jnp.float32)
    draws = _draw(logits, state.keys, state.drawn, state.history, settings, bias, features, impl)
    right = (draws.token[:, :-1] == drafts) & (place[:, 1:] <= num_drafts[:, None])
    taken = jnp.cumprod(right, axis=1).sum(axis=1)
    cache, num_new = out.cache, jnp.where(active, 1 + taken, 0)
    if drafts.shape[1]:  # later slots are overwritten
        cache = dataclasses.replace(cache, length=state.cache.length + num_new)
    token = jnp.take_along_axis(draws.token, taken[:, None], axis=1)[:, 0]
    token = jnp.where(active, token, state.token)
    history = None if state.history is None else _counted(state.history, token, active)
    return Slots(cache, token, state.keys, state.drawn + num_new, history), dataclasses.replace(draws, taken=taken)


def _counted(history: History, token: Int[Array, " S"], active: Bool[Array, " S"]) -> History:
    """Adds a token of each active row. Rows with penalties have no drafts, so a step draws one token of each."""
    row = jnp.arange(len(token))
    return History(history.seen.at[row, token].max(active), history.counts.at[row, token].add(active))


def _draw(
    logits: Float[Array, "S M V"],
    keys: UInt32[Array, "S K"],
    drawn: Int[Array, " S"],
    history: History | None,
    settings: Settings,
    bias: Float[Array, "S V"] | None,
    features: Features,
    impl: str,
) -> Draws:
    """Draws a token from the logits of each place, the n-th token of a row with the row's n-th key."""
    S, M, V = logits.shape
    greedy = settings.temperature[:, None, None] == 0
    # [S, M, V]; greedy rows report log-probabilities at a temperature of 1
    scores = scaled(logits, jnp.where(greedy, 1.0, settings.temperature[:, None, None]))
    log_probs = jax.nn.log_softmax(scores, axis=-1)
    changed = logits
    if history is not None:
        changed = _penalized(changed, history, settings.penalties)
    if bias is not None:
        changed = changed + bias[:, None]
    token = jnp.argmax(changed, axis=-1).astype(jnp.int32)
    if features.samples:
        if changed is not logits:
            scores = scaled(changed, jnp.where(greedy, 1.0, settings.temperature[:, None, None]))
        number = drawn[:, None] + jnp.arange(M)[None]  # [S, M]
        fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
        draw_keys: Key[Array, "S M"] = fold_in(jax.random.wrap_key_data(keys, impl=impl), number)
        # [S, M, V] -> [S M, V], with each row's settings M times
        per_place = jax.tree.map(lambda x: jnp.repeat(x, M, axis=0), settings)
        filtered = _filtered(scores.reshape(S * M, V), per_place, features)
        sampled = jax.vmap(jax.random.categorical)(draw_keys.reshape(-1), filtered).astype(jnp.int32)
        token = jnp.where(greedy[..., 0], token, sampled.reshape(S, M))
    log_prob = jnp.take_along_axis(log_probs, token[..., None], axis=-1)[..., 0]
    best = None
    if features.alternatives:
        best_log_probs, best_tokens = jax.lax.top_k(log_probs, min(features.alternatives, V))
        best = (best_tokens, best_log_probs)
    return Draws(token, log_prob, jnp.zeros(S, jnp.int32), best)


def _penalized(logits: Float[Array, "S M V"], history: History, penalties: Float[Array, "S 3"]) -> Array:
    repetition, presence, frequency = (penalties[:, i, None, None] for i in range(3))
    divided = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(history.seen[:, None], divided, logits)
    counts = history.counts[:, None]
    return logits - frequency * counts - presence * (counts > 0)


def _filtered(logits: Float[Array, "B V"], settings: Settings, features: Features) -> Float[Array, "B V"]:
    """Applies the filters that some row has, as `Sampler.filtered` does."""
    if features.top_k:
        ranked = jax.lax.top_k(logits, min(features.top_k, logits.shape[-1]))[0]
        kth = jnp.take_along_axis(ranked, settings.top_k[:, None] - 1, axis=-1)
        logits = jnp.where((settings.top_k[:, None] > 0) & (logits < kth), -jnp.inf, logits)
    if features.top_p:
        inside = in_nucleus(logits, settings.top_p[:, None]) | (settings.top_p[:, None] >= 1)
        logits = jnp.where(inside, logits, -jnp.inf)
    return without_unlikely(logits, settings.log_min_p[:, None]) if features.min_p else logits


@functools.partial(jax.jit, static_argnames=("alternatives", "dtype"))
def score_tokens(model, tokens: Int[Array, "1 T"], valid: Bool[Array, "1 T"], *, alternatives, dtype):
    """Returns the log-probability of the token after each place, `T`, and the best tokens with theirs, `T A`."""
    hidden = model(tokens, valid=valid, dtype=dtype).hidden[0]

    # A few places at a time: [T, V] in float32 would be much larger than anything else.
    def score(place: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x, target = place
        scores = jax.nn.log_softmax(model.logits(x[None, None])[0, 0].astype(jnp.float32))
        best, ids = jax.lax.top_k(scores, min(alternatives, len(scores)))
        return scores[target], ids.astype(jnp.int32), best

    return jax.lax.map(score, (hidden, jnp.roll(tokens[0], -1)), batch_size=32)
