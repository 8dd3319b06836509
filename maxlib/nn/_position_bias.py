"""Position biases: what is added to the scores of self-attention, as a function of the distance of query and key.

Set one as `position_bias` of a `Decoder` or an `Encoder`, or pass it to `make_context`: it is computed once for all
layers. Shapes: B rows, T queries, S keys, N heads.
"""

import dataclasses
import math

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._initial_values import Init, normal
from maxlib.nn._linear import draw_key


class RelativeBias(nnx.Module):
    """A learned number for each head and bucket of distances (T5, Raffel et al. 2020, arXiv:1910.10683).

    Half of the buckets are single distances, the others grow logarithmically up to `max_distance`; all distances beyond
    share the last one.

    Args:
        num_heads: Number N of heads.
        num_buckets: Number of buckets.
        max_distance: Distance from which all share a bucket.
        bidirectional: True has half of the buckets for keys after the query; False treats them as the query's own.
        init: Initializer, by default normal with standard deviation 0.02.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = False,
        init: Init | None = None,
        rngs: nnx.Rngs,
    ):
        init = normal(0.02) if init is None else init
        self.w = nnx.Param(init(draw_key(rngs), (num_buckets, num_heads), jnp.float32), axes=("position", "heads"))
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional

    def __call__(self, queries: Int[Array, "B T"], keys: Int[Array, " S"]) -> Float[Array, "B N T S"]:
        """Returns the biases of queries and keys with these indices."""
        buckets = self._buckets(keys[None, None, :] - queries[:, :, None])
        return jnp.moveaxis(jnp.take(self.w[...], buckets, axis=0), 3, 1)  # [B, T, S, N] -> [B, N, T, S]

    def _buckets(self, offset: Int[Array, "B T S"]) -> Int[Array, "B T S"]:
        """Returns the bucket of each offset from the query to the key."""
        if self.bidirectional:
            count = self.num_buckets // 2
            first, distance = jnp.where(offset > 0, count, 0), jnp.abs(offset)
        else:
            count = self.num_buckets
            first, distance = 0, jnp.maximum(-offset, 0)
        exact = count // 2
        # exact + log(distance / exact) / log(max_distance / exact) * (count - exact), at most the last bucket
        ratio = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / exact) / math.log(self.max_distance / exact)
        far = jnp.minimum(exact + (ratio * (count - exact)).astype(jnp.int32), count - 1)
        return first + jnp.where(distance < exact, distance, far)


@dataclasses.dataclass(frozen=True)
class ALiBi:
    """A bias that falls with the distance, with a slope for each head (Press et al. 2022, arXiv:2108.12409).

    The slopes of N heads, N a power of two, are `2^(-8 i / N)` for i = 1 ... N. For other N they are those of the next
    smaller power of two, followed by every second slope of twice as many heads.

    Args:
        num_heads: Number N of heads.
    """

    num_heads: int

    @property
    def slopes(self) -> list[float]:
        """Returns the slope of each head."""
        power = 1 << (self.num_heads.bit_length() - 1)
        slopes = [2 ** (-8 * i / power) for i in range(1, power + 1)]
        between = [2 ** (-4 * i / power) for i in range(1, 2 * power, 2)]
        return [*slopes, *between][: self.num_heads]

    def __call__(self, queries: Int[Array, "B T"], keys: Int[Array, " S"]) -> Float[Array, "B N T S"]:
        """Returns `-slope * |query - key|`."""
        distance = jnp.abs(queries[:, None, :, None] - keys[None, None, None, :])
        return -jnp.asarray(self.slopes)[None, :, None, None] * distance
