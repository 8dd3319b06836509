"""Images of any size: patches in rows, their places on grids, and the positions of tokens that stand for them.

Shapes: R rows of patches, P patches of a row with padding, C numbers in a patch, I images of a row, S vectors that the
patches of a row become, B rows of T tokens, m side of the squares of patches that become one vector.
"""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._context import first_of_segment
from maxlib.nn._pytree import pytree


@pytree
class Patches:
    """Images of any size, cut into patches: `pixel_values` and `image_grid_thw` of Hugging Face's Qwen processors.

    Pixtral's processors make whole images, which its `Vision.patches` cuts.

    Rows belong to rows of tokens: row `r` of `R` holds the images of the `r`-th of `R` equal parts of the batch, in the
    order of their placeholders. Without a row axis there is one row, with the images of the whole batch. A row for each
    row of tokens is what divides over devices and microbatches. `patches` makes this from a processor's arrays.

    Args:
        pixels: `R P C` or `P C`, patches image after image, in an image square after square of `m` x `m` neighbours;
            padding follows.
        grids: `R I 3` or `I 3`, number of frames (1), and of rows and columns of patches of each image; zeros for no
            image.
    """

    pixels: Float[Array | np.ndarray, "*R P C"]
    grids: Int[Array | np.ndarray, "*R I 3"]

    @property
    def in_rows(self) -> "Patches":
        """Returns the same with an axis of rows."""
        return self if self.pixels.ndim == 3 else Patches(self.pixels[None], self.grids[None])


def patches(pixels: Any, grids: Any, *, counts: Any = None) -> Patches:
    """Returns the arrays of a processor as `Patches`, padded so that similar batches share a program.

    The number of patches is rounded up by less than a quarter, that of images to a power of two. Each frame of a video
    becomes an image of its own, as its placeholders are.

    Args:
        pixels: `n C`, the patches of all images.
        grids: `i 3`, frames, rows and columns of each image.
        counts: Number of images in each row of tokens, for a row of patches for each of them; None for one row.

    Raises:
        ValueError: when the grids do not have as many patches, or the counts not as many images.
    """
    pixels, grids = np.asarray(pixels), np.asarray(grids)
    if pixels.ndim != 2 or grids.ndim != 2 or grids.shape[1] != 3 or len(pixels) != grids.prod(axis=1).sum():
        raise ValueError(
            "pixels must be `patches numbers` and grids `images 3` (frames, rows, columns) with as many patches, got the "
            f"shapes {pixels.shape} and {grids.shape}, whose grids have {grids.prod(axis=-1).sum()} patches"
        )
    counts = [len(grids)] if counts is None else list(counts)
    if sum(counts) != len(grids):
        raise ValueError(f"counts must give each of the {len(grids)} images to a row, got {counts}")
    images, ends = np.cumsum([0, *counts]), np.cumsum([0, *grids.prod(axis=1)])
    rows = [(pixels[ends[a] : ends[b]], _frames(grids[a:b])) for a, b in itertools.pairwise(images)]
    P, I = _bucket(max(len(row) for row, _ in rows)), max(len(own) for _, own in rows)
    pad = lambda x, n: np.pad(x, ((0, n - len(x)), (0, 0)))
    own = [(pad(row, P), pad(grid, 1 << (max(I, 1) - 1).bit_length())) for row, grid in rows]
    found = Patches(np.stack([row for row, _ in own]), np.stack([grid for _, grid in own]).astype(np.int32))
    return found if len(counts) > 1 else Patches(found.pixels[0], found.grids[0])


def cut(image: Float[np.ndarray, "3 H W"], patch_size: int, *, merge: int = 2, frames: int = 2) -> Patches:
    """Cuts an image into patches, `n C`, as Hugging Face's Qwen processors do with one that they have resized.

    Args:
        image: RGB, whose sides are multiples of `patch_size * merge`.
        patch_size: Side of a patch in pixels.
        merge: Side of the squares of patches that stand together.
        frames: Times that a patch shows the image.

    Raises:
        ValueError: when the sides are no such multiples.
    """
    p, m, (_, H, W) = patch_size, merge, image.shape
    if H % (p * m) or W % (p * m):
        raise ValueError(f"the sides of an image must be multiples of {p * m}, got {H} x {W}: resize it")
    # [C, y, m, p, x, m, p] -> [y, x, m, m, C, p, p], then each patch once for every frame.
    squares = image.reshape(3, H // (p * m), m, p, W // (p * m), m, p).transpose(1, 4, 2, 5, 0, 3, 6)
    shown = np.repeat(squares[:, :, :, :, :, None], frames, axis=5)
    return Patches(shown.reshape(-1, 3 * frames * p * p), np.array([[1, H // p, W // p]], np.int32))


def patches_by_position(pixels: Any, positions: Any, *, merge: int, counts: Any = None) -> Patches:
    """Returns padded patches with their places, as Gemma 4's processors make them, as `Patches`.

    Args:
        pixels: `images n C`, patches of each image (or frame) in any order, with padding.
        positions: `images n 2`, column and row of each patch; -1 for padding.
        merge: Side of the squares of patches that become one vector (`model.cfg.vision.merge`).
        counts: Number of images in each row of tokens, as for `patches`.

    Raises:
        ValueError: when arrays do not fit each other, the patches of an image do not fill a grid of such squares, or
            counts do not have as many images.
    """
    pixels, positions = np.asarray(pixels), np.asarray(positions)
    if pixels.ndim != 3 or positions.shape != (*pixels.shape[:2], 2):
        raise ValueError(
            "pixels must be `images patches numbers` and positions `images patches 2` (columns, rows), got the shapes "
            f"{pixels.shape} and {positions.shape}"
        )
    found = [_in_squares(own, at, merge) for own, at in zip(pixels, positions, strict=True)]
    none = np.zeros((0, pixels.shape[2]), pixels.dtype), np.zeros((0, 3), np.int32)
    rows, grids = zip(none, *found, strict=True)
    return patches(np.concatenate(rows), np.concatenate(grids), counts=counts)


def _in_squares(pixels: np.ndarray, positions: np.ndarray, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the patches of an image square after square, without padding, and their grid."""
    real = (positions >= 0).all(axis=1)
    x, y = positions[real].T
    width, height = (1 + max(axis, default=-1) for axis in (x, y))
    place = np.sort(y * width + x)
    if not real.any() or height % merge or width % merge or not np.array_equal(place, np.arange(height * width)):
        raise ValueError(
            f"the positions of an image must fill a grid whose sides are multiples of {merge}, each place once, got "
            f"{real.sum()} patches in {height} rows and {width} columns"
        )
    # Sorted by the last key first: the square's row and column, then the row and column in it.
    order = np.lexsort((x % merge, y % merge, x // merge, y // merge))
    return pixels[real][order], np.array([[1, height, width]], np.int32)


def _frames(grids: np.ndarray) -> np.ndarray:
    """Returns a grid for each frame."""
    each = np.repeat(grids, grids[:, 0], axis=0)
    return np.concatenate([np.ones_like(each[:, :1]), each[:, 1:]], axis=1)


def _bucket(length: int) -> int:
    """Rounds up by less than a quarter, or to 64: four programs for each doubling."""
    multiple = max(64, (1 << max(length - 1, 0).bit_length()) // 8)
    return -(-max(length, 1) // multiple) * multiple


class Places(NamedTuple):
    """Place of each item (a patch, or a vector) of a row of images.

    Attributes:
        image: Number of its image; that of images for padding.
        first: Number of the first item of its image.
        index: Its number within its image.
        height: Rows of its image; 1 for padding.
        width: Columns of its image; 1 for padding.
    """

    image: Int[Array, "R P"]
    first: Int[Array, "R P"]
    index: Int[Array, "R P"]
    height: Int[Array, "R P"]
    width: Int[Array, "R P"]


def _places(grids: Int[Array, "R I 3"], item: Int[Array, "R P"]) -> Places:
    """Finds the places of items, given their numbers in their row."""
    sizes = grids.prod(axis=2)
    ends = jnp.cumsum(sizes, axis=1)
    # The first image that ends behind the item; images of no size are passed over.
    image = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(ends, item)
    inside = image < grids.shape[1]
    # [R, I] at [R, P]
    of = lambda x: jnp.where(inside, jnp.take_along_axis(x, jnp.minimum(image, grids.shape[1] - 1), axis=1), 1)
    first = jnp.where(inside, of(ends - sizes), ends[:, -1:])
    return Places(image, first, item - first, *(jnp.maximum(of(grids[:, :, axis]), 1) for axis in (1, 2)))


class PatchPlaces(NamedTuple):
    """Place of each patch, `R P`.

    Attributes:
        segment_ids: Number of its image, counted from 1; 0 for padding.
        row: Its row on the grid.
        column: Its column on the grid.
        height: Rows of its grid.
        width: Columns of its grid.
    """

    segment_ids: Int[Array, "R P"]
    row: Int[Array, "R P"]
    column: Int[Array, "R P"]
    height: Int[Array, "R P"]
    width: Int[Array, "R P"]


def patch_places(grids: Int[Array, "R I 3"], length: int, merge: int) -> PatchPlaces:
    """Finds the image of each patch and its place on the grid; squares of `merge` x `merge` patches stand together.

    Args:
        grids: Frames (1), rows and columns of each image.
        length: Number P of patches of a row.
        merge: Side of the squares.
    """
    at = _places(grids, jnp.broadcast_to(jnp.arange(length, dtype=grids.dtype), (len(grids), length)))
    # index = ((square's row * squares in a row + square's column) * merge + row in it) * merge + column in it
    square, inside = jnp.divmod(at.index, merge * merge)
    y, x = jnp.divmod(square, jnp.maximum(at.width // merge, 1))
    row, column = y * merge + inside // merge, x * merge + inside % merge
    real = at.image < grids.shape[1]
    segments = jnp.where(real, at.image + 1, 0)
    return PatchPlaces(segments, jnp.where(real, row, 0), jnp.where(real, column, 0), at.height, at.width)


def mrope_positions(
    is_image: Bool[Array, "B T"],
    grids: Int[Array | np.ndarray, "*R I 3"],
    merge: int,
    *,
    segment_ids: Int[Array, "B T"] | None = None,
    valid: Bool[Array, "B T"] | None = None,
    start: Int[Array, " B"] | None = None,
) -> Int[Array, "B T 3"]:
    """Computes the positions of tokens and images by time, row and column (M-RoPE of Qwen3-VL).

    A text token has three equal positions and the next token one more. All of an image have the time `p` at which it
    begins, and `p` plus their place on the merged grid as row and column; the next token is at `p` plus the larger
    side.

    Args:
        is_image: True for placeholders.
        grids: Frames (1), rows and columns of patches of each image, as in `Patches`.
        merge: Side of the squares of patches that have one placeholder.
        segment_ids: Packed document of each token, 0 for padding; positions begin anew in each.
        valid: False for padding.
        start: Position of each row's first token, 0 unless given.

    Returns:
        Positions, `B T 3`.
    """
    grids = jnp.asarray(grids if jnp.ndim(grids) == 3 else jnp.asarray(grids)[None])
    real = jnp.ones(is_image.shape, bool) if valid is None else jnp.asarray(valid)
    real = real if segment_ids is None else real & (segment_ids > 0)
    is_image = is_image & real
    at = _places(
        grids // jnp.array([1, merge, merge], grids.dtype)[None, None], placeholder_index(is_image, len(grids))
    )
    # The steps to the next token: an image's are made behind its last placeholder.
    last = at.index + 1 == at.height * at.width
    of_image = jnp.where(last, jnp.maximum(at.height, at.width), 0).reshape(is_image.shape)
    steps = jnp.where(is_image, of_image, 1) * real
    before = jnp.cumsum(steps, axis=1) - steps
    if segment_ids is not None:
        before = before - jnp.take_along_axis(before, first_of_segment(segment_ids), axis=1)
    before = before if start is None else before + start[:, None]
    row, column = (jnp.where(is_image, x.reshape(is_image.shape), 0) for x in jnp.divmod(at.index, at.width))
    return jnp.stack([before, before + row, before + column], axis=2).astype(jnp.int32)


def placeholder_index(is_image: Bool[Array, "B T"], rows: int) -> Int[Array, "R N"]:
    """Returns the number of each placeholder among those of its row of patches; tokens as `R (B T / R)`."""
    flat = is_image.reshape(rows, -1)
    return jnp.maximum(jnp.cumsum(flat, axis=1, dtype=jnp.int32) - 1, 0)


def take_features(
    is_image: Bool[Array, "B T"], features: Float[Array, "R S *n D"], counts: Int[Array, " R"]
) -> Float[Array, "B T *n D"]:
    """Returns the vector of each placeholder, and zeros for all other tokens.

    Where a row has more or fewer placeholders than vectors, all of its vectors are NaN: call `check_patches` first.

    Args:
        is_image: True for placeholders.
        features: Vectors of the images of each row of patches, padding behind.
        counts: Number of vectors of each row.
    """
    R, rest = len(features), features.shape[2:]
    flat = features.reshape(*features.shape[:2], -1)
    fits = is_image.reshape(R, -1).sum(axis=1) == counts
    # [R, S, F] at [R, N, 1] -> [R, N, F] -> [B, T, ...]
    found = jnp.take_along_axis(flat, placeholder_index(is_image, R)[:, :, None], axis=1, mode="clip")
    found = jnp.where(fits[:, None, None], found, jnp.nan).reshape(*is_image.shape, *rest)
    return jnp.where(jnp.expand_dims(is_image, range(2, 2 + len(rest))), found, 0)


def check_patches(is_image: Bool[Any, "B T"], images: Patches, merge: int, size: int) -> None:
    """Raises ValueError unless patches, grids and placeholders fit each other; inside jit only shapes are known.

    Args:
        is_image: True for placeholders.
        images: The images.
        merge: Side of the squares of patches that have one placeholder.
        size: Numbers in a patch.
    """
    shapes = np.shape(images.pixels), np.shape(images.grids)
    rows = shapes[0][0] if len(shapes[0]) == 3 else 1
    fits = len(shapes[0]) == len(shapes[1]) in (2, 3) and shapes[0][-1] == size and shapes[1][-1] == 3
    if not fits or shapes[0][:-2] != shapes[1][:-2] or len(is_image) % max(rows, 1):
        raise ValueError(
            f"images must be patches of {size} numbers and grids of 3, `P {size}` and `I 3`, or both with a row for each of the "
            f"{len(is_image)} rows of tokens in front; got the shapes {shapes[0]} and {shapes[1]}"
        )
    with contextlib.suppress(jax.errors.TracerArrayConversionError):
        grids = np.asarray(images.grids).reshape(rows, -1, 3)
        used = grids[grids.any(axis=2)]
        if (used[:, 0] != 1).any() or (used < 1).any() or (used[:, 1:] % merge).any():
            raise ValueError(
                f"the grid of an image must be 1 frame and rows and columns that are multiples of {merge}, got "
                f"{used.tolist()}; `nn.vision.patches` makes an image of each frame"
            )
        if (found := grids.prod(axis=2).sum(axis=1)).max(initial=0) > shapes[0][-2]:
            raise ValueError(f"the grids have up to {found.max()} patches in a row, but only {shapes[0][-2]} are given")
        check_rows_of_placeholders(np.asarray(is_image).reshape(rows, -1).sum(axis=1), found // merge**2)


def check_rows_of_placeholders(found: np.ndarray, made: np.ndarray) -> None:
    """Raises ValueError unless each row has as many placeholders as its images make vectors."""
    if (found != made).any():
        raise ValueError(
            f"the tokens hold {found.tolist()} image placeholders by rows of patches, but the grids of the images make "
            f"{made.tolist()} vectors: there must be as many; take prompt and images from one call of the processor"
        )
