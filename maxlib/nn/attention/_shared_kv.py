"""Attention to the keys and values of an earlier layer (Brandon et al. 2024, arXiv:2405.12981).

Shapes: B rows, T new tokens, S keys, D width, N query heads, K key heads, H head dimension.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib.nn._linear import Einsum
from maxlib.nn.attention._grouped_query import attend, attention_kind, check_mask
from maxlib.nn.cache import SharedKV
from maxlib.nn.decoder._context import Context, context_of
from maxlib.nn.mixer import SequenceMixer, SplitSequence, Traffic
from maxlib.nn.remat import mark_heads
from maxlib.ops import Causal, Mask, Rope, apply_rope
from maxlib.sharding import constrain


class SharedKVAttention(SequenceMixer):
    """Attention that reuses the keys and values of an earlier `Attention` (`Attention.with_kv`).

    It has no cache, because the earlier layer's cache serves both. Gradients flow to the layer that computed the keys.

    Args:
        dim: Width D of the residual stream.
        num_heads: Number N of query heads.
        num_kv_heads: Number K of heads of the shared keys.
        head_dim: Width H of a head.
        mask: Which keys a query attends to, as in the layer that computed them.
        rope: Rotation of queries, as in that layer; None for none.
        q_norm: Norm over the head dimension of queries; None for none.
        scale: Factor on the scores, by default `head_dim ** -0.5`.
        bias: True adds a bias to the query projection.
        out_bias: True adds a bias to the output projection.
        implementation: Name of an implementation of `ops.attention`; None chooses the best one.
        rngs: Source of initial values.

    Raises:
        TypeError: when `mask` is not a mask.
        ValueError: when `mask` has a sliding window that is not causal.
    """

    op: ClassVar[str | None] = "attention"
    reorderable: ClassVar[bool] = True
    quantizable_cache: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        mask: Mask = Causal(),
        rope: Rope | None = None,
        q_norm: Callable | None = None,
        scale: float | None = None,
        bias: bool = False,
        out_bias: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        check_mask(mask)
        D, N, H = dim, num_heads, head_dim
        # Output dimensions first, as in `Attention`; there is no k and no v.
        self.q = Einsum("...D,NHD->...NH", (N, H, D), ("heads", "head_dim", "embed"), bias=bias, rngs=rngs)
        self.o = Einsum("...NH,DNH->...D", (D, N, H), ("embed", "heads", "head_dim"), bias=out_bias, rngs=rngs)
        self.mask, self.rope, self.q_norm, self.scale = mask, rope, q_norm, scale
        self.implementation = implementation
        self.num_heads, self.num_kv_heads, self.head_dim = N, num_kv_heads, H

    def __call__(
        self, x: Float[Array, "B T D"], ctx: Context | None = None, cache: SharedKV | None = None
    ) -> tuple[Float[Array, "B T D"], SharedKV | None]:
        """Attends to the keys and values of an earlier layer.

        Args:
            x: Input, `B T D`.
            ctx: The context that the earlier layer got.
            cache: That layer's keys and values.

        Returns:
            The output, `B T D`, and `cache` unchanged.

        Raises:
            ValueError: when keys and values are missing, or their number or width of heads differs.
        """
        if cache is None or cache.k.shape[2:] != (self.num_kv_heads, self.head_dim):
            raise ValueError(
                f"the keys of an earlier layer must be given, {self.num_kv_heads} heads of width {self.head_dim}; got "
                f"{None if cache is None else cache.k.shape}"
            )
        ctx = context_of(x, ctx)
        # [B, T, D] -> [B, T, N, H]
        q = constrain(self.q(x), "batch", "seq", "act_heads", None)
        q = q if self.q_norm is None else self.q_norm(q)
        # The keys are rotated already, each by its own position.
        if self.rope is not None:
            q = apply_rope(q, *ctx.rotary(self.rope), interleaved=self.rope.interleaved)
        # softmax(scale * q k^T) v, [B, T, N, H] with [B, S, K, H] -> [B, T, N, H]
        out = attend(
            mark_heads(q, "q"),
            cache.k,
            cache.v,
            cache.k_start,
            cache.k_end,
            mask_hint=cache.mask_hint,
            scale=self.scale,
            implementation=self.implementation,
            zigzag=ctx.zigzag,
        )
        return self.o(checkpoint_name(out, "heads")), cache

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> None:
        """Returns None: the earlier layer's cache has all keys."""

    def traffic(self, split: SplitSequence) -> Traffic:
        """Returns the bytes that attention sends in a training step (`SplitSequence.attention`)."""
        return split.attention(queries=2 * self.num_heads * self.head_dim, keys=2 * self.num_kv_heads * self.head_dim)

    @property
    def kind(self) -> str:
        """Names the kind in tables: MHA, GQA or MQA."""
        return attention_kind(self.num_heads, self.num_kv_heads)

    @property
    def features(self) -> tuple[str, ...]:
        """Labels of its options for tables."""
        return ("shared keys",) if self.q_norm is None else ("qk-norm", "shared keys")
