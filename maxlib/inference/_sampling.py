"""Sampling of the next token from logits.

Shapes: B rows, V vocabulary.
"""

import dataclasses
import functools
import math
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from maxlib.inference._arguments import integer, number

_LOWEST, _HIGHEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)  # temperatures above 0
_GROUP = 64  # tokens


@jax.tree_util.register_static  # a batch of rollouts may have one, whose values are then static under jit
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws the next token; filters apply in the order of the fields, as in transformers.

    Args:
        temperature: Divisor of the scores; 0 chooses the best token (greedy).
        top_k: Keeps the k best tokens, and those that equal the k-th; None keeps all.
        top_p: Keeps the fewest tokens whose probabilities sum to at least p (nucleus sampling, Holtzman et al. 2020,
            arXiv:1904.09751); of equal tokens the lowest ids. None keeps all.
        min_p: Keeps tokens at least `min_p` times as probable as the best one (Nguyen et al. 2024, arXiv:2407.01082);
            None keeps all.
        repetition_penalty: Divides positive logits of tokens that the prompt or the completion has, and multiplies
            negative ones (Keskar et al. 2019, arXiv:1909.05858). The three penalties need an engine, which knows the
            tokens so far.
        presence_penalty: Subtracted from the logits of tokens that the completion has.
        frequency_penalty: Subtracted as often as the completion has the token.

    Raises:
        ValueError: when a setting is no number or out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self):
        temperature = number("temperature", self.temperature)
        if temperature != 0 and not _LOWEST <= temperature <= _HIGHEST:
            raise ValueError(f"temperature must be 0 (greedy) or a normal float32 above it, got {temperature}")
        # A sampler is a static argument and part of a request: store what hashes and is written as JSON.
        object.__setattr__(self, "temperature", temperature)
        if self.top_k is not None:
            object.__setattr__(self, "top_k", integer("top_k", self.top_k))
        for name in ("top_p", "min_p"):
            if getattr(self, name) is not None:
                share = number(name, getattr(self, name))
                if not 0 < share <= 1:
                    raise ValueError(f"{name} must lie in (0, 1], got {share}")
                object.__setattr__(self, name, share)
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
            object.__setattr__(self, name, number(name, getattr(self, name)))
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty must be above 0 (1 has no effect), got {self.repetition_penalty}")

    @property
    def penalizes(self) -> bool:
        """Returns whether draws depend on the tokens so far."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws a token for each row with the row's key, so that it does not depend on other rows.

        Raises:
            ValueError: when there are penalties, for which the tokens so far are not known here.
        """
        if self.penalizes:
            raise ValueError("penalties need the tokens so far: sample with inference.LocalEngine")
        if self.temperature == 0:
            return best(logits)
        logits = self.filtered(scaled(logits.astype(jnp.float32), self.temperature))
        return draw(logits, keys)

    def filtered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns `logits` with `-inf` for every token that the filters drop."""
        if self.top_k is not None:
            kth = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            logits = jnp.where(in_nucleus(logits, self.top_p), logits, -jnp.inf)
        return logits if self.min_p is None else without_unlikely(logits, math.log(self.min_p))


def draw(logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
    """Draws a token for each row with the row's key, never one at `-inf`.

    A group of tokens is drawn, and one of its tokens: two random numbers a row, where `jax.random.categorical` needs
    one, and two logarithms, for each token of the vocabulary.
    """
    groups = _grouped(jnp.exp(logits - logits.max(axis=-1, keepdims=True)), 0.0)
    uniform = jax.vmap(functools.partial(jax.random.uniform, shape=(2,)))(keys)
    group = _chosen(groups.sum(axis=-1), uniform[:, 0])
    token = group * _GROUP + _chosen(_group_at(groups, group), uniform[:, 1])
    return jnp.minimum(token, logits.shape[-1] - 1)  # a row of NaN, which has no token, still gets an id


def best(logits: Float[Array, "*B V"]) -> Int[Array, "*B"]:
    """Returns the best token of each row, of equal ones the first: the best group, and the best of its tokens, because
    XLA computes a maximum on CPUs ten times as fast as its place.
    """
    groups = _grouped(logits, -jnp.inf)
    group = jnp.argmax(groups.max(axis=-1), axis=-1)
    return (group * _GROUP + jnp.argmax(_group_at(groups, group), axis=-1)).astype(jnp.int32)


def _grouped(x: Float[Array, "*B V"], fill: float) -> Float[Array, "*B G N"]:
    """Splits the vocabulary into groups of N tokens."""
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % _GROUP)], constant_values=fill)
    return x.reshape(*x.shape[:-1], -1, _GROUP)


def _group_at(groups: Float[Array, "*B G N"], index: Int[Array, "*B"]) -> Float[Array, "*B N"]:
    return jnp.take_along_axis(groups, index[..., None, None], axis=-2)[..., 0, :]


def _chosen(weights: Float[Array, "B N"], uniform: Float[Array, " B"]) -> Int[Array, " B"]:
    """Returns where the running sum of weights exceeds a share of their total (inverse transform sampling)."""
    below = jnp.cumsum(weights, axis=-1)
    # Sums are rounded: a place without weight is never taken, and the last one with weight if none exceeds the share.
    is_possible = weights > 0
    exceeds = is_possible & (below > uniform[:, None] * below[:, -1:])
    last = weights.shape[1] - 1 - jnp.argmax(is_possible[:, ::-1], axis=-1)
    return jnp.where(exceeds.any(axis=-1), jnp.argmax(exceeds, axis=-1), last).astype(jnp.int32)


def without_unlikely(logits: Float[Array, "B V"], log_min_p: float | Array) -> Float[Array, "B V"]:
    """Drops tokens with p < min_p * p_max, in logarithms: the normalization cancels."""
    return jnp.where(logits < logits.max(axis=-1, keepdims=True) + log_min_p, -jnp.inf, logits)


def scaled(logits: Float[Array, "*B V"], temperature: float | Array) -> Float[Array, "*B V"]:
    """Divides logits by a temperature, less their maximum, so that a low temperature does not overflow."""
    return (logits - logits.max(axis=-1, keepdims=True)) / temperature


def check_sampler(sampler: Any) -> None:
    """Raises ValueError for anything but a sampler."""
    if not isinstance(sampler, Sampler):
        raise ValueError(f"sampler must be an inference.Sampler, such as Sampler(temperature=0.7), got {sampler!r}")


def in_nucleus(logits: Float[Array, "B V"], top_p: float | Array) -> Bool[Array, "B V"]:
    """Returns whether each token is in the nucleus, the smallest set whose mass is at least `top_p`."""
    ranked = -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability mass of the better tokens
    size = jnp.maximum((before < top_p).sum(axis=-1, keepdims=True), 1)  # [B, 1]
    last = jnp.take_along_axis(ranked, size - 1, axis=-1)
    better, equal = logits > last, logits == last
    # Of several tokens that equal the last one, the first fill the set.
    return better | (equal & (jnp.cumsum(equal, axis=-1) <= size - better.sum(axis=-1, keepdims=True)))


GREEDY = Sampler(temperature=0.0)


class Keys:
    """Random keys of calls: a new one for each call without a key, in the same order in every run.

    Args:
        seed: Seed of the first key.
    """

    def __init__(self, seed: int):
        self._seed = integer("seed", seed, least=None)
        # Created at the first call, because a key starts jax's backend, which an import must not do.
        self._last: Key[Array, ""] | None = None
        self._lock = threading.Lock()  # two threads must not get the same key

    def __call__(self, key: Key[Array, ""] | None) -> Key[Array, ""]:
        """Returns the caller's key, or the next one."""
        if key is not None:
            if not isinstance(key, jax.Array | np.ndarray):
                raise ValueError(f"key must be a random key, such as jax.random.key(0), got {key!r}")
            return key
        with self._lock:
            self._last = jax.random.key(self._seed) if self._last is None else self._last
            self._last, new = jax.random.split(self._last)
            return new
