"""The loss that trains a lightning indexer to find the keys that attention looks at (arXiv:2512.02556, section 2.1).

Shapes: B rows, T queries, S keys, K chosen keys, N heads of width H, R width of a latent with the shared key.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.special import xlogy
from jaxtyping import Array, Float

from maxlib.nn._lightning_indexer import Chosen, Index, taken
from maxlib.nn._pytree import pytree, static
from maxlib.nn._query_chunks import over_queries

HIDDEN = -1e30  # of a key that is not chosen, before the softmax


@dataclasses.dataclass(frozen=True)
class IndexLoss:
    """Loss of the indexers of `SparseMLA`: `weight * KL(attention || softmax(index scores))`, averaged over queries.

    Attention is its probabilities averaged over heads (summed, and normalized to 1). They have no gradient, nor has the
    indexer's input: indexers learn from this loss only, and everything else from the other losses only.

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
        keys: Keys of each head, `B S N H`; or latents that are the keys of all heads, `B S R`, of which only the
            chosen ones are read.
        chosen: The keys that count.
        scale: Factor on scores.
    """

    q: Array
    keys: Array
    chosen: Chosen
    scale: float = static()

    @property
    def gathers(self) -> bool:
        """Whether only chosen keys are read."""
        return self.keys.ndim == 3

    def seen(self) -> Array:
        """Returns True for keys that count: `B T S`, or `B T K` if only chosen keys are read."""
        return self.chosen.among_best() if self.gathers else self.chosen.among_all(self.keys.shape[1])

    def read(self, keys: Array) -> Array:
        """Returns keys of tokens in the queries' dtype; if only chosen ones are read, these, `B T K ...`."""
        return taken(keys, self.chosen.best, self.q.dtype) if self.gathers else keys.astype(self.q.dtype)

    def probabilities(self, keys: Array, seen: Array) -> Float[Array, "B N T S"]:
        """Returns the probabilities of these keys in float32; zeros for queries that see none."""
        spec = "btnh,btsh->bnts" if self.gathers else "btnh,bsnh->bnts"
        dtype, seen = jnp.promote_types(self.q.dtype, jnp.float32), seen[:, None]
        scores = self.scale * jnp.einsum(spec, self.q, keys, preferred_element_type=dtype)
        return jnp.where(seen, jax.nn.softmax(jnp.where(seen, scores, HIDDEN), axis=-1), 0.0)

    def of(self, q: Array, chosen: Chosen) -> "Attended":
        """Returns the part of some queries."""
        return dataclasses.replace(self, q=q, chosen=chosen)


@jax.custom_vjp
def divergence(index: Index, attended: Attended) -> Float[Array, ""]:
    """Returns `KL(attention || softmax(index scores))`, summed over queries; only `index` has a gradient.

    Chunks of queries are computed one after another. The gradient is computed while a chunk's probabilities are there,
    so neither pass stores anything for pairs of a query and a key.
    """
    return _with_gradient(index, attended)[0]


def _with_gradient(index: Index, attended: Attended) -> tuple[Array, Index]:
    """Returns the divergence and its gradient."""

    def step(carry, chunk):
        q, weight, part = chunk
        part = attended.of(*part)
        found, (d_q, d_weight, d_keys) = jax.value_and_grad(_of_chunk, (0, 1, 2))(q, weight, keys, part)
        return (carry[0] + found, carry[1] + d_keys), (d_q, d_weight)

    # Gradients of keys are added up over chunks in float32.
    keys = index.keys.astype(jnp.promote_types(index.keys.dtype, jnp.float32))
    carry = jnp.zeros((), keys.dtype), jnp.zeros_like(keys)
    columns = keys.shape[1] if not attended.gathers else attended.chosen.best.shape[2]
    xs = (index.q, index.weight, (attended.q, attended.chosen))
    heads = attended.q.shape[2] + index.q.shape[2]
    (total, d_keys), of_queries = over_queries(step, carry, xs, per_query=heads * columns)
    return total, Index(*of_queries, d_keys.astype(index.keys.dtype))


def _of_chunk(q: Array, weight: Array, keys: Array, attended: Attended) -> Array:
    """Returns the divergence of a chunk of queries."""
    seen = attended.seen()
    # [B, N, C, S] -> [B, C, S]
    target = jax.lax.stop_gradient(attended.probabilities(attended.read(attended.keys), seen).mean(axis=1))
    scores = jnp.where(seen, Index(q, weight, attended.read(keys)).scores(), HIDDEN)
    # KL(p || softmax(s)) = sum of p log p - p log softmax(s), over keys that count; those of padding are none.
    each = xlogy(target, target) - target * jax.nn.log_softmax(scores, axis=-1)
    return jnp.sum(jnp.where(seen, each, 0.0))


def _forward(index: Index, attended: Attended) -> tuple[Array, Index]:
    return _with_gradient(index, attended)


def _backward(gradient: Index, factor: Array) -> tuple[Index, Any]:
    return jax.tree.map(lambda g: (factor * g).astype(g.dtype), gradient), None


divergence.defvjp(_forward, _backward)
