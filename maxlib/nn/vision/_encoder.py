"""Parts of image encoders, and the function that inserts their vectors among those of text.

The encoder of a family is next to its model, in `maxlib/models/_gemma3_vision.py` and so on. Shapes: I images, C color
channels, H rows and W columns of pixels, P patches, S vectors per image, D width.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from maxlib.nn._linear import Einsum
from maxlib.nn._mlp import MLP
from maxlib.nn.attention._grouped_query import Attention
from maxlib.nn.decoder._context import AnyRope, Context
from maxlib.nn.norm import LayerNorm
from maxlib.ops import Full
from maxlib.sharding import constrain


def exact_gelu(x: Array) -> Array:
    """Computes GELU without the tanh approximation."""
    return jax.nn.gelu(x, approximate=False)


class EncoderBlock(nnx.Module):
    """Pre-norm layer of an encoder, with LayerNorm and biases, in which every token attends to every other.

    Args:
        dim: Width of the stream.
        mlp_dim: Width of the MLP.
        num_heads: Number of heads, which divides `dim`.
        rope: Rotation by row and column on the grid of patches; None for learned positions only.
        act: Activation of the MLP.
        eps: Epsilon of the norms.
        rngs: Source of initial values.
    """

    def __init__(
        self,
        dim: int,
        mlp_dim: int,
        *,
        num_heads: int,
        rope: AnyRope | None = None,
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
        """Applies the layer to patches, `I P D`; returns the result, the cache and an empty aux, as layers of a stack
        do.
        """
        # Each part reads a normalized copy of the residual stream and adds to it, [I, P, D].
        x = x + self.attn(self.attn_norm(x), ctx)[0]
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


def check_sizes(dim: int, num_heads: int, image_size: int, patch_size: int) -> None:
    """Raises ValueError when `patch_size` does not divide `image_size`, or `num_heads` not `dim`."""
    if image_size % patch_size or dim % num_heads:
        raise ValueError(
            f"patch_size must divide image_size, and num_heads dim; got {patch_size}, {image_size}, {num_heads}, {dim}"
        )


def patch_embedding(dim: int, patch_size: int, *, bias: bool, rngs: nnx.Rngs) -> Einsum:
    """Returns the layer that maps each patch of `in_patches` to a vector, like a convolution without overlap."""
    # y, x: row and column of a patch; a, b: row and column of a pixel in it. [I, C, y, a, x, b] -> [I, y, x, D]
    patch, axes = (dim, 3, patch_size, patch_size), ("embed", "channel", "patch_row", "patch_column")
    return Einsum("ICyaxb,DCab->IyxD", patch, axes, bias=bias, rngs=rngs)


def in_patches(images: Float[Array, "I C H W"], size: int, patch: int) -> Float[Array, "I C y a x b"]:
    """Splits square images into rows y and columns x of patches, each with pixel rows a and columns b.

    Args:
        images: RGB, `size` pixels high and wide.
        size: Side of an image.
        patch: Side of a patch.

    Raises:
        ValueError: when the images have another shape.
    """
    if images.shape[1:] != (3, size, size):
        raise ValueError(f"images must have the shape (number, 3, {size}, {size}), got {images.shape}; resize them")
    # [I, C, H, W] -> [I, C, H / patch, patch, W / patch, patch]
    return images.reshape(-1, 3, size // patch, patch, size // patch, patch)


def check_placeholders(is_placeholder: Bool[Any, "B T"], count: int) -> None:
    """Raises ValueError unless `count` tokens are placeholders; does nothing inside jit, where tokens are not known."""
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        if (found := int(is_placeholder.sum())) != count:
            raise ValueError(
                f"the tokens have {found} image placeholders, but the given images make {count} vectors: the numbers "
                "must be equal; take prompt and images from one call of the processor"
            )


def unseen(x: Float[Array, "B T D"], is_placeholder: Bool[Array, "B T"]) -> Float[Array, "B T D"]:
    """Returns `x` with NaN at placeholders that have no image, so that a loss inside jit does not learn from them."""
    return jnp.where(is_placeholder[:, :, None], jnp.nan, x)


def place_features(
    x: Float[Array, "B T D"], is_placeholder: Bool[Array, "B T"], features: Float[Array, "I S D"]
) -> Float[Array, "B T D"]:
    """Replaces the placeholders in `x`, row after row, by the vectors of `features`, image after image.

    If there are more or fewer placeholders than vectors, all of them become NaN: call `check_placeholders` first.

    Args:
        x: Token vectors, `B T D`.
        is_placeholder: True for tokens that an image replaces.
        features: S vectors of each image.
    """
    # [I, S, D] -> [I * S, D]; the n-th placeholder of the batch takes the n-th vector.
    flat = features.reshape(-1, features.shape[-1]).astype(x.dtype)
    flat = jnp.where(is_placeholder.sum() == len(flat), flat, jnp.nan)
    index = jnp.cumsum(is_placeholder.reshape(-1)).reshape(is_placeholder.shape) - 1
    return jnp.where(is_placeholder[:, :, None], jnp.take(flat, index, axis=0, mode="clip"), x)
