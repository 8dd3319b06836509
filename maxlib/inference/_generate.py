"""Generation: prefill and decode with any `nn.Model` (docs/decisions.md).

Shapes: B rows (prompts), U of them that are run, T tokens of the longest prompt with padding, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from maxlib import nn, sharding
from maxlib.hardware import current_device
from maxlib.inference._arguments import Prompts, StopIds, check_prompts, check_stop, integer
from maxlib.inference._sampling import GREEDY, Keys, Sampler, check_sampler
from maxlib.nn import sites
from maxlib.ops import Mask

Images = Float[Array | np.ndarray, "I C H W"] | nn.vision.Patches
Audio = nn.audio.Clips
Source = nn.Source | nn.Encoded


class Structure:
    """The structure of a model, whose hash is computed once."""

    def __init__(self, tree: Any):
        self.tree, self._hash = tree, hash(tree)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Structure) and self.tree == other.tree)


@nn.pytree
class Packed:
    """A model as a list of arrays, for programs that run once a token: JAX goes through the arguments at each call,
    which takes milliseconds for all modules of a model.
    """

    arrays: list[Any]
    structure: Structure = nn.static()

    @classmethod
    def of(cls, model: Any) -> "Packed":
        """Packs a model."""
        arrays, tree = jax.tree.flatten(model)
        return cls(arrays, Structure(tree))

    def unpacked(self) -> Any:
        """Returns the model, inside a program."""
        return self.structure.tree.unflatten(self.arrays)


class Generator:
    """A model prepared for decoding: layers are unstacked and matrices cast to `dtype` once.

    On CPUs, which multiply few bits slowly, weights of few bits are dequantized to `dtype` once, and take its memory;
    where activations are rounded too, only their values are cast, and products are those of integers. On TPUs values of
    four bits get a dtype of four bits, which takes no more memory.

    To run on several devices, call it inside `sharding.use(layout)`: parameters, caches and steps are sharded
    accordingly.

        generator = inference.Generator(model, dtype=jnp.bfloat16)
        texts = generator.generate([[1, 2, 3], [4, 5]], max_new_tokens=2)  # a list of ids for each

    Args:
        model: Any model of the contract (`nn.Model`).
        dtype: Dtype of the computation.
        cache_dtype: Dtype of cached keys and values, by default `dtype`; int8 and float8 are stored with scales.
        seed: Seed of the random keys of calls without a key.
    """

    def __init__(self, model: Any, *, dtype: Any = jnp.bfloat16, cache_dtype: Any = None, seed: int = 0):
        if isinstance(model, nn.mtp.Drafter):
            raise ValueError(
                f"{type(model).__name__} drafts for another model and generates no text itself: make a LocalEngine of "
                "the target, with this model as drafter="
            )
        self.model = prepared(model, dtype)
        self.packed = Packed.of(self.model)
        # Properties of the structure, for which all layers are searched; `update` does not change it.
        self._max_length, self._masks = max_length(self.model), getattr(self.model, "masks", ())
        self._keys = Keys(seed)
        self.dtype, self.cache_dtype = dtype, dtype if cache_dtype is None else cache_dtype
        self.vocab = jax.eval_shape(lambda m: m.head_weight(), model).shape[0]
        # Converts other weights of the original model's shapes in the same way, in one program.
        shapes = jax.eval_shape(lambda *models: models, model, self.model)
        self._convert = jax.jit(functools.partial(_converted, *shapes))

    def update(self, weights: Any) -> None:
        """Replaces weights; compiled programs stay in use.

        Args:
            weights: A model of the same structure as the original, or some of its parameters by path, such as
                `TrainState.trainable`; all others do not change. Arrays are copied, so a training step may donate its
                own.

        Raises:
            KeyError: when the model has no parameter at a path.
            ValueError: when a weight has a different shape, or the model a different structure.
        """
        new = self._convert(jax.tree.map(jnp.asarray, weights))
        arrays = [old if x is None else x for old, x in zip(self.packed.arrays, new, strict=True)]
        self.packed = Packed(arrays, self.packed.structure)
        self.model = self.packed.unpacked()

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: SupportsIndex,
        images: Images | None = None,
        audio: Audio | None = None,
        source: Source | None = None,
        sampler: Sampler = GREEDY,
        stop_token_ids: StopIds = (),
        key: Key[Array, ""] | None = None,
        capacity: SupportsIndex | None = None,
    ) -> list[list[int]]:
        """Returns the new tokens of each prompt, including the one that ended it; takes the arguments of `stream`."""
        steps = self.stream(
            prompts,
            max_new_tokens=max_new_tokens,
            images=images,
            audio=audio,
            source=source,
            sampler=sampler,
            stop_token_ids=stop_token_ids,
            key=key,
            capacity=capacity,
        )
        texts: list[list[int]] = [[] for _ in prompts]
        for tokens in steps:
            for text, token in zip(texts, tokens, strict=True):
                if token is not None:
                    text.append(token)
        return texts

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: SupportsIndex,
        images: Images | None = None,
        audio: Audio | None = None,
        source: Source | None = None,
        sampler: Sampler = GREEDY,
        stop_token_ids: StopIds = (),
        key: Key[Array, ""] | None = None,
        capacity: SupportsIndex | None = None,
    ) -> Iterator[list[int | None]]:
        """Yields each prompt's next token, step by step; None for a prompt that has ended.

        Args:
            prompts: Token ids of each prompt, of any length. On one device equal ones, as of a group, are run once.
            max_new_tokens: Maximum number of new tokens per prompt.
            images: For models that read images: all images of all prompts in the order of their placeholders (the
                `pixel_values` of Hugging Face's processors; `nn.vision.pad_patches` of them for images of any size).
            audio: For models that hear: all clips of all prompts in the order of their placeholders
                (`nn.audio.pad_clips`).
            source: For encoder-decoders: what the encoder reads for each prompt, which is then the beginning of the
                decoder's text; or the encoder's output.
            sampler: Draws tokens; greedy by default.
            stop_token_ids: Ids that end a prompt's completion and are its last token, as in an `Engine`.
            key: Random key for sampling. Without it each call of this generator uses a new key, in the same order in
                every run. Pass a key derived from the step number if a resumed run must reproduce its samples.
            capacity: Maximum number of tokens in a row of the cache, by default as many as needed, rounded up so that
                similar calls share a program.

        Raises:
            ValueError: when a prompt is empty or does not fit `capacity`, when ids are outside the vocabulary, when the
                model does not read images or audio, or when they and their placeholders do not match.
        """
        check_sampler(sampler)
        texts, stop = check_prompts(prompts, self.vocab), check_stop(stop_token_ids, self.vocab)
        count, longest = integer("max_new_tokens", max_new_tokens), max(map(len, texts))
        check_length(self._max_length, longest + count)
        check_prefix(self._masks, texts)
        if capacity is None:
            capacity = min(shared_capacity(longest + count), self._max_length or 1 << 62)
        capacity = integer("capacity", capacity)
        check_room(longest, count, capacity)
        seen = check_inputs(self.model, right_padded(texts)[0], images, audio, source)
        keys = jax.random.split(self._keys(key), len(texts))
        return self._steps(texts, seen, count, sampler, stop, keys, capacity)

    def _steps(self, texts, seen, max_new_tokens, sampler, stop, keys, capacity):
        """Yields new tokens and appends them to `texts`, including those of stopped rows."""
        switches = _switches(self.model, texts)
        token, cache = self._prefill(texts, seen, keys, 0, sampler, capacity)
        running = [True] * len(texts)
        for step in range(1, max_new_tokens + 1):
            last, recompute = token, step in switches
            if step < max_new_tokens and not recompute:  # before reading `last`, so that the device need not wait
                token, cache = _decode(self.packed, cache, last, keys, step, sampler=sampler, dtype=self.dtype)
            new = [int(t) for t in np.asarray(last)]
            for text, t in zip(texts, new, strict=True):
                text.append(t)
            if step < max_new_tokens and recompute:
                token, cache = self._prefill(texts, seen, keys, step, sampler, capacity)
            yield [t if alive else None for alive, t in zip(running, new, strict=True)]
            running = [alive and t not in stop for alive, t in zip(running, new, strict=True)]
            if not any(running):
                return

    def _prefill(self, texts, seen, keys, step, sampler, capacity):
        """Returns the next token of each text, and a cache of the texts; equal texts, as of a group, are run once."""
        distinct, rows = _distinct(texts)
        if seen or 2 * len(distinct) > len(texts) or sharding.current() is not None or not self._caches_by_row:
            distinct, rows = texts, None
        tokens, valid = right_padded(distinct, most=capacity)
        options = {"sampler": sampler, "capacity": capacity, "dtype": self.dtype, "cache_dtype": self.cache_dtype}
        return _prefill(self.packed, tokens, valid, seen, rows, keys, step, **options)

    @functools.cached_property
    def _caches_by_row(self) -> bool:
        return without_rows(self.model) is None


def generate(
    model: Any,
    prompts: Prompts,
    *,
    max_new_tokens: SupportsIndex,
    images: Images | None = None,
    audio: Audio | None = None,
    source: Source | None = None,
    sampler: Sampler = GREEDY,
    stop_token_ids: StopIds = (),
    key: Key[Array, ""] | None = None,
    dtype: Any = jnp.bfloat16,
) -> list[list[int]]:
    """Generates once for a few prompts; keep a `Generator` to decode often.

    Args:
        model: Any model of the contract (`nn.Model`).
        prompts: Token ids of each prompt.
        max_new_tokens: Maximum number of new tokens per prompt.
        images: All images of all prompts, for models that read images.
        audio: All clips of all prompts, for models that hear.
        source: What the encoder of an encoder-decoder reads, a row for each prompt.
        sampler: Draws tokens; greedy by default.
        stop_token_ids: Ids that end a prompt's completion and are its last token.
        key: Random key for sampling. Without it each call draws anew, in the same order in every run.
        dtype: Dtype of the computation.

    Returns:
        The new tokens of each prompt, including the one that ended it.

    Raises:
        ValueError: when prompts, images or audio do not fit the model (`Generator.stream`).
    """
    return Generator(model, dtype=dtype).generate(
        prompts,
        max_new_tokens=max_new_tokens,
        images=images,
        audio=audio,
        source=source,
        sampler=sampler,
        stop_token_ids=stop_token_ids,
        key=_keys(key),
    )


_keys = Keys(0)  # for calls of `generate` without a key


@functools.partial(jax.jit, static_argnames=("sampler", "capacity", "dtype", "cache_dtype"))
def _prefill(
    packed: Packed,
    tokens: Int[Array, "U T"],
    valid: Bool[Array, "U T"],
    seen,
    rows: Int[Array, " B"] | None,
    keys: Key[Array, " B"],
    step,
    *,
    sampler,
    capacity,
    dtype,
    cache_dtype,
):
    """Runs prompts, and returns the first new tokens and the cache of those in `rows`, or of all."""
    model = packed.unpacked()
    cache = empty_cache(model, len(tokens), capacity, cache_dtype)
    out = model(tokens, valid=valid, cache=cache, dtype=dtype, **seen)
    # [U, T, D] -> [U, 1, D]: hidden states of each row's last real token; logits of the others are not needed.
    last, cache = jnp.take_along_axis(out.hidden, (valid.sum(axis=1) - 1)[:, None, None], axis=1), out.cache
    if rows is not None:  # [U, ...] -> [B, ...]
        last, cache = jax.tree.map(lambda x: x[rows], (last, cache))
    return _draw(model, last, keys, step, sampler), cache


def _distinct(texts: list[list[int]]) -> tuple[list[list[int]], np.ndarray]:
    """Returns the texts that differ, and the index of each text among them. Their number is rounded up by repeating
    one, so that similar calls share a program.
    """
    index = {text: n for n, text in enumerate(dict.fromkeys(map(tuple, texts)))}
    padding = [texts[0]] * (power_of_two(len(index)) - len(index))
    return [*map(list, index), *padding], np.array([index[tuple(text)] for text in texts], np.int32)


def without_rows(model: Any) -> str | None:
    """Returns what is wrong with an array of the cache whose first axis is not that of rows, if there is one."""
    small, large = (jax.eval_shape(lambda rows=rows: model.init_cache(rows, 16)) for rows in (2, 3))
    of_three = dict(jax.tree_util.tree_leaves_with_path(large))
    for path, a in jax.tree_util.tree_leaves_with_path(small):
        b = of_three.get(path)
        if b is None or a.shape[:1] != (2,) or b.shape != (3, *a.shape[1:]):
            return f"{jax.tree_util.keystr(path)} must be rows, got {a.shape} for 2 rows"
    return None


def empty_cache(model: Any, rows: int, capacity: int, dtype: Any) -> nn.cache.Cache:
    """Returns a cache that is known to be empty inside jit too, so that prompts are simply written to its start."""
    with jax.ensure_compile_time_eval():
        length = jnp.zeros(rows, jnp.int32)
    return dataclasses.replace(model.init_cache(rows, capacity, dtype=dtype), length=length)


@functools.partial(jax.jit, static_argnames=("sampler", "dtype"), donate_argnames="cache")
def _decode(packed: Packed, cache, token: Int[Array, " B"], keys, step, *, sampler, dtype):
    """Runs one token per row, and returns the next tokens and the cache, which reuses the old cache's memory."""
    model = packed.unpacked()
    out = model(token[:, None], cache=cache, dtype=dtype)
    return _draw(model, out.hidden, keys, step, sampler), out.cache


def _draw(model, hidden, keys, step, sampler: Callable):
    """Samples the next token of each row from the logits of `hidden`, `B 1 D`."""
    # A new key for each step, derived from the row's key.
    keys = jax.vmap(jax.random.fold_in, (0, None))(keys, step)
    return sampler(model.logits(hidden)[:, 0], keys)


def prepared(model: Any, dtype: Any) -> Any:
    """Returns a model for decoding, see `Generator`."""
    return cast_matrices(_unpacked(nn.unstack(model), dtype), dtype)


def _unpacked(model: Any, dtype: Any) -> Any:
    """Returns the model with stored weights as the device multiplies them fastest, see `Generator`."""
    platform = current_device()[0]
    convert = {"cpu": _dequantized, "tpu": _unpacked_bytes}.get(platform)
    if convert is None:
        return model

    def change(path: str, site: Any) -> Any:
        return convert(site, dtype) if isinstance(site.w, nn.quantized.QuantizedWeight) else site

    return sites.map_sites(model, change)


def _unpacked_bytes(site: Any, dtype: Any) -> Any:
    """Returns a layer whose values of four bits have a dtype of four bits, as TPUs store them: two in a byte too."""
    if not site.w.is_packed:
        return site
    return sites.replace(site, w=site.w.widened(jnp.uint4 if site.w.qtype == "nf4" else jnp.int4))


def _dequantized(site: Any, dtype: Any) -> Any:
    """Returns a layer with a dequantized weight; with values in `dtype` if activations are rounded."""
    matmul = getattr(site, "matmul", nn.matmul.PlainMatmul())
    while isinstance(matmul, nn.matmul.LowRank):
        matmul = matmul.inner
    if not isinstance(matmul, nn.matmul.PlainMatmul):
        return sites.replace(site, w=site.w.widened(dtype))
    # Weights that an update lacks are arrays of numpy, see `_converted`.
    absent = isinstance(site.w.values.get_value(), np.ndarray)
    w = np.broadcast_to(False, site.w.shape) if absent else site.w.matrix(dtype)
    return sites.replace(site, w=nnx.Param(w, axes=sites.axes_of(site)))


def cast_matrices(model: Any, dtype: Any) -> Any:
    """Casts weights of matmuls, unless quantized; norm scales and biases keep their dtype, as in training."""

    def cast(variable):
        axes, value = variable.get_metadata().get("axes", ()), variable.get_value()
        is_matrix = isinstance(variable, nnx.Param) and len(axes) > 1 and jnp.issubdtype(value.dtype, jnp.floating)
        return variable.replace(value.astype(dtype)) if is_matrix else variable

    def is_variable(x):
        return isinstance(x, nnx.Variable)

    return jax.tree.map(lambda x: cast(x) if is_variable(x) else x, model, is_leaf=is_variable)


def _check_shapes(old: Any, new: Any) -> None:
    """Raises ValueError for the first weight of `new` whose shape differs from that of the same path in `old`."""
    here, update = nn.variables(old), nn.variables(new)
    for path in sorted(here.keys() & update.keys()):
        if here[path].shape != update[path].shape:
            raise ValueError(
                f"update takes weights of the same shapes; {path} is {here[path].shape} here, got {update[path].shape}"
            )


def _converted(shapes: Any, like: Any, weights: Any) -> list[Array | None]:
    """Returns copies of weights as those of `like`, which is unstacked; None for those that `weights` lacks.

    Args:
        shapes: The original model.
        like: The model to update.
        weights: A model of these shapes, or some of its parameters by path.
    """
    absent = jax.tree.map(lambda x: np.broadcast_to(False, x.shape), shapes)  # takes no memory
    new = nn.unstack(nn.combine(weights, absent) if isinstance(weights, dict) else weights)
    new = _unpacked(new, jnp.float32)  # cast below
    _check_shapes(like, new)
    if jax.tree.structure(new) != jax.tree.structure(like):
        raise ValueError("update takes a model of the same structure; make a new Generator for another model")
    return [
        None if isinstance(x, np.ndarray) else jnp.array(x, old.dtype, copy=True)
        for old, x in zip(jax.tree.leaves(like), jax.tree.leaves(new), strict=True)
    ]


def check_inputs(
    model: Any,
    tokens: np.ndarray,
    images: Images | None,
    audio: Audio | None = None,
    source: Source | None = None,
) -> dict[str, Images | Audio | Source]:
    """Returns the inputs besides tokens. They are checked here, because ids are not known inside jit."""
    inputs = {"images": images, "audio": audio, "source": source}
    inputs = {name: x for name, x in inputs.items() if x is not None}
    if isinstance(model, nn.MultimodalModel):
        model.check_inputs(tokens, **inputs)
    elif inputs:
        raise ValueError(f"{type(model).__name__} reads text only: call it without {' and '.join(inputs)}")
    return inputs


def _switches(model: Any, texts: Sequence[Sequence[int]]) -> set[int]:
    """Returns the steps at which a text reaches the length from which its cached keys are rotated differently.

    That length is `Decoder.recompute_cache_at`, where LongRoPE switches from its short to its long factors. The cache
    is recomputed at these steps, as transformers does for Phi.
    """
    at = getattr(model, "recompute_cache_at", None)
    return set() if at is None else {at - len(text) for text in texts}


def max_length(model: Any) -> int | None:
    """Returns the number of positions of a model, for which its layers are searched; None without a limit."""
    return getattr(model, "max_length", None)


def check_length(limit: int | None, length: int) -> None:
    """Raises ValueError if `length` tokens exceed the positions of a model."""
    if limit is not None and length > limit:
        raise ValueError(
            f"prompt and new tokens must fit the {limit} positions of the model, got {length}: shorten "
            "the prompt, request fewer tokens, or build the model with a longer rope"
        )


def check_prefix(masks: Sequence[Mask], texts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError for prompts that end inside the prefix of a model's masks, which new tokens would change, and
    for models with blocks.
    """
    if (block := max((mask.block_size for mask in masks), default=1)) > 1:
        raise ValueError(
            f"this model's tokens attend to later ones of their block of {block}, so it does not generate token by token: "
            "use inference.denoise"
        )
    prefix = max((mask.prefix for mask in masks), default=0)
    if (shortest := min(map(len, texts))) < prefix:
        raise ValueError(
            f"a prompt must have the whole prefix of {prefix} tokens, which attend to each other, got {shortest} tokens: "
            "new tokens inside the prefix would change what is cached"
        )


def right_padded(rows: Sequence[Sequence[int]], *, most: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows as one array with padding on the right, and a mask of real tokens.

    The length is rounded up, so that similar calls share a program.

    Args:
        rows: Ids of each row.
        most: Maximum length after rounding up; None for no limit.
    """
    longest = max(map(len, rows))
    length = max(longest, min(_round_up(longest, 16), most or 1 << 62))
    tokens, valid = np.zeros((len(rows), length), np.int32), np.zeros((len(rows), length), bool)
    for n, row in enumerate(rows):
        tokens[n, : len(row)], valid[n, : len(row)] = row, True
    return tokens, valid


def check_room(longest: int, max_new_tokens: int, capacity: int) -> None:
    """Raises ValueError if a prompt of `longest` tokens leaves no room in the cache."""
    if longest + max_new_tokens > capacity:
        raise ValueError(
            f"the longest prompt ({longest} tokens) and max_new_tokens ({max_new_tokens}) "
            f"must fit the capacity of the cache ({capacity}); shorten one or enlarge capacity"
        )


def shared_capacity(needed: int) -> int:
    """Rounds up to a power of two, or above 128 to a multiple of 128.

    Similar calls then share a program. A model's maximum length is usually such a number, so it is not exceeded.
    """
    return max(16, power_of_two(needed)) if needed <= 128 else _round_up(needed, 128)


def _round_up(n: int, multiple: int) -> int:
    """Rounds `n` up to a multiple."""
    return -(-n // multiple) * multiple


_FEWEST_ROWS = 8  # of a step, unless the engine has fewer slots


def power_of_two(number: int) -> int:
    """Rounds a number up to a power of two; 0 stays 0."""
    return 1 << (number - 1).bit_length() if number else 0


def bucket(length: int) -> int:
    """Rounds a prompt's length up by less than a quarter, or to 16, so that four programs cover each doubling."""
    return _round_up(length, max(16, power_of_two(length) // 8))


def row_counts(slots: int) -> list[int]:
    """Returns the numbers of rows that a step may have: all slots, and halves of them. On CPUs, where time grows with
    rows, also three quarters of a large number.
    """
    counts = [slots]
    while counts[-1] >= 2 * _FEWEST_ROWS:
        count = counts[-1]
        quarters = [-(-3 * count // 4)] if count >= 8 * _FEWEST_ROWS and current_device()[0] == "cpu" else []
        counts += [*quarters, -(-count // 2)]
    return counts
