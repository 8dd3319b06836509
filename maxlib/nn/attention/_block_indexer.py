"""An indexer that chooses blocks of neighbouring keys (Qwen3.8-Flash-Next 2026).

Shapes: B rows, T queries, S keys, J places of blocks, D width, I index heads of width Hi.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib.nn._linear import Einsum
from maxlib.nn.attention._indexer import Index, PoolIndexer, fix
from maxlib.nn.decoder._context import Context
from maxlib.nn.norm import RMSNorm
from maxlib.ops import MRope, Rope


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
