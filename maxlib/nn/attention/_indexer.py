"""Indexers, which choose the keys that a query attends to: single ones (the lightning indexer, DeepSeek-AI 2025,
arXiv:2512.02556), or pools of neighbouring ones, by a weighted mean (GLM-5.3-Flash 2026) or a plain one
(Qwen3.8-Flash-Next 2026). Loops over chunks of queries bound the memory of pairs of a query and a key.

Shapes: B rows, T queries, S keys, K chosen keys or pools, J places of pools, D width, I index heads of width Hi, R
latent size of queries.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from maxlib._utils.loops import scan
from maxlib.hardware import current_device
from maxlib.nn._linear import Einsum
from maxlib.nn._pytree import pytree
from maxlib.nn.decoder._context import Context
from maxlib.nn.norm import LayerNorm, RMSNorm
from maxlib.ops import MRope, Rope, apply_rope
from maxlib.sharding import shard_map_by_name
from maxlib.sharding.layers import mesh_axes

# In float32: 256 MiB, or 4 MiB, which stay in the cache of a CPU (2.4 times as fast as 256).
NUMBERS = {"cpu": 2**20, "other": 2**26}

# Axis names of [B, T], [B, T, N], [B, T, N, H] and [B, S, R] within attention, as in `attend`.
QUERIES = ("batch", "q_seq")
WEIGHTS = (*QUERIES, "attn_heads")
HEADS = (*WEIGHTS, None)
ALL_KEYS = ("batch", None, None)


def over_queries(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, per_query: int):
    """Runs `step(carry, x) -> (carry, y)` for chunks of queries, as `jax.lax.scan` does.

    Args:
        step: Takes arrays `B C ...` of C queries, and returns such.
        carry: First carry.
        xs: Arrays `B T ...`. The last chunk is filled up with zeros.
        per_query: Numbers of intermediates that a query needs; a chunk has at most `NUMBERS`.

    Returns:
        The last carry, and the outputs of all queries, `B T ...`.
    """
    rows, queries = jax.tree.leaves(xs)[0].shape[:2]
    most = NUMBERS["cpu" if current_device()[0] == "cpu" else "other"]
    count = min(-(-rows * queries * per_query // most), queries)
    if count <= 1:
        return step(carry, xs)
    carry, ys = scan(step, carry, jax.tree.map(lambda a: _cut(a, count), xs))
    return carry, jax.tree.map(lambda a: _joined(a)[:, :queries], ys)


def _cut(a: jax.Array, count: int) -> jax.Array:
    """Splits `B T ...` into `count B C ...`."""
    size = -(-a.shape[1] // count)
    a = jnp.pad(a, [(0, 0), (0, count * size - a.shape[1])] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], count, size, *a.shape[2:]), 1, 0)


def _joined(a: jax.Array) -> jax.Array:
    """Inverts `_cut`, but for the padding."""
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], -1, *a.shape[3:])


def axes_between(name: str, size: int, local_size: int) -> Sequence[str]:
    """Returns the mesh axes that split a dimension of `size` into `local_size` within a `shard_map_by_name`.

    These are the first ones of the axis `name`, as those that do not divide the dimension are dropped.
    """
    splitting, parts = [], size // local_size
    for axis in mesh_axes(name):
        if parts > 1:
            splitting, parts = [*splitting, axis], parts // jax.lax.axis_size(axis)
    return splitting


def summed(x: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Sums over mesh axes, of which there may be none."""
    return jax.lax.psum(x, tuple(axes)) if axes else x


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


NOWHERE = 1 << 30  # a place beyond all keys


class PoolIndexer(Indexer):
    """Base class of indexers of pools of `pool` tokens; a subclass makes the keys of pools.

    Pools count from the first token of a document. A query attends to the `top_k` best of those that are complete, and
    to the tokens since the last one, its own included. A pool is known by its place: the place `j` is that of the only
    pool that may end at one of the keys from `j * pool` to `(j + 1) * pool - 1`.

    Attributes:
        pool: Tokens of a pool.
    """

    pool: int

    def choose(self, index: Index, bounds: tuple[Int[Array, "B T"], Int[Array, "B T"]]) -> Chosen:
        """Returns the tokens of the chosen pools and those since the last pool, for each query's interval of keys."""
        start, end = bounds
        first = (start + self.pool - 1) // self.pool  # place of the document's first pool
        complete = (end - start) // self.pool
        pools = super().choose(index, (first, first + complete))
        assert pools.best is not None
        # The pool at the place j ends at the token j * pool + (start - 1) % pool.
        begin = self.pool * pools.best + ((start - 1) % self.pool - self.pool + 1)[..., None]
        begin = jnp.where(pools.among_best(), begin, NOWHERE)
        # [B, T, K] -> [B, T, K, pool] -> [B, T, K * pool]
        tokens = begin[..., None] + jnp.arange(self.pool)[None, None, None]
        tail = (start + self.pool * complete)[..., None] + jnp.arange(self.pool - 1)[None, None]
        return Chosen(start, end, jnp.concatenate([tokens.reshape(*start.shape, -1), tail], axis=-1))

    def _pools(self, a: Array, ctx: Context | None) -> Array:
        """Returns the tokens of pools, `B S W` as `B J pool W`.

        Args:
            a: What is stored of each token.
            ctx: Context of the tokens; None if each row is one document from its first key on.
        """
        B, S = a.shape[:2]
        a = jnp.pad(a, ((0, 0), (0, -S % self.pool), (0, 0)))
        if ctx is None or not ctx.packed:
            return a.reshape(B, -1, self.pool, a.shape[2])
        ends = jnp.pad((ctx.index - ctx.start + 1) % self.pool == 0, ((0, 0), (0, -S % self.pool)))
        ends = ends.reshape(B, -1, self.pool)
        # [B, J]: the last token of the pool at each place.
        last = jnp.argmax(ends, axis=2) + self.pool * jnp.arange(ends.shape[1])[None]
        tokens = last[..., None] + (jnp.arange(self.pool) - self.pool + 1)[None, None]
        return jax.vmap(lambda row, places: row[places])(a, jnp.maximum(tokens, 0))


class PooledIndexer(PoolIndexer):
    """Indexer of pools whose key is a mean of the keys of their tokens, weighted channel by channel (GLM-5.3-Flash).

    Nothing is rotated, and weights are stored and not trained.

    Args:
        dim: Width D of the residual stream.
        q_rank: Size R of the latent of queries.
        head_dim: Width Hi of index queries and keys.
        pool: Tokens of a pool.
        rngs: Source of initial values.
        **options: Those of `Indexer`, whose `top_k` counts pools.
    """

    def __init__(self, dim: int, q_rank: int, *, head_dim: int, pool: int, rngs: nnx.Rngs, **options: Any):
        super().__init__(q_rank, head_dim=head_dim, rngs=rngs, **options)
        shape, axes = (head_dim, dim), ("head_dim", "embed")
        self.k = Einsum("...D,HD->...H", shape, axes, gather_once=True, rngs=rngs)
        self.gate = Einsum("...D,HD->...H", shape, axes, gather_once=True, rngs=rngs)
        self.place = nnx.Param(jnp.zeros((pool, head_dim)), axes=("tap", "head_dim"))
        self.k_norm = LayerNorm(head_dim, eps=1e-6)
        self.weight = head_weights(dim, self.num_heads, rngs=rngs)
        self.pool = pool
        fix(self)

    @property
    def key_dim(self) -> int:
        """Numbers that a cache keeps of a token: its key, and the gate of each channel."""
        return 2 * self.dim

    def keys(self, x: Float[Array, "B T D"], ctx: Context) -> Float[Array, "B T key_dim"]:
        """Returns the keys and gates of tokens."""
        return jnp.concatenate([self.k_norm(self.k(x)), self.gate(x)], axis=-1)

    def compared(self, keys: Float[Array, "B S key_dim"], ctx: Context | None) -> Float[Array, "B J Hi"]:
        """Returns the keys of pools.

        Args:
            keys: Those of tokens (`keys`).
            ctx: Context of the tokens; None if each row is one document from its first key on.
        """
        # [B, J, pool, Hi], twice
        values, gates = jnp.split(self._pools(keys, ctx), 2, axis=-1)
        gates = gates.astype(jnp.promote_types(gates.dtype, jnp.float32)) + self.place[...][None, None]
        return jnp.sum(jax.nn.softmax(gates, axis=2).astype(values.dtype) * values, axis=2)

    def _rotate(self, x: Array, ctx: Any) -> Array:
        return x


class BlockIndexer(PoolIndexer):
    """Indexer of blocks whose key is a mean: `rotated(norm(mean(k(x))))`, by the position of the first token.

    A block's score is `sum over heads of relu(q . k) / sqrt(Hi)`. Weights are stored and not trained.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number I of index heads; all share one key.
        head_dim: Width Hi of index queries and keys.
        top_k: Blocks that a query attends to.
        block: Tokens of a block.
        rope: Rotation of the first `rope.dim` numbers of index queries and keys.
        norm_eps: Epsilon of the norms.
        rngs: Source of initial values.
    """

    rope: Rope | MRope

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        head_dim: int,
        top_k: int,
        block: int,
        rope: Rope | MRope,
        norm_eps: float,
        rngs: nnx.Rngs,
    ):
        D, I, H = dim, num_heads, head_dim
        self.q = Einsum("...D,NHD->...NH", (I, H, D), ("heads", "head_dim", "embed"), gather_once=True, rngs=rngs)
        self.k = Einsum("...D,HD->...H", (H, D), ("head_dim", "embed"), gather_once=True, rngs=rngs)
        self.q_norm = RMSNorm(H, eps=norm_eps, plus_one=True)
        self.k_norm = RMSNorm(H, eps=norm_eps, plus_one=True)
        self.dim, self.num_heads, self.top_k, self.pool, self.rope = H, I, top_k, block, rope
        fix(self)

    def of_blocks(
        self, x: Float[Array, "B T D"], keys: Float[Array, "B S Hi"], positions: Int[Array, "B S R"], ctx: Context,
        *, cached: bool,
    ) -> Index:  # fmt: skip
        """Returns what the scores of blocks are computed of.

        Args:
            x: Input of the layer.
            keys: `k(x)` of all tokens.
            positions: Those of all tokens.
            ctx: Values shared by all layers.
            cached: True if `keys` are those of a cache.
        """
        tokens = None if cached else ctx
        # [B, S, Hi] -> [B, J, block, Hi] -> [B, J, Hi]
        mean = self._pools(keys, tokens).astype(jnp.promote_types(x.dtype, jnp.float32)).mean(axis=2).astype(x.dtype)
        first = self._pools(positions, tokens)[:, :, 0]
        tables = self.rope.tables(first if isinstance(self.rope, MRope) else first[..., 0])
        blocks = self._turned(self.k_norm(mean)[:, :, None], *tables)[:, :, 0]
        q = self._rotate(self.q_norm(self.q(x)), ctx)
        weight = jnp.full(q.shape[:3], self.dim**-0.5, jnp.promote_types(x.dtype, jnp.float32))
        return Index(q, weight, blocks)
