"""Sampling of the next token from logits."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key


@jax.tree_util.register_static  # a batch of rollouts may have one, whose values are then static under jit
@dataclasses.dataclass(frozen=True)
class Sampler:
    """Draws the next token; filters apply in the order of the fields, as in transformers.

    Args:
        temperature: Divisor of the scores; 0 chooses the best token (greedy).
        top_k: Keeps the k best tokens.
        top_p: Keeps the fewest tokens whose probabilities sum to at least p (nucleus sampling, Holtzman et al. 2020,
            arXiv:1904.09751).
        min_p: Keeps tokens at least `min_p` times as probable as the best one (Nguyen et al. 2024, arXiv:2407.01082).

    Raises:
        ValueError: when a setting is out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or more, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, got {self.top_k}")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must lie in (0, 1], got {value}")

    def __call__(self, logits: Float[Array, "B V"], keys: Key[Array, " B"]) -> Int[Array, " B"]:
        """Draws a token for each row with the row's key, so that it does not depend on other rows."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = self.filtered(logits.astype(jnp.float32) / self.temperature)
        return jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)

    def filtered(self, logits: Float[Array, "B V"]) -> Float[Array, "B V"]:
        """Returns `logits` with `-inf` for every token that the filters drop."""
        if self.top_k is not None:
            kth = jax.lax.top_k(logits, min(self.top_k, logits.shape[-1]))[0][:, -1:]
            logits = jnp.where(logits < kth, -jnp.inf, logits)
        if self.top_p is not None:
            logits = jnp.where(logits < _nucleus_floor(logits, self.top_p), -jnp.inf, logits)
        if self.min_p is not None:
            # p >= min_p * p_max, in logarithms: the normalization cancels.
            logits = jnp.where(logits < logits.max(axis=-1, keepdims=True) + jnp.log(self.min_p), -jnp.inf, logits)
        return logits


def _nucleus_floor(logits: Float[Array, "B V"], top_p: float) -> Float[Array, "B 1"]:
    """Returns the smallest score inside the nucleus."""
    ranked = -jnp.sort(-logits, axis=-1)
    probs = jax.nn.softmax(ranked, axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs  # probability mass of the better tokens
    return jnp.min(jnp.where(before < top_p, ranked, jnp.inf), axis=-1, keepdims=True)


GREEDY = Sampler(temperature=0.0)


class Keys:
    """Random keys of calls: a new one for each call without a key, in the same order in every run.

    Args:
        seed: Seed of the first key.
    """

    def __init__(self, seed: int):
        self._seed = seed
        self._last: Key[Array, ""] | None = (
            None  # created at the first call, because a key starts jax's backend, which an import must not do
        )

    def __call__(self, given: Key[Array, ""] | None) -> Key[Array, ""]:
        """Returns the given key, or the next one."""
        if given is not None:
            return given
        self._last = jax.random.key(self._seed) if self._last is None else self._last
        self._last, new = jax.random.split(self._last)
        return new
