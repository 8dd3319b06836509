"""Generation with masked diffusion models: blocks of masks that become tokens in a few passes.

Shapes: B rows (prompts), T tokens of a row, N tokens of a block, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from maxlib import nn, ops
from maxlib._utils.arguments import check_choice
from maxlib.inference._arguments import Prompts, StopIds, check_prompts, check_stop, integer, number
from maxlib.inference._generate import Generator, check_length, empty_cache, max_length, right_padded, shared_capacity
from maxlib.inference._sampling import GREEDY, Sampler, check_sampler
from maxlib.nn.mixer import block_mask

Order = Literal["low_confidence", "random"]


@dataclasses.dataclass(frozen=True)
class Denoised:
    """Result of `denoise`.

    Attributes:
        texts: New tokens of each prompt, including the one that ended it.
        steps: Number of forward passes that unmasked tokens.
    """

    texts: list[list[int]]
    steps: int


def denoise(
    generator: Generator,
    prompts: Prompts,
    *,
    mask_token: SupportsIndex,
    max_new_tokens: SupportsIndex,
    block: SupportsIndex | None = None,
    steps: SupportsIndex | None = None,
    remasking: Order = "low_confidence",
    threshold: float | None = None,
    sampler: Sampler = GREEDY,
    shifted: bool = False,
    stop_token_ids: StopIds = (),
    key: Key[Array, ""] | None = None,
) -> Denoised:
    """Generates with a masked diffusion model, block by block (LLaDA, arXiv:2502.09992; arXiv:2503.09573).

    A block begins as masks. Each step draws a token for every mask, and keeps those of highest confidence, the
    probability that the model gives them: as many as leave an equal number to each step. The rest stay masked.

    A model with the mask `ops.BlockCausal` has blocks that count from the beginning of a text, and caches finished
    ones; the first block holds the end of the prompt. A model with `ops.Full` computes all tokens in every step, with
    masks up to `max_new_tokens`, and its blocks count from the end of the prompt.

        generator = inference.Generator(nn.with_mask(model, ops.BlockCausal(4)))
        inference.denoise(generator, [[1, 2, 3]], mask_token=4, max_new_tokens=8, steps=2).texts

    Args:
        generator: The model, ready to decode.
        prompts: Token ids of each prompt.
        mask_token: Id that stands for a masked token; it is never drawn.
        max_new_tokens: Maximum number of new tokens per prompt.
        block: Tokens of a block; by default those of the model's mask, or `max_new_tokens`.
        steps: Steps per block, by default one for each token.
        remasking: "low_confidence" keeps the most probable tokens of a step, "random" any.
        threshold: Tokens with a higher confidence are kept too, so that a block may need fewer steps; None keeps none.
        sampler: Draws tokens; greedy by default.
        shifted: True if the token before a masked one predicts it (`training.MaskedDiffusion`).
        stop_token_ids: Ids that end a prompt's completion and are its last token.
        key: Random key for sampling, by default a new one in each call of the generator.

    Raises:
        ValueError: when the model's masks are neither `ops.BlockCausal` nor `ops.Full`, `block` is not that of its
            mask, or another argument is out of range.
    """
    check_sampler(sampler)
    check_choice("remasking", remasking, ("low_confidence", "random"))
    texts, stop = check_prompts(prompts, generator.vocab), check_stop(stop_token_ids, generator.vocab)
    count, mask = integer("max_new_tokens", max_new_tokens), _mask(generator.model)
    if mask is not None and shifted:
        raise ValueError("shifted=True is for models without blocks: the first token of a block has none before it")
    size = _block_size(mask, block, count)
    how = _Unmasking(
        mask_token=integer("mask_token", mask_token, least=0),
        steps=size if steps is None else integer("steps", steps),
        threshold=math.inf if threshold is None else number("threshold", threshold),
        at_random=remasking == "random",
        sampler=sampler,
        shifted=shifted,
    )
    if how.mask_token >= generator.vocab:
        raise ValueError(f"mask_token must be below the vocabulary of {generator.vocab} tokens, got {how.mask_token}")
    canvas = _Canvas(texts, count, size, how.mask_token, aligned=mask is not None)
    check_length(max_length(generator.model), canvas.length)
    # The model may have been trained with pairs of rows.
    model = generator.model if mask is None else nn.with_mask(generator.model, ops.BlockCausal(size))
    keys, dtype, num_steps = jax.random.split(generator._keys(key), len(texts)), generator.dtype, 0
    cache = None if mask is None else _prefilled(generator, model, texts, canvas)
    for n in range(canvas.num_blocks):
        first = n * how.steps
        rest = canvas.whole(n) if cache is None else cache
        tokens, used = _fill(model, *canvas.block(n), rest, keys, first, how=how, dtype=dtype)
        num_steps += int(used)
        canvas.put(n, np.asarray(tokens))
        if canvas.is_done(stop):
            break
        if cache is not None and n + 1 < canvas.num_blocks:
            cache = _extended(model, tokens, np.ones(tokens.shape, bool), cache, dtype=dtype)
    return Denoised(canvas.new_tokens(stop), num_steps)


def _mask(model: Any) -> ops.BlockCausal | None:
    """Returns the mask with blocks, None for a model without; raises ValueError if its tokens attend to earlier ones
    only.
    """
    mask, masks = block_mask(model), getattr(model, "masks", ())
    if mask is None and (others := [mask for mask in masks if not isinstance(mask, ops.Full)]):
        raise ValueError(
            f"denoise needs a model whose tokens attend to later ones, got the mask {others[0]}: train one with "
            "nn.with_mask(model, ops.BlockCausal(32)), or generate token by token with Generator.generate"
        )
    return mask


def _block_size(mask: ops.BlockCausal | None, block: SupportsIndex | None, count: int) -> int:
    size = None if block is None else integer("block", block)
    if mask is None:
        return count if size is None else size
    if size not in (None, mask.block):
        raise ValueError(f"block must be that of the model's mask, {mask.block}, got {size}")
    return mask.block


class _Canvas:
    """Prompts with masks behind them, in blocks.

    Args:
        prompts: Ids of each prompt.
        count: Number of new tokens.
        size: Tokens of a block.
        mask_token: Id of masks.
        aligned: True if blocks count from the beginning of a row, False if from the end of its prompt.
    """

    def __init__(self, prompts: list[list[int]], count: int, size: int, mask_token: int, *, aligned: bool):
        self._lengths, self._size, self._count = np.array([len(prompt) for prompt in prompts]), size, count
        self._ends = self._lengths + count
        self.starts = self._lengths // size * size if aligned else self._lengths
        self.num_blocks = int(np.max(-(-(self._ends - self.starts) // size)))
        width = int(self.starts.max()) + self.num_blocks * size
        self.length = width if aligned else int(self._ends.max())  # tokens that the model meets
        self._tokens = np.full((len(prompts), width), mask_token, np.int32)
        for row, prompt in enumerate(prompts):
            self._tokens[row, : len(prompt)] = prompt
        column = np.arange(width)
        self._valid = column < (width if aligned else self._ends[:, None])
        self._is_masked = self._valid & (column >= self._lengths[:, None])
        self._filled = self._lengths

    def _columns(self, n: int) -> Int[np.ndarray, "B N"]:
        return self.starts[:, None] + n * self._size + np.arange(self._size)

    def block(self, n: int) -> tuple[Int[np.ndarray, "B N"], Bool[np.ndarray, "B N"]]:
        """Returns the tokens of each row's block, and which of them are masked."""
        columns = self._columns(n)
        return np.take_along_axis(self._tokens, columns, axis=1), np.take_along_axis(self._is_masked, columns, axis=1)

    def whole(self, n: int) -> tuple[Array | np.ndarray, ...]:
        """Returns all tokens, which of them are real, and the columns of each row's block."""
        return self._tokens, self._valid, self._columns(n)

    def put(self, n: int, tokens: Int[np.ndarray, "B N"]) -> None:
        """Writes the tokens of each row's block."""
        columns = self._columns(n)
        np.put_along_axis(self._tokens, columns, tokens, axis=1)
        self._filled = np.minimum(columns[:, -1] + 1, self._ends)

    def new_tokens(self, stop: frozenset[int]) -> list[list[int]]:
        """Returns the new tokens of each row, up to the first that stops it."""
        rows = [row[a:b].tolist() for row, a, b in zip(self._tokens, self._lengths, self._filled, strict=True)]
        ends = [next((i + 1 for i, token in enumerate(row) if token in stop), len(row)) for row in rows]
        return [row[:end] for row, end in zip(rows, ends, strict=True)]

    def is_done(self, stop: frozenset[int]) -> bool:
        """Returns whether a token in each row stops it."""
        return all(row and row[-1] in stop for row in self.new_tokens(stop))


@dataclasses.dataclass(frozen=True)
class _Unmasking:
    """How masks become tokens; see `denoise`."""

    mask_token: int
    steps: int
    threshold: float
    at_random: bool
    sampler: Sampler
    shifted: bool

    def draw(self, logits: Float[Array, "B N V"], keys: Key[Array, " B"]) -> tuple[Array, Array]:
        """Returns a token for each mask, and its confidence, `B N` each."""
        B, N, V = logits.shape
        logits = logits.astype(jnp.float32).at[..., self.mask_token].set(-jnp.inf)
        # [B] -> [B, N + 1]: a key for each token, and one for the order
        keys = jax.vmap(functools.partial(jax.random.split, num=N + 1))(keys)
        drawn = self.sampler(logits.reshape(B * N, V), keys[:, :N].reshape(B * N)).reshape(B, N)
        if self.at_random:
            return drawn, jax.vmap(functools.partial(jax.random.uniform, shape=(N,)))(keys[:, N])
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), drawn[..., None], axis=2)
        return drawn, jnp.exp(log_probs[..., 0])


@functools.partial(jax.jit, static_argnames=("how", "dtype"))
def _fill(
    model: Any,
    tokens: Int[Array, "B N"],
    is_masked: Bool[Array, "B N"],
    rest: Any,
    keys: Key[Array, " B"],
    first: Int[Array, ""],
    *,
    how: _Unmasking,
    dtype: Any,
) -> tuple[Int[Array, "B N"], Int[Array, ""]]:
    """Returns a block without masks, and the number of steps; `rest` is a cache, or `_Canvas.whole`."""
    total = is_masked.sum(axis=1)

    def step(state):
        i, tokens, is_masked = state
        logits = model.logits(_block_hidden(model, tokens, rest, shifted=how.shifted, dtype=dtype))
        drawn, confidence = how.draw(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, first + i))
        confidence = jnp.where(is_masked, confidence, -jnp.inf)
        # The steps share the masks of each row evenly, [B]; the first take one more.
        due = total // how.steps + (i < total % how.steps)
        rank = jnp.argsort(jnp.argsort(-confidence, axis=1), axis=1)  # 0 for the highest confidence
        chosen = is_masked & ((rank < due[:, None]) | (confidence > how.threshold))
        return i + 1, jnp.where(chosen, drawn, tokens), is_masked & ~chosen

    def has_masks(state):
        return (state[0] < how.steps) & state[2].any()

    steps, tokens, _ = jax.lax.while_loop(has_masks, step, (jnp.zeros((), jnp.int32), tokens, is_masked))
    return tokens, steps


def _block_hidden(
    model: Any, tokens: Int[Array, "B N"], rest: Any, *, shifted: bool, dtype: Any
) -> Float[Array, "B N D"]:
    """Returns the hidden states that predict the tokens of a block."""
    if isinstance(rest, nn.cache.Cache):
        return model(tokens, cache=rest, dtype=dtype).hidden  # the cache with these tokens is dropped
    canvas, valid, columns = rest
    canvas = canvas.at[jnp.arange(len(canvas))[:, None], columns].set(tokens)
    hidden = model(canvas, valid=valid, dtype=dtype).hidden
    # [B, T, D] -> [B, N, D]
    return jnp.take_along_axis(hidden, (columns - shifted)[..., None], axis=1)


def _prefilled(generator: Generator, model: Any, texts: list[list[int]], canvas: _Canvas) -> nn.cache.Cache:
    """Returns a cache of the whole blocks of each prompt."""
    capacity = shared_capacity(canvas.length)
    cache = empty_cache(model, len(texts), capacity, generator.cache_dtype)
    if not canvas.starts.any():
        return cache
    tokens, valid = right_padded([text[:n] for text, n in zip(texts, canvas.starts, strict=True)], most=capacity)
    return _extended(model, tokens, valid, cache, dtype=generator.dtype)


@functools.partial(jax.jit, static_argnames="dtype", donate_argnames="cache")
def _extended(model: Any, tokens: Int[Array, "B T"], valid: Bool[Array, "B T"], cache: Any, *, dtype: Any) -> Any:
    """Returns the cache with more tokens."""
    return model(tokens, valid=valid, cache=cache, dtype=dtype).cache
