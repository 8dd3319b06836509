"""Images: a tower that turns them into vectors, and the place of those vectors among text."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from maxlib.nn.attention import Attention
from maxlib.nn.context import Context, context
from maxlib.nn.linear import Einsum
from maxlib.nn.mlp import MLP
from maxlib.nn.norm import LayerNorm
from maxlib.nn.remat import Policy
from maxlib.nn.stack import Stack
from maxlib.ops.attention import Full
from maxlib.sharding import constrain


class EncoderBlock(nnx.Module):
    """Pre-norm with LayerNorm and biases; every token sees every other."""

    def __init__(self, dim: int, mlp_dim: int, *, num_heads: int, eps: float = 1e-6, rngs: nnx.Rngs):
        self.attn_norm = LayerNorm(dim, eps=eps)
        self.attn = Attention(
            dim, num_heads=num_heads, head_dim=dim // num_heads, mask=Full(), bias=True, out_bias=True, rngs=rngs
        )
        self.mlp_norm = LayerNorm(dim, eps=eps)
        self.mlp = MLP(dim, mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "I P D"], ctx: Context, cache: None = None):
        x = x + self.attn(self.attn_norm(x), ctx)[0]
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class SigLIP(nnx.Module):
    """The image encoder of SigLIP (Zhai et al. 2023, arXiv:2303.15343): square patches, learned positions, no class token.

    Raises ValueError when `patch_size` does not divide `image_size`, or `num_heads` not `dim`.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        num_layers: int,
        num_heads: int,
        image_size: int,
        patch_size: int,
        eps: float = 1e-6,
        rngs: nnx.Rngs,
    ):
        if image_size % patch_size or dim % num_heads:
            raise ValueError(
                f"patch_size must divide image_size, and num_heads dim; got {patch_size}, {image_size}, {num_heads}, {dim}"
            )
        self.image_size, self.patch_size = image_size, patch_size
        patch = (dim, 3, patch_size, patch_size)
        axes = ("embed", "channel", "patch_row", "patch_column")
        self.patches = Einsum("ICyaxb,DCab->IyxD", patch, axes, bias=True, rngs=rngs)
        init = nnx.initializers.normal(dim**-0.5)
        positions = init(rngs.params(), ((image_size // patch_size) ** 2, dim), jnp.float32)
        self.positions = nnx.Param(positions, axes=("position", "embed"))
        make = lambda i, rngs: EncoderBlock(dim, mlp_dim, num_heads=num_heads, eps=eps, rngs=rngs)
        self.layers = Stack(make, num_layers, rngs=rngs)
        self.norm = LayerNorm(dim, eps=eps)

    def __call__(
        self, images: Float[Array, "I C H W"], *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "I P D"]:
        """One vector per patch, row by row. `images`: RGB, scaled as the tower was trained (SigLIP: from -1 to 1)."""
        size, patch = self.image_size, self.patch_size
        if images.shape[1:] != (3, size, size):
            raise ValueError(f"images must have the shape (number, 3, {size}, {size}), got {images.shape}; resize them")
        grid = images.astype(dtype).reshape(-1, 3, size // patch, patch, size // patch, patch)
        x = self.patches(grid).reshape(len(images), -1, self.positions.shape[-1])
        x = constrain(x + jnp.asarray(self.positions[...], dtype)[None], "batch", "seq", "act_embed")
        x, _, _ = self.layers(x, context(*x.shape[:2], masks=(Full(),)), remat=remat)
        return self.norm(x)


class PoolProjector(nnx.Module):
    """From patches to fewer vectors of the text's width: the mean of `pool` x `pool` patches, `norm`, a matmul (Gemma 3)."""

    def __init__(self, dim: int, text_dim: int, *, pool: int, norm: Callable, rngs: nnx.Rngs):
        self.norm = norm
        self.proj = Einsum("...E,ED->...D", (dim, text_dim), ("vision", "embed"), rngs=rngs)
        self.pool = pool

    def __call__(self, x: Float[Array, "I P E"]) -> Float[Array, "I S D"]:
        I, P, E = x.shape
        side = math.isqrt(P) // self.pool
        x = x.reshape(I, side, self.pool, side, self.pool, E).mean(axis=(2, 4))
        return self.proj(self.norm(x.reshape(I, side * side, E)))


def check_placeholders(is_placeholder: Bool[Any, "B T"], count: int) -> None:
    """Raises ValueError if the placeholders among the tokens are not `count`; inside jit their number is not known."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        if (found := int(is_placeholder.sum())) != count:
            raise ValueError(
                f"the tokens hold {found} image placeholders, but the images given make {count} vectors: there must be as "
                "many; take prompt and images from one call of the processor"
            )


def place_features(
    x: Float[Array, "B T D"], is_placeholder: Bool[Array, "B T"], features: Float[Array, "I S D"]
) -> Float[Array, "B T D"]:
    """`x` with its placeholders, row after row, replaced by the vectors of `features`, image after image.

    Where there are more or fewer placeholders than vectors all of them become NaN: call `check_placeholders` before.
    """
    flat = features.reshape(-1, features.shape[-1]).astype(x.dtype)
    flat = jnp.where(is_placeholder.sum() == len(flat), flat, jnp.nan)
    index = jnp.cumsum(is_placeholder.reshape(-1)).reshape(is_placeholder.shape) - 1
    return jnp.where(is_placeholder[:, :, None], jnp.take(flat, index, axis=0, mode="clip"), x)
