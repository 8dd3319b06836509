"""Positions of tokens and images by time, row and column (M-RoPE).

Shapes: B rows of T tokens, R rows of patches, I images per row.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Real

from maxlib.nn.decoder._context import first_of_segment
from maxlib.nn.vision._patches import placeholder_index, places


def mrope_positions(
    is_image: Bool[Array, "B T"],
    grids: Int[Array | np.ndarray, "*R I 3"],
    merge: int,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    start: Real[Array, " B"] | None = None,
    frame_step: int | None = None,
    times: Float[Array, "R I"] | None = None,
    is_audio: Bool[Array, "B T"] | None = None,
) -> Real[Array, "B T 3"]:
    """Computes the positions of tokens and images by time, row and column (M-RoPE).

    A text token has three equal positions, and the position grows by 1 with each token. The tokens of an image that
    begins at `p` have time `p`, and row and column `p` plus those on the merged grid. The next token is at `p` plus the
    larger side of that grid.

    With `frame_step` or `times`, images that follow each other without text are frames of a video. All of them begin at
    one position `p`, and their time is `p` plus that of the frame. Sound between them counts from `p` too. The text
    after a video is at its last token's largest position plus 1.

    Args:
        is_image: True for placeholders.
        grids: Frames (1), rows and columns of patches of each image, as in `Patches`.
        merge: Side of the squares of patches that have one placeholder.
        segment_ids: Packed document of each token, 0 for padding; positions restart in each.
        valid: False for padding.
        start: Position of each row's first token, 0 unless given.
        frame_step: Positions between the frames of a video (Qwen2-VL). None for frames with text between them
            (Qwen3-VL), or with `times`.
        times: Position of each frame after the first one of its video, 0 for images (Qwen3-Omni).
        is_audio: True for placeholders of sound, which may stand between the frames of a video; only with `times`.

    Returns:
        Positions, `B T 3`, in the dtype of `times` or int32.
    """
    grids = jnp.asarray(grids if jnp.ndim(grids) == 3 else jnp.asarray(grids)[None])
    real = jnp.ones(is_image.shape, bool) if valid is None else jnp.asarray(valid)
    real = real if segment_ids is None else real & (segment_ids > 0)
    is_image = is_image & real
    squares = grids // jnp.array([1, merge, merge], grids.dtype)[None, None]
    at = places(squares, placeholder_index(is_image, len(grids)))
    image, index, height, width = (x.reshape(is_image.shape) for x in (at.image, at.index, at.height, at.width))
    row, column = (jnp.where(is_image, x, 0) for x in jnp.divmod(index, width))
    # Step of the position to the next token; an image advances it after its last placeholder.
    inside, last, extent = is_image, index + 1 == height * width, jnp.maximum(height, width)
    time = jnp.zeros(is_image.shape, jnp.int32)
    if frame_step is not None or times is not None:
        inside = is_image if is_audio is None else is_image | (is_audio & real)
        first, last = _runs(inside, segment_ids)
        if times is None:
            assert frame_step is not None
            time = frame_step * (image - jnp.take_along_axis(image, first, axis=1))
        else:
            of_image = jnp.take_along_axis(times, jnp.minimum(at.image, times.shape[1] - 1), axis=1)
            time = of_image.reshape(is_image.shape)
        # Tokens of sound before each token of its run.
        sounds = (inside & ~is_image).astype(jnp.int32)
        before = jnp.cumsum(sounds, axis=1) - sounds
        heard = jnp.where(inside & ~is_image, before - jnp.take_along_axis(before, first, axis=1), 0)
        time, row, column = jnp.where(is_image, time, heard), row + heard, column + heard
        extent = jnp.where(is_image, jnp.maximum(extent, time + 1), time + 1)
    steps = jnp.where(inside, jnp.where(last, extent, 0), 1) * real
    before = jnp.cumsum(steps, axis=1) - steps
    if segment_ids is not None:
        before = before - jnp.take_along_axis(before, first_of_segment(segment_ids), axis=1)
    before = before if start is None else before + start[:, None]
    dtype = jnp.int32 if times is None else times.dtype
    return jnp.stack([before + time, before + row, before + column], axis=2).astype(dtype)


def _runs(
    inside: Bool[Array, "B T"], segment_ids: Int[Array, "B T"] | None
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """Returns the first token of each token's run of placeholders, and which tokens are the last of one."""
    runs = inside.astype(jnp.int32) if segment_ids is None else jnp.where(inside, segment_ids, 0)
    edge = jnp.ones((len(runs), 1), bool)
    return first_of_segment(runs), jnp.concatenate([runs[:, 1:] != runs[:, :-1], edge], axis=1)
