"""Parts of image encoders.

The encoder of a family is next to its model, in `maxlib/models/_gemma3_vision.py` and so on. Shapes: I images, C color
channels, H rows and W columns of pixels, P patches, S vectors per image, D width.
"""

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxlib.nn._linear import MLP, Einsum
from maxlib.nn.attention._grouped_query import Attention
from maxlib.nn.decoder._context import AnyRope, Context
from maxlib.nn.norm import LayerNorm
from maxlib.ops import Full, Mask
from maxlib.sharding import constrain


def exact_gelu(x: Array) -> Array:
    """Computes GELU without the tanh approximation."""
    return jax.nn.gelu(x, approximate=False)


class EncoderBlock(nnx.Module):
    """Pre-norm layer of an encoder, with LayerNorm and biases, in which every token attends to every other that `mask`
    allows.

    Args:
        dim: Width of the stream.
        mlp_dim: Width of the MLP.
        num_heads: Number of heads, which divides `dim`.
        rope: Rotation by row and column on the grid of patches; None for learned positions only.
        act: Activation of the MLP.
        eps: Epsilon of the norms.
        mask: Which tokens a token attends to.
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
        mask: Mask = Full(),
        rngs: nnx.Rngs,
    ):
        H = dim // num_heads
        self.attn_norm = LayerNorm(dim, eps=eps)
        self.attn = Attention(
            dim, num_heads=num_heads, head_dim=H, mask=mask, rope=rope, bias=True, out_bias=True, rngs=rngs
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
