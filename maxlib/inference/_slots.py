"""Programs of `LocalEngine`: what the devices compute for its slots.

Shapes: S slots, N drafts of a row in a step, M = N + 1 tokens that it runs, T tokens of a chunk with padding, D width,
    V vocabulary, A alternatives. A slot has its row's last token, which is drawn but not run; those before it are in
    the row's caches (`_pages`).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from maxlib import nn
from maxlib.inference._generate import Packed
from maxlib.inference._pages import Caches, Making, Paging, of_slots, with_slots
from maxlib.inference._sampling import best, draw, in_nucleus, scaled, without_unlikely


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

    temperature: Float[Array, " S"]
    top_k: Int[Array, " S"]
    top_p: Float[Array, " S"]
    log_min_p: Float[Array, " S"]
    penalties: Float[Array, "S 3"]


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
        caches: The storage of the tokens that were run.
        view: The rows as a step reads them (`_pages`), if that is kept.
        token: The token after them.
        drafts: Guesses of the tokens after `token`; None without a model that drafts.
        keys: Data of the rows' random keys.
        drawn: Number of tokens drawn for the row.
        history: None until a row has penalties.
    """

    caches: Caches
    view: list[Any] | None
    token: Int[Array, " S"]
    drafts: Int[Array, "S N"] | None
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
        routes: Experts of the tokens that were run, for L layers X each; None unless the engine records them.
    """

    token: Int[Array, "S M"]
    log_prob: Float[Array, "S M"]
    taken: Int[Array, " S"]
    best: tuple[Int[Array, "S M A"], Float[Array, "S M A"]] | None
    routes: Int[Array, "S M L X"] | None = None


@functools.partial(jax.jit, static_argnames="count")
def split_key(key: Key[Array, ""], count: int) -> UInt32[Array, "count K"]:
    """Returns the data of the keys of rows."""
    return jax.random.key_data(jax.random.split(key, count))


@functools.partial(jax.jit, static_argnames=("making", "paging", "num_blocks", "record", "dtype"))
def prefill(
    packed: Packed,
    tokens: Int[Array, "1 T"],
    valid: Bool[Array, "1 T"],
    after: Int[Array, "1 T"],
    inputs,
    *,
    making: Making,
    paging: Paging,
    num_blocks: int,
    record: bool,
    dtype,
):
    """Runs a prompt, or its first chunk, and returns its caches, the hidden state of its last token, `1 1 D`, and its
    routes, `T L X` or None.

    Args:
        packed: The model.
        tokens: The tokens.
        valid: False for padding.
        after: The token after each, -1 where it is not known; only the MTP module reads them.
        inputs: Images and audio by name.
        making: How caches are made.
        paging: How they will be stored.
        num_blocks: Number of blocks for which the caches have room.
        record: True returns the routes.
        dtype: Dtype of the computation.
    """
    model = packed.unpacked()
    caches = paging.empty_row(model, making, num_blocks)
    return _run(model, caches, tokens, valid, after, inputs, record, dtype)


@functools.partial(jax.jit, static_argnames=("record", "dtype"), donate_argnames="caches")
def extend(
    packed: Packed,
    caches,
    tokens: Int[Array, "1 T"],
    valid: Bool[Array, "1 T"],
    after: Int[Array, "1 T"],
    *,
    record,
    dtype,
):
    """Runs the next chunk of a prompt, and returns the same as `prefill`."""
    return _run(packed.unpacked(), caches, tokens, valid, after, {}, record, dtype)


def _called(model, record: bool, tokens, **inputs):
    """Returns the model's output and its routes, or None."""
    return nn.router.record(model)(tokens, **inputs) if record else (model(tokens, **inputs), None)


def _run(model, caches, tokens, valid, after, inputs, record, dtype):
    out, routes = _called(model, record, tokens, valid=valid, cache=caches.model, dtype=dtype, **inputs)
    mtp = caches.mtp
    if mtp is not None:
        _, mtp = model.draft(out.hidden, jnp.maximum(after, 0), valid=after >= 0, cache=mtp)
    last = jax.lax.dynamic_slice_in_dim(out.hidden, valid.sum() - 1, 1, axis=1)
    return Caches(out.cache, mtp), last, None if routes is None else routes[0]


def _ahead(model, hidden: Float[Array, "S M D"], after: Int[Array, "S M"], valid, mtp, place: Int[Array, " S"]):
    """Runs the MTP module over tokens, and returns its guess after a place of each row, `S 1`, and its cache."""
    hidden, mtp = model.draft(hidden, after, valid=valid, cache=mtp)
    last = jnp.take_along_axis(hidden, place[:, None, None], axis=1)
    return best(model.logits(last)), mtp


@functools.partial(jax.jit, static_argnames=("slots", "num_blocks", "num_drafts", "paging"))
def empty_slots(row: Caches, key, *, slots: int, num_blocks: int, num_drafts: int, paging: Paging) -> Slots:
    """Makes the arrays of empty slots, of the shapes of one row; `num_drafts` is 0 unless a model drafts."""
    zeros = jnp.zeros(slots, jnp.int32)
    drafts = jnp.zeros((slots, num_drafts), jnp.int32) if num_drafts else None
    keys = jnp.zeros((slots, *key.shape), key.dtype)
    return Slots(paging.empty(row, slots, num_blocks), None, zeros, drafts, keys, zeros, None)


@functools.partial(jax.jit, static_argnames=("features", "paging", "impl"), donate_argnames="state")
def insert(
    packed: Packed,
    packed_drafter: Packed | None,
    state: Slots,
    caches: Caches,
    hidden: Float[Array, "1 1 D"],
    table: Int[Array, " N"],
    key: UInt32[Array, " K"],
    slot,
    drawn: Int[Array, " 1"],
    history: History | None,
    settings: Settings,
    bias: Float[Array, "1 V"] | None,
    *,
    features: Features,
    paging: Paging,
    impl: str,
):
    """Draws the next token of a text, and stores its row in a slot, overwriting the previous row completely.

    Args:
        packed: The model.
        packed_drafter: A model that drafts for it, or None.
        state: All slots.
        caches: The text's caches.
        hidden: The hidden state of its last token.
        table: The blocks to store the text in, `NOWHERE` for those that have it.
        key: Data of the row's key.
        slot: Index of the slot.
        drawn: Number of tokens of the text that were drawn.
        history: Tokens of the row; None unless the state has a history.
        settings: Settings of the row.
        bias: What processors add to the logits; None without any.
        features: What must be computed.
        paging: How caches are stored.
        impl: Implementation of the key.

    Returns:
        The new state, and the draws of one row.
    """
    model, drafter = packed.unpacked(), None if packed_drafter is None else packed_drafter.unpacked()
    logits = model.logits(hidden).astype(jnp.float32)
    draws = _draw(logits, key[None], drawn, history, settings, bias, features, impl)
    token = draws.token[:, 0]
    if history is not None:
        history = _counted(history, token, jnp.array([True]))
    if caches.mtp is None:
        count = 0 if state.drafts is None else state.drafts.shape[1]
        drafts = None if drafter is None else drafter.draft(model, hidden, token, caches.model, count=count)
    else:
        drafts, mtp = _ahead(model, hidden, token[:, None], None, caches.mtp, jnp.zeros(1, jnp.int32))
        caches = Caches(caches.model, mtp)

    def put(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, slot, axis=0), old, new)

    state = Slots(
        paging.write_row(state.caches, caches, table, slot),
        None,
        put(state.token, token),
        put(state.drafts, drafts),
        put(state.keys, key[None]),
        put(state.drawn, drawn + 1),
        put(state.history, history),
    )
    return state, draws


@functools.partial(jax.jit, static_argnames=("features", "paging", "record", "dtype", "impl"), donate_argnames="state")
def step(
    packed: Packed,
    packed_drafter: Packed | None,
    state: Slots,
    slots: Int[Array, " R"] | None,
    tables: Int[Array, "R blocks"],
    active: Bool[Array, " R"],
    drafts: Int[Array, "R N"] | None,
    num_drafts: Int[Array, " R"],
    settings: Settings,
    bias: Float[Array, "R V"] | None,
    *,
    features: Features,
    paging: Paging,
    record: bool,
    dtype,
    impl: str,
) -> tuple[Slots, Draws]:
    """Runs the last token of each active row and its drafts, and draws the tokens after them.

    Its R rows are those of `slots`, or of all slots without them.

    A draft counts if it is the token that is drawn in its place. So a row has the same tokens as without drafts:
    this is rejection sampling (Leviathan et al. 2023, arXiv:2211.17192) with certain drafts, which are accepted with
    their probability under the model, and replaced by a draw among the other tokens.

    Returns:
        The new state, and the draws.
    """
    model, drafter = packed.unpacked(), None if packed_drafter is None else packed_drafter.unpacked()
    rows = jax.tree.map(
        lambda x: of_slots(x, slots), (state.token, state.drafts, state.keys, state.drawn, state.history)
    )
    token, own_drafts, keys, drawn, history = rows
    drafts = own_drafts if drafts is None else drafts
    assert drafts is not None
    inputs = jnp.concatenate([token[:, None], drafts], axis=1)  # [R, M]
    place = jnp.arange(inputs.shape[1])[None]
    valid = active[:, None] & (place <= num_drafts[:, None])
    view = state.view
    before = paging.read(state.caches, tables, slots) if view is None else paging.with_view(state.caches, view, slots)
    out, routes = _called(model, record, inputs, valid=valid, cache=before.model, dtype=dtype)
    logits = model.logits(out.hidden).astype(jnp.float32)
    draws = _draw(logits, keys, drawn, history, settings, bias, features, impl)
    right = (draws.token[:, :-1] == drafts) & (place[:, 1:] <= num_drafts[:, None])
    taken = jnp.cumprod(right, axis=1).sum(axis=1)
    num_new = jnp.where(active, 1 + taken, 0)
    caches, last = Caches(out.cache, before.mtp), jnp.take_along_axis(draws.token, taken[:, None], axis=1)[:, 0]
    token = jnp.where(active, last, token)
    if drafts.shape[1]:  # later slots are overwritten
        caches = caches.with_length(before.model.length + num_new)
    next_drafts = None
    if before.mtp is not None:
        used = active[:, None] & (place <= taken[:, None])
        next_drafts, mtp = _ahead(model, out.hidden, draws.token, used, before.mtp, taken)
        caches = Caches(caches.model, mtp)
    elif drafter is not None:
        last = jnp.take_along_axis(out.hidden, taken[:, None, None], axis=1)
        next_drafts = drafter.draft(model, last, token, caches.model, count=drafts.shape[1])
    history = None if history is None else _counted(history, token, active)
    draws = dataclasses.replace(draws, taken=taken, routes=routes)
    new = (token, next_drafts, keys, drawn + num_new, history)
    old = (state.token, state.drafts, state.keys, state.drawn, state.history)
    return Slots(
        paging.write_tokens(state.caches, caches, tables, slots, before.model.length, inputs.shape[1]),
        None if view is None else paging.view(caches),
        *jax.tree.map(lambda x, rows: with_slots(x, slots, rows), old, new),
    ), draws


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
    # The best score is 0, so that this log-sum-exp needs no maximum.
    total = jnp.log(jnp.sum(jnp.exp(scores), axis=-1, keepdims=True))
    changed = logits
    if history is not None:
        changed = _penalized(changed, history, settings.penalties)
    if bias is not None:
        changed = changed + bias[:, None]
    token = best(changed)
    if features.samples:
        changed_scores = scores
        if changed is not logits:
            changed_scores = scaled(changed, jnp.where(greedy, 1.0, settings.temperature[:, None, None]))
        number = drawn[:, None] + jnp.arange(M)[None]  # [S, M]
        fold_in = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)))
        draw_keys: Key[Array, "S M"] = fold_in(jax.random.wrap_key_data(keys, impl=impl), number)
        # [S, M, V] -> [S M, V], with each row's settings M times
        per_place = jax.tree.map(lambda x: jnp.repeat(x, M, axis=0), settings)
        filtered = _filtered(changed_scores.reshape(S * M, V), per_place, features)
        token = jnp.where(greedy[..., 0], token, draw(filtered, draw_keys.reshape(-1)).reshape(S, M))
    log_prob = (jnp.take_along_axis(scores, token[..., None], axis=-1) - total)[..., 0]
    alternatives = None
    if features.alternatives:
        best_scores, best_tokens = jax.lax.top_k(scores, min(features.alternatives, V))
        alternatives = (best_tokens, best_scores - total)
    return Draws(token, log_prob, jnp.zeros(S, jnp.int32), alternatives)


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
def score_tokens(packed: Packed, tokens: Int[Array, "1 T"], valid: Bool[Array, "1 T"], *, alternatives, dtype):
    """Returns the log-probability of the token after each place, `T`, and the best tokens with theirs, `T A`."""
    model = packed.unpacked()
    hidden = model(tokens, valid=valid, dtype=dtype).hidden[0]

    # A few places at a time: [T, V] in float32 would be much larger than anything else.
    def score(place: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x, target = place
        scores = jax.nn.log_softmax(model.logits(x[None, None])[0, 0].astype(jnp.float32))
        best, ids = jax.lax.top_k(scores, min(alternatives, len(scores)))
        return scores[target], ids.astype(jnp.int32), best

    return jax.lax.map(score, (hidden, jnp.roll(tokens[0], -1)), batch_size=32)
