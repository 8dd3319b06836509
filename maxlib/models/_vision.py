"""What encoders of images of any size have in common. Shapes: R rows of patches, P patches of a row."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
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


def by_window(at: nn.vision.PatchPositions, side: int) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
    """Returns the order of patches by image and window, padding last, and the number of each one's window.

    Args:
        at: Positions of the patches.
        side: Side of a window in patches.
    """
    columns = -(-at.width // side)  # windows beside each other
    window = at.row // side * columns + at.column // side
    real = at.segment_ids > 0
    most = at.segment_ids.shape[1]  # windows of an image are at most as many as patches
    window = jnp.where(real, (at.segment_ids - 1) * most + window + 1, 0)
    # Stable: the patches of a window keep their order, so that those of a square stay together.
    return jnp.argsort(jnp.where(real, window, jnp.iinfo(jnp.int32).max), axis=1, stable=True), window


def reordered(x: Any, order: Int[Array, "R P"]) -> Any:
    """Puts patches, `R P` or `R P C`, in another order."""
    return jnp.take_along_axis(x, order if x.ndim == 2 else order[:, :, None], axis=1)


def square_by_square(
    pixels: Any, grids: Any, *, merge: int, patch_dim: int, counts: Sequence[int] | None = None
) -> nn.vision.Patches:
    """Returns the arrays of a processor as models take them: patches square by square instead of row by row.

    Args:
        pixels: `n ...`: the patches of all images.
        grids: `I 3`: frames, rows and columns of each image.
        merge: Side m of the squares.
        patch_dim: Number of values in a patch.
        counts: Number of images in each row of tokens, for a row of patches for each of them; None for one row.
    """
    grids = np.asarray(grids)
    images = np.split(np.asarray(pixels).reshape(-1, patch_dim), np.cumsum(grids.prod(axis=1))[:-1])
    # [frames, rows / m, m, columns / m, m, values] -> [frames, rows / m, columns / m, m, m, values]
    squares = [
        image.reshape(frames, height // merge, merge, width // merge, merge, -1).swapaxes(2, 3).reshape(image.shape)
        for image, (frames, height, width) in zip(images, grids, strict=True)
    ]
    return nn.vision.pad_patches(np.concatenate(squares), grids, counts=counts)
