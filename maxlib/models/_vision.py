"""What encoders of images of any size have in common. Shapes: R rows of patches, P patches of a row."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import nn, ops


def pad_to_squares(
    images: nn.vision.Patches, merge: int
) -> tuple[Float[Array, "R P values"], nn.vision.PatchPositions]:
    """Pads rows of patches to whole squares, and returns their pixels and positions.

    Args:
        images: Patches of pixels, in rows.
        merge: Side of the squares.
    """
    P = images.pixels.shape[1]
    padding = -P % merge**2
    pixels = jnp.pad(jnp.asarray(images.pixels), ((0, 0), (0, padding), (0, 0)))
    return pixels, nn.vision.patch_positions(jnp.asarray(images.grids), P + padding, merge)


def patch_context(
    at: nn.vision.PatchPositions, axes: tuple[Int[Array, "R P"], Int[Array, "R P"]], rope: ops.AxialRope
) -> nn.Context:
    """Makes the context in which each patch attends to all of its image, a document of a packed row.

    Args:
        at: Positions of the patches.
        axes: Those of both axes, in the order in which `rope` turns by them.
        rope: Rotary embedding of the encoder.
    """
    places = jnp.stack(axes, axis=2)
    return nn.make_context(
        *at.row.shape, positions=places, segment_ids=at.segment_ids, masks=(ops.Full(),), ropes=(rope,)
    )
