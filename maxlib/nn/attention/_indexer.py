"""The lightning indexer (DeepSeek-AI 2025, arXiv:2512.02556), which chooses the keys that a query attends to, or pools
of neighbouring ones (GLM-5.3-Flash 2026).

Shapes: B rows, T queries, S keys, K chosen keys, J places of pools, D width, I index heads of width Hi, R latent size
of queries.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.attention._query_chunks import ALL_KEYS, HEADS, QUERIES, WEIGHTS, axes_between, over_queries, summed
from maxlib.nn.decoder._context import Context
from maxlib.nn.norm import LayerNorm
from maxlib.ops import apply_rope
from maxlib.sharding import shard_map_by_name


class Index(NamedTuple):
    """What scores are computed of: queries `B T I Hi`, a weight of each head `B T I` in float32, keys `B S Hi`."""

    q: Array
    weight: Array
    keys: Array

    def scores(self) -> Float[Array, "B T S"]:
        """Returns the scores of all keys, or of those of each query if keys are `B T K Hi`; in float32."""
        spec = "btnh,bsh->btns" if self.keys.ndim == 3 else "btnh,btsh->btns"
        dtype = jnp.promote_types(self.q.dtype, jnp.float32)
        agree = jnp.einsum(spec, self.q, self.keys, precision="highest", preferred_element_type=dtype)
        # A head that disagrees says nothing; one that agrees counts by a weight of the query, which may be negative.
        return jnp.einsum("btn,btns->bts", self.weight, jax.nn.relu(agree), precision="highest")


@pytree
class Chosen:
    """The keys that each query attends to.

    Attributes:
        start: Its first visible key, `B T`.
        end: One past its last visible key, `B T`.
        best: The chosen ones, `B T K`, some of them hidden if fewer than K are visible; None: all that are visible.
    """

    start: Int[Array, "B T"]
    end: Int[Array, "B T"]
    best: Int[Array, "B T K"] | None = None

    def among_best(self) -> Bool[Array, "B T K"]:
        """Returns True where one of the `best` is visible."""
        return self._visible(self.best)

    def among_all(self, keys: int) -> Bool[Array, "B T S"]:
        """Returns True for the keys that are chosen, of S in all."""
        visible = self._visible(jnp.arange(keys)[None, None])
        if self.best is None:
            return visible
        rows, queries = jnp.arange(visible.shape[0])[:, None, None], jnp.arange(visible.shape[1])[None, :, None]
        return jnp.zeros(visible.shape, bool).at[rows, queries, self.best].set(True) & visible

    def _visible(self, place: Any) -> Array:
        return (place >= self.start[..., None]) & (place < self.end[..., None])


class Indexer(nnx.Module):
    """Base class of indexers, whose subclasses make keys and `weight`: `sum over heads of w relu(q . k) / sqrt(Hi I)`
    scores a key.

    No gradient passes through the choice of the best keys: only an `IndexLoss` trains the weights.

    Args:
        q_rank: Size R of the latent of queries, of which the layer's own queries are made too.
        num_heads: Number I of index heads; all share one key.
        head_dim: Width Hi of index queries and keys.
        top_k: Keys that a query attends to.
        rope: Rotation of the first `rope.dim` numbers of index queries and keys; not used if `_rotate` is overridden.
        rngs: Source of initial values.

    Attributes:
        weight: Projection of the input to a weight of each head (`head_weights`).
    """

    weight: Einsum

    def __init__(self, q_rank: int, *, num_heads: int, head_dim: int, top_k: int, rope: Any = None, rngs: nnx.Rngs):
        R, I, H = q_rank, num_heads, head_dim
        self.q = Einsum("...R,NHR->...NH", (I, H, R), ("heads", "head_dim", "rank"), gather_once=True, rngs=rngs)
        self.dim, self.num_heads, self.top_k, self.rope = H, I, top_k, rope

    @property
    def scale(self) -> float:
        """Factor on the weights of heads."""
        return (self.dim * self.num_heads) ** -0.5

    @property
    def key_dim(self) -> int:
        """Numbers that a cache keeps of a token."""
        return self.dim

    def compared(self, keys: Float[Array, "B S Hi"], ctx: Context | None) -> Float[Array, "B S Hi"]:
        """Returns the keys that scores compare, from those that a cache keeps: the same."""
        return keys

    def index(
        self, x: Float[Array, "B T D"], latent: Float[Array, "B T R"], keys: Float[Array, "B S Hi"], ctx: Context
    ) -> Index:
        """Returns what the scores of tokens are computed of.

        Args:
            x: Input of the layer.
            latent: The normed latent of queries.
            keys: Index keys of all tokens.
            ctx: Values shared by all layers.
        """
        weight = self.weight(x)
        weight = self.scale * weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
        return Index(self._rotate(self.q(latent), ctx), weight, keys.astype(x.dtype))

    def choose(self, index: Index, bounds: tuple[Int[Array, "B T"], Int[Array, "B T"]]) -> Chosen:
        """Returns the keys of each query's interval that it attends to.

        Args:
            index: What scores are computed of.
            bounds: First key and the key after the last one of every query.
        """

        def local(q, weight, keys, *bounds):
            heads = axes_between("attn_heads", self.num_heads, q.shape[2])

            def step(carry, chunk):
                q, weight, *bounds = chunk
                seen = Chosen(*bounds).among_all(keys.shape[1])
                scores = jnp.where(seen, summed(Index(q, weight, keys).scores(), heads), -jnp.inf)
                # [B, C, S] -> [B, C, K]. Of equal scores the earlier key is chosen; hidden keys fill what is left.
                return carry, jax.lax.top_k(scores, self.top_k)[1]

            # What each head says of every key, [B, C, I, S].
            return over_queries(step, None, (q, weight, *bounds), per_query=q.shape[2] * keys.shape[1])[1]

        # Each device chooses for its own queries; XLA would gather all scores to sort them.
        names = [HEADS, WEIGHTS, ALL_KEYS, QUERIES, QUERIES]
        best = shard_map_by_name(local, names, (*QUERIES, None))(*jax.lax.stop_gradient(index), *bounds)
        return Chosen(*bounds, checkpoint_name(best, "chosen"))

    def _rotate(self, x: Array, ctx: Context) -> Array:
        """Rotates the first numbers of each head, `B T N Hi`."""
        return self._turned(x, *ctx.rotary(self.rope))

    def _turned(self, x: Array, cos: Array, sin: Array) -> Array:
        # [B, T, N, Hi] -> the part that knows its position, and the rest.
        turned, rest = jnp.split(x, [self.rope.dim], axis=-1)
        return jnp.concatenate([apply_rope(turned, cos, sin, interleaved=self.rope.interleaved), rest], axis=-1)


class LightningIndexer(Indexer):
    """Indexer with a key for each token (DeepSeek V3.2).

    Args:
        dim: Width D of the residual stream.
        q_rank: Size R of the latent of queries.
        head_dim: Width Hi of index queries and keys.
        trained: False for weights that are stored, but are no parameters.
        rngs: Source of initial values.
        **options: Those of `Indexer`.
    """

    def __init__(self, dim: int, q_rank: int, *, head_dim: int, trained: bool = False, rngs: nnx.Rngs, **options: Any):
        super().__init__(q_rank, head_dim=head_dim, rngs=rngs, **options)
        axes = ("head_dim", "embed")
        self.k = Einsum("...D,HD->...H", (head_dim, dim), axes, gather_once=True, rngs=rngs)
        self.k_norm = LayerNorm(head_dim, eps=1e-6)
        self.weight = head_weights(dim, self.num_heads, rngs=rngs)
        if not trained:
            fix(self)

    def keys(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T Hi"]:
        """Returns the index keys of tokens."""
        return self._rotate(self.k_norm(self.k(x))[:, :, None], ctx)[:, :, 0]


def head_weights(dim: int, num_heads: int, *, rngs: nnx.Rngs) -> Einsum:
    """Makes the projection of an indexer's input of width `dim` to a weight of each head."""
    return Einsum("...D,ND->...N", (num_heads, dim), ("heads", "embed"), rngs=rngs)


def fix(module: nnx.Module) -> None:
    """Makes the parameters of a module variables that are stored and not trained."""
    for _, part in nnx.iter_modules(module):
        for name, value in list(vars(part).items()):
            if isinstance(value, nnx.Param):
                setattr(part, name, nnx.Variable(value.get_value(), **value.get_metadata()))


def taken(a: Float[Array, "B S R"], places: Int[Array, "B T K"], dtype: Any) -> Float[Array, "B T K R"]:
    """Returns each query's entries of `a`, cast to `dtype`; pass `a` in float32 to add up its gradient in it."""
    return jax.vmap(lambda row, places: row[places])(a, places).astype(dtype)


def chosen_mask(chosen: Chosen, keys: int) -> Bool[Array, "B T S"]:
    """Returns True for the keys that are chosen, of S in all; each device for its own queries."""

    def local(*bounds_and_best: Array) -> Array:
        return Chosen(*bounds_and_best).among_all(keys)

    run = shard_map_by_name(local, [QUERIES, QUERIES, (*QUERIES, None)], (*QUERIES, None))
    return run(chosen.start, chosen.end, chosen.best)
