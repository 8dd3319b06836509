"""The loss that trains a lightning indexer to find the keys that attention looks at (arXiv:2512.02556, section 2.1).

Shapes: B rows, T queries, S keys, K chosen keys, N heads of width H, R width of a latent with the shared key.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float

from maxlib.nn._pytree import pytree, static
from maxlib.nn.attention._indexer import (
    ALL_KEYS,
    HEADS,
    QUERIES,
    WEIGHTS,
    Chosen,
    Index,
    axes_between,
    over_queries,
    summed,
    taken,
)
from maxlib.sharding import shard_map_by_name

HIDDEN = -1e30  # of a key that is not chosen, before the softmax


@dataclasses.dataclass(frozen=True)
class IndexLoss:
    """Loss of the indexers of `SparseMLA` and `CompressedAttention`: `weight * KL(attention || softmax(index scores))`,
    averaged over queries.

    Attention is its probabilities of the compared keys, summed over heads and normalized to 1. They have no gradient,
    nor has the indexer's input: indexers learn from this loss only, and everything else from the other losses only.

    Args:
        weight: Factor on the loss.
        dense: True for the warm-up of indexers that were never trained: queries attend to all visible keys, which
            the loss compares. Freeze everything else (`training.trainable_only("*.indexer.*")`). False: they attend to
            the chosen keys, and the loss compares those.
    """

    weight: float = 1.0
    dense: bool = False
    name: str = dataclasses.field(default="loss/indexer", init=False)

    def __call__(self, index: Index, attended: "Attended") -> Float[Array, ""]:
        """Returns the loss of one layer."""
        queries = jnp.sum(attended.chosen.start < attended.chosen.end)  # without padding
        return self.weight * divergence(index, jax.lax.stop_gradient(attended)) / jnp.maximum(queries, 1)


@pytree
class Attended:
    """What attention is computed of.

    Attributes:
        q: Queries, `B T N H`.
        keys: Keys of each head, `B S N H`; or keys of all heads, `B S H`, which must be so if some are chosen.
        chosen: The keys that count.
        scale: Factor on scores.
        mass: Share of these keys in the probabilities of each head, `B T N`; None if there are no other keys.
    """

    q: Array
    keys: Array
    chosen: Chosen
    scale: float = static()
    mass: Array | None = None

    @property
    def gathers(self) -> bool:
        """Whether only the latents of chosen keys are read."""
        return self.chosen.best is not None

    def seen(self) -> Array:
        """Returns True for keys that count: `B T S`, or `B T K` of chosen keys."""
        return self.chosen.among_best() if self.gathers else self.chosen.among_all(self.keys.shape[1])

    def read(self, keys: Array) -> Array:
        """Returns all keys in the queries' dtype, or those that are chosen, `B T K ...`."""
        best = self.chosen.best
        return keys.astype(self.q.dtype) if best is None else taken(keys, best, self.q.dtype)

    def probabilities(self, keys: Array, seen: Array) -> Float[Array, "B N T S"]:
        """Returns the probabilities of these keys in float32; zeros for queries that see none."""
        if self.gathers:
            spec = "btnh,btsh->bnts"
        else:
            spec = "btnh,bsh->bnts" if keys.ndim == 3 else "btnh,bsnh->bnts"
        dtype, seen = jnp.promote_types(self.q.dtype, jnp.float32), seen[:, None]
        scores = self.scale * jnp.einsum(spec, self.q, keys, preferred_element_type=dtype)
        return jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, HIDDEN), axis=-1), 0.0)

    def of(self, q: Array, chosen: Chosen, mass: Array | None = None) -> "Attended":
        """Returns the part of some queries."""
        return dataclasses.replace(self, q=q, chosen=chosen, mass=mass)

    def over_heads(self, seen: Array) -> tuple[Float[Array, "B T S"], Float[Array, "B T 1"]]:
        """Returns the probabilities of the keys, summed over heads, and the sum of both over keys."""
        each = self.probabilities(self.read(self.keys), seen)
        if self.mass is None:
            return each.sum(axis=1), jnp.full((*self.q.shape[:2], 1), self.q.shape[2], each.dtype)
        mass = self.mass.astype(each.dtype)
        # [B, N, T, S] and [B, T, N] -> [B, T, S]
        return jnp.einsum("bnts,btn->bts", each, mass), mass.sum(axis=2, keepdims=True)


@jax.custom_vjp
def divergence(index: Index, attended: Attended) -> Float[Array, ""]:
    """Returns `KL(attention || softmax(index scores))`, summed over queries; only `index` has a gradient.

    Chunks of queries are computed one after another. The gradient is computed while a chunk's probabilities are there,
    so neither pass stores anything for pairs of a query and a key.
    """
    return _with_gradient(index, attended)[0]


def _with_gradient(index: Index, attended: Attended) -> tuple[Array, Index]:
    """Returns the divergence and its gradient; each device computes its own queries and heads."""
    heads, chosen = (index.q.shape[2], attended.q.shape[2]), attended.chosen
    local = functools.partial(_on_one_device, heads=heads, scale=attended.scale)
    of_keys = ALL_KEYS if attended.keys.ndim == 3 else ("batch", None, "attn_heads", None)
    of_best = None if chosen.best is None else (*QUERIES, None)
    # The gradient of keys is one for each part of the queries, on a first axis.
    of_mass = None if attended.mass is None else WEIGHTS
    names = [HEADS, WEIGHTS, ALL_KEYS, HEADS, of_keys, of_mass, QUERIES, QUERIES, of_best]
    run = shard_map_by_name(local, names, (QUERIES, HEADS, WEIGHTS, ("q_seq", *ALL_KEYS)))
    arrays = [*index, attended.q, attended.keys, attended.mass, chosen.start, chosen.end, chosen.best]
    each, d_q, d_weight, d_keys = run(*arrays)
    return jnp.sum(each), Index(d_q, d_weight, d_keys.sum(axis=0).astype(index.keys.dtype))


def _on_one_device(q, weight, keys, attention_q, attention_keys, mass, *chosen, heads: tuple[int, int], scale: float):
    """Returns the divergence of each query, and the gradients of index queries, weights and keys."""
    attended = Attended(attention_q, attention_keys, Chosen(*chosen), scale, mass)
    index_axes = axes_between("attn_heads", heads[0], q.shape[2])
    attention_axes = axes_between("attn_heads", heads[1], attention_q.shape[2])
    # Gradients of keys are added up over chunks in float32.
    wide = keys.astype(jnp.promote_types(keys.dtype, jnp.float32))

    def step(d_keys, chunk):
        q, weight, attention_q, chosen, mass = chunk
        attended_chunk = attended.of(attention_q, chosen, mass)
        seen = attended_chunk.seen()
        # [B, C, S] and [B, C, 1]
        target, total = (summed(x, attention_axes) for x in attended_chunk.over_heads(seen))
        target = target / jnp.maximum(total, 1e-30)
        scores, pull = jax.vjp(
            lambda q, weight, keys: Index(q, weight, attended_chunk.read(keys)).scores(), q, weight, wide
        )
        log_index = jax.nn.log_softmax(jnp.where(seen, summed(scores, index_axes), HIDDEN), axis=-1)
        # KL(p || softmax(s)) = sum of p log p - p log softmax(s), whose derivative is softmax(s) - p.
        each = jnp.where(seen, xlogy(target, target) - target * log_index, 0.0).sum(axis=-1)
        d_q, d_weight, d_chunk = pull(jnp.where(seen, jnp.exp(log_index) - target, 0.0))
        return d_keys + d_chunk, (each, d_q, d_weight)

    best = attended.chosen.best
    columns = keys.shape[1] if best is None else best.shape[2]
    xs = (q, weight, attention_q, attended.chosen, mass)
    width = (q.shape[2] + attention_q.shape[2]) * columns
    d_keys, (each, d_q, d_weight) = over_queries(step, jnp.zeros_like(wide), xs, per_query=width)
    return each, d_q, d_weight, summed(d_keys, index_axes)[None]


def _backward(gradient: Index, factor: Array) -> tuple[Index, Any]:
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), gradient), None


divergence.defvjp(_with_gradient, _backward)
