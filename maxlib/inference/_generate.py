"""Prefill and decode over any model that keeps the contract of docs/decisions/0001."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from maxlib import nn
from maxlib.inference._sampling import GREEDY, Sampler

Prompts = Sequence[Sequence[int]]
Images = Float[Array | np.ndarray, "I C H W"]


class Generator:
    """A model made ready to decode: its layers laid out one by one and its matrices cast to `dtype`, once.

    cache_dtype: of keys and values, by default `dtype`; int8 and float8 come with scales.
    Parallel work: call inside `sharding.use(layout)` and parameters, caches and steps follow it.
    """

    def __init__(self, model: Any, *, dtype: Any = jnp.bfloat16, cache_dtype: Any = None):
        self.model = _cast_matrices(nn.unstack(model), dtype)
        self.dtype, self.cache_dtype = dtype, dtype if cache_dtype is None else cache_dtype
        self.vocab = jax.eval_shape(lambda m: m.head_weight(), model).shape[0]
        self._shapes = jax.eval_shape(lambda m: m, model)  # as it was given, to lay out other weights likewise

    def update(self, weights: Any) -> None:
        """Decodes with other weights from now on; programs that are compiled stay in use.

        Args:
            weights: a model like the one this was made of, or some of its parameters by path, such as
                `TrainState.trainable`: all others stay as they are. Arrays are copied, so a step may donate its own.

        Raises:
            KeyError: the model has no parameter at a path.
            ValueError: a weight has another shape, or the model another structure.
        """
        absent = jax.tree.map(lambda x: np.broadcast_to(False, x.shape), self._shapes)  # without memory of its own
        weights = jax.tree.map(jnp.asarray, weights)
        new = nn.unstack(nn.combine(weights, absent) if isinstance(weights, dict) else weights)
        if jax.tree.structure(new) != jax.tree.structure(self.model):
            raise ValueError("update takes a model of the same structure; make a new Generator for another model")
        self.model = jax.tree_util.tree_map_with_path(_replaced, self.model, new)

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        images: Images | None = None,
        sampler: Sampler = GREEDY,
        stop: Collection[int] = (),
        key: Key[Array, ""] | None = None,
        capacity: int | None = None,
    ) -> list[list[int]]:
        """The new tokens of each prompt, up to and without the first of `stop`. The arguments are those of `stream`."""
        texts: list[list[int]] = [[] for _ in prompts]
        steps = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            images=images,
            sampler=sampler,
            stop=stop,
            key=key,
            capacity=capacity,
        )
        for tokens in steps:
            for text, token in zip(texts, tokens, strict=True):
                if token is not None:
                    text.append(token)
        return texts

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int,
        images: Images | None = None,
        sampler: Sampler = GREEDY,
        stop: Collection[int] = (),
        key: Key[Array, ""] | None = None,
        capacity: int | None = None,
    ) -> Iterator[list[int | None]]:
        """Yields, step by step, each prompt's next token; None for a prompt that has stopped.

        prompts: token ids, of any lengths. images: for models that see, all images of all prompts in the order of their
        placeholders, prompt after prompt; what Hugging Face's processors call pixel_values. stop: ids that end a
        prompt's text; they are not part of it. key: for sampling (default: seed 0). capacity: tokens a cache row holds,
        by default what is needed, rounded up so that similar calls share a program. Raises ValueError for empty
        prompts, ids outside the vocabulary, prompts that do not fit `capacity`, images for a model that does not see,
        and images that are not those of the placeholders.
        """
        tokens, _ = right_padded(prompts, self.vocab)
        longest = max(map(len, prompts)) + max_new_tokens
        check_length(self.model, longest)
        if capacity is None:
            capacity = min(shared_capacity(longest), getattr(self.model, "max_length", None) or 1 << 62)
        check_room(prompts, max_new_tokens, capacity)
        seen = _seen(self.model, tokens, images)
        keys = jax.random.split(jax.random.key(0) if key is None else key, len(prompts))
        return self._steps(
            [list(prompt) for prompt in prompts], seen, max_new_tokens, sampler, frozenset(stop), keys, capacity
        )

    def _steps(self, texts, seen, max_new_tokens, sampler, stop, keys, capacity):
        """Yields new tokens; `texts` grow by them, also those of rows that have stopped."""
        switches = _switches(self.model, texts)
        token, cache = self._prefill(texts, seen, keys, 0, sampler, capacity)
        running = [True] * len(texts)
        for step in range(1, max_new_tokens + 1):
            last, recompute = token, step in switches
            if step < max_new_tokens and not recompute:  # before `last` is looked at: the device need not wait for us
                token, cache = _decode(self.model, cache, last, keys, step, sampler=sampler, dtype=self.dtype)
            new = [int(t) for t in np.asarray(last)]
            for text, t in zip(texts, new, strict=True):
                text.append(t)
            if step < max_new_tokens and recompute:
                token, cache = self._prefill(texts, seen, keys, step, sampler, capacity)
            running = [alive and t not in stop for alive, t in zip(running, new, strict=True)]
            if not any(running):
                return
            yield [t if alive else None for alive, t in zip(running, new, strict=True)]

    def _prefill(self, texts, seen, keys, step, sampler, capacity):
        """The next token of each text, and a cache that holds them."""
        tokens, valid = right_padded(texts, self.vocab, most=capacity)
        options = {"sampler": sampler, "capacity": capacity, "dtype": self.dtype, "cache_dtype": self.cache_dtype}
        return _prefill(self.model, tokens, valid, seen, keys, step, **options)


def generate(
    model: Any,
    prompts: Prompts,
    *,
    max_new_tokens: int,
    images: Images | None = None,
    sampler: Sampler = GREEDY,
    stop: Collection[int] = (),
    key: Key[Array, ""] | None = None,
    dtype: Any = jnp.bfloat16,
) -> list[list[int]]:
    """One call for a few prompts; keep a `Generator` to decode often. See `Generator.stream` for the arguments."""
    return Generator(model, dtype=dtype).generate(
        prompts, max_new_tokens=max_new_tokens, images=images, sampler=sampler, stop=stop, key=key
    )


@functools.partial(jax.jit, static_argnames=("sampler", "capacity", "dtype", "cache_dtype"))
def _prefill(
    model,
    tokens: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    seen,
    keys,
    step,
    *,
    sampler,
    capacity,
    dtype,
    cache_dtype,
):
    cache = model.init_cache(tokens.shape[0], capacity, dtype=cache_dtype)
    out = model(tokens, valid=valid, cache=cache, dtype=dtype, **seen)
    last = jnp.take_along_axis(out.hidden, (valid.sum(axis=1) - 1)[:, None, None], axis=1)
    return _draw(model, last, keys, step, sampler), out.cache


@functools.partial(jax.jit, static_argnames=("sampler", "dtype"), donate_argnames="cache")
def _decode(model, cache, token: Int[Array, " B"], keys, step, *, sampler, dtype):
    out = model(token[:, None], cache=cache, dtype=dtype)
    return _draw(model, out.hidden, keys, step, sampler), out.cache


def _draw(model, hidden, keys, step, sampler: Callable):
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return sampler(model.logits(hidden)[:, 0], keys)


def _cast_matrices(model: Any, dtype: Any) -> Any:
    """Casts what multiplies activations, unless it is quantized; norm scales and biases stay as they are, so they act
    as in training.
    """

    def cast(variable):
        axes, value = variable.get_metadata().get("axes", ()), variable.get_value()
        is_matrix = isinstance(variable, nnx.Param) and len(axes) > 1 and jnp.issubdtype(value.dtype, jnp.floating)
        return variable.replace(value.astype(dtype)) if is_matrix else variable

    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree.map(lambda x: cast(x) if is_variable(x) else x, model, is_leaf=is_variable)


def _replaced(path: Any, old: Array, new: Any) -> Array:
    """Returns `new` in its own memory and in the dtype of `old`; `old` where there is nothing new."""
    if new.shape != old.shape:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        raise ValueError(f"update takes weights of the same shapes; {name} is {old.shape} here, got {new.shape}")
    return old if isinstance(new, np.ndarray) else jnp.array(new, old.dtype, copy=True)


def _seen(model: Any, tokens: np.ndarray, images: Images | None) -> dict[str, Images]:
    """What the model is given besides tokens. Checked here, because under jit the ids are hidden."""
    if isinstance(model, nn.VisionModel):
        model.check_images(tokens, images)
    elif images is not None:
        raise ValueError(f"{type(model).__name__} reads text only: call it without images")
    return {} if images is None else {"images": images}


def _switches(model: Any, texts: Sequence[Sequence[int]]) -> set[int]:
    """The steps at which a text comes to the length from which on its cached keys are rotated otherwise.

    `Decoder.recompute_cache_at` says it: there LongRoPE goes from its short factors to its long ones, and transformers
    runs Phi over the whole text again. At these steps the cache is made anew.
    """
    at = getattr(model, "recompute_cache_at", None)
    return set() if at is None else {at - len(text) for text in texts}


def check_length(model: Any, length: int) -> None:
    """Raises ValueError if `length` tokens are more than the model was made for (its `max_length`, if it has one)."""
    limit = getattr(model, "max_length", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"prompt and new tokens must fit the {limit} positions that the model was made for, got {length}: shorten "
            "the prompt, ask for fewer tokens, or build the model with a rope that reaches further"
        )


def right_padded(prompts: Prompts, vocab: int, *, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns prompts as one array whose rows begin with the real tokens, and where these are.

    Args:
      prompts: ids of each row.
      vocab: number of ids that the model knows.
      most: length that the array's, which is rounded up so that similar calls share a program, does not go beyond.
    """
    if not len(prompts):
        raise ValueError("there must be at least one prompt, got none")
    if any(np.ndim(p) == 0 and not isinstance(p, str) for p in prompts):
        raise ValueError(
            "prompts must be a list of prompts, each of which is a list of ids; got ids: put them in a list"
        )
    if not all(len(p) for p in prompts):
        raise ValueError("every prompt needs at least one token; begin an empty one with the tokenizer's BOS id")
    longest = max(map(len, prompts))
    length = max(longest, min(_round_up(longest, 16), most or 1 << 62))
    tokens, valid = np.zeros((len(prompts), length), np.int32), np.zeros((len(prompts), length), bool)
    for row, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"prompt {row} must hold ids, which are integers, got {ids.dtype}: encode text first")
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(
                f"prompt {row} holds the id {ids.min() if ids.min() < 0 else ids.max()}, the model's vocabulary is "
                f"[0, {vocab}); is this the tokenizer the model was trained with?"
            )
        tokens[row, : len(ids)], valid[row, : len(ids)] = ids, True
    return tokens, valid


def check_room(prompts: Prompts, max_new_tokens: int, capacity: int) -> None:
    """Raises ValueError for prompts that leave no room in the cache."""
    longest = max(map(len, prompts))
    if max_new_tokens < 1 or longest + max_new_tokens > capacity:
        raise ValueError(
            f"the longest prompt ({longest} tokens) and max_new_tokens ({max_new_tokens}, at least 1) "
            f"must fit the capacity of the cache ({capacity}); shorten one or enlarge capacity"
        )


def shared_capacity(needed: int) -> int:
    """A power of two or a multiple of 128: what models are made for at most is one too, and similar calls share a
    program.
    """
    return max(16, 1 << (needed - 1).bit_length()) if needed <= 128 else _round_up(needed, 128)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
