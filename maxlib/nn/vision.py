"""Images: towers that turn them into vectors, and the place of those vectors among text."""

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from maxlib.nn._attention import Attention
from maxlib.nn._context import Context, context
from maxlib.nn._linear import Einsum
from maxlib.nn._mlp import MLP
from maxlib.nn._norm import LayerNorm
from maxlib.nn._stack import Stack
from maxlib.nn.remat import Policy
from maxlib.ops._attention import Full
from maxlib.ops._grid_rope import GridRope
from maxlib.sharding import constrain


def exact_gelu(x: Array) -> Array:
    """GELU without the tanh approximation."""
    return jax.nn.gelu(x, approximate=False)


class EncoderBlock(nnx.Module):
    """Pre-norm with LayerNorm and biases; every token sees every other."""

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        num_heads: int,
        rope: GridRope | None = None,
        act: Callable = jax.nn.gelu,
        eps: float = 1e-6,
        rngs: nnx.Rngs,
    ):
        H = dim // num_heads
        self.attn_norm = LayerNorm(dim, eps=eps)
        self.attn = Attention(
            dim, num_heads=num_heads, head_dim=H, mask=Full(), rope=rope, bias=True, out_bias=True, rngs=rngs
        )
        self.mlp_norm = LayerNorm(dim, eps=eps)
        self.mlp = MLP(dim, mlp_dim, act=act, rngs=rngs)

    def __call__(self, x: Float[Array, "I P D"], ctx: Context, cache: None = None):
        x = x + self.attn(self.attn_norm(x), ctx)[0]
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class SigLIP(nnx.Module):
    """The image encoder of SigLIP (Zhai et al. 2023, arXiv:2303.15343): square patches, learned positions, no class
    token.

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
        _check_sizes(dim, num_heads, image_size, patch_size)
        self.image_size, self.patch_size = image_size, patch_size
        self.patches = _patch_embedding(dim, patch_size, bias=True, rngs=rngs)
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
        grid = _in_patches(images.astype(dtype), self.image_size, self.patch_size)
        x = self.patches(grid).reshape(len(images), -1, self.positions.shape[-1])
        x = constrain(x + jnp.asarray(self.positions[...], dtype)[None], "batch", "seq", "act_embed")
        x, _, _ = self.layers(x, context(*x.shape[:2], masks=(Full(),)), remat=remat)
        return self.norm(x)


class Llama4Vision(nnx.Module):
    """The image encoder of Llama 4: learned positions and rotary ones on the grid of patches, a class token behind
    them.

    theta: base of the rotary embedding. Raises ValueError when `patch_size` does not divide `image_size`, or
    `num_heads` not `dim`.
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
        theta: float = 10_000.0,
        rngs: nnx.Rngs,
    ):
        _check_sizes(dim, num_heads, image_size, patch_size)
        self.image_size, self.patch_size = image_size, patch_size
        self.patches = _patch_embedding(dim, patch_size, bias=False, rngs=rngs)
        side, init = image_size // patch_size, nnx.initializers.normal(dim**-0.5)
        self.class_token = nnx.Param(init(rngs.params(), (dim,), jnp.float32), axes=("embed",))
        self.positions = nnx.Param(init(rngs.params(), (side**2 + 1, dim), jnp.float32), axes=("position", "embed"))
        self.pre_norm = LayerNorm(dim)
        self.rope = GridRope(dim // num_heads, side, theta)
        parts = {"num_heads": num_heads, "rope": self.rope, "act": exact_gelu, "eps": 1e-5}
        self.layers = Stack(lambda i, rngs: EncoderBlock(dim, mlp_dim, **parts, rngs=rngs), num_layers, rngs=rngs)
        self.norm = LayerNorm(dim)

    def __call__(
        self, images: Float[Array, "I C H W"], *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "I P D"]:
        """One vector per patch, row by row. `images`: RGB tiles, from -1 to 1."""
        grid = _in_patches(images.astype(dtype), self.image_size, self.patch_size)
        I, D = len(images), self.positions.shape[-1]
        last = jnp.broadcast_to(jnp.asarray(self.class_token[...], dtype), (I, 1, D))
        x = jnp.concatenate([self.patches(grid).reshape(I, -1, D), last], axis=1)
        x = self.pre_norm(x + jnp.asarray(self.positions[...], dtype)[None])
        ctx = context(*x.shape[:2], masks=(Full(),), ropes=(self.rope,))
        x, _, _ = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, remat=remat)
        return self.norm(x[:, :-1])


def _check_sizes(dim: int, num_heads: int, image_size: int, patch_size: int) -> None:
    if image_size % patch_size or dim % num_heads:
        raise ValueError(
            f"patch_size must divide image_size, and num_heads dim; got {patch_size}, {image_size}, {num_heads}, {dim}"
        )


def _patch_embedding(dim: int, patch_size: int, *, bias: bool, rngs: nnx.Rngs) -> Einsum:
    patch, axes = (dim, 3, patch_size, patch_size), ("embed", "channel", "patch_row", "patch_column")
    return Einsum("ICyaxb,DCab->IyxD", patch, axes, bias=bias, rngs=rngs)


def _in_patches(images, size: int, patch: int) -> Float[Array, "I C y a x b"]:
    if images.shape[1:] != (3, size, size):
        raise ValueError(f"images must have the shape (number, 3, {size}, {size}), got {images.shape}; resize them")
    return images.reshape(-1, 3, size // patch, patch, size // patch, patch)


class PoolProjector(nnx.Module):
    """From patches to fewer vectors of the text's width: the mean of `pool` x `pool` patches, `norm`, a matmul (Gemma
    3).
    """

    def __init__(self, dim: int, text_dim: int, *, pool: int, norm: Callable, rngs: nnx.Rngs):
        self.norm = norm
        self.proj = Einsum("...E,ED->...D", (dim, text_dim), ("vision", "embed"), rngs=rngs)
        self.pool = pool

    def __call__(self, x: Float[Array, "I P E"]) -> Float[Array, "I S D"]:
        I, P, E = x.shape
        side = math.isqrt(P) // self.pool
        x = x.reshape(I, side, self.pool, side, self.pool, E).mean(axis=(2, 4))
        return self.proj(self.norm(x.reshape(I, side * side, E)))


class ShuffleProjector(nnx.Module):
    """From patches to fewer vectors of the text's width: `shuffle` x `shuffle` patches side by side, an MLP, a matmul
    (Llama 4).
    """

    def __init__(self, dim: int, mlp_dim: int, text_dim: int, *, shuffle: int, rngs: nnx.Rngs):
        self.up = Einsum("...E,FE->...F", (mlp_dim, dim * shuffle**2), ("mlp", "vision"), rngs=rngs)
        self.down = Einsum("...F,EF->...E", (mlp_dim, mlp_dim), ("vision", "mlp"), rngs=rngs)
        self.proj = Einsum("...E,DE->...D", (text_dim, mlp_dim), ("embed", "vision"), rngs=rngs)
        self.shuffle = shuffle

    def __call__(self, x: Float[Array, "I P E"]) -> Float[Array, "I S D"]:
        I, P, E = x.shape
        side = math.isqrt(P) // self.shuffle
        squares = x.reshape(I, side, self.shuffle, side, self.shuffle, E).transpose(0, 1, 3, 2, 4, 5)
        x = squares.reshape(I, side * side, -1)
        return self.proj(exact_gelu(self.down(exact_gelu(self.up(x)))))


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
