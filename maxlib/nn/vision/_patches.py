"""Images of any size: patches, their rows and columns on a grid, and the positions of their placeholder tokens.

Shapes: R rows of patches, P patches per row with padding, C numbers in a patch, I images per row, S vectors that the
patches of a row become, B rows of T tokens; m x m patches become one vector.
"""

import contextlib
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib.nn._pytree import pytree


@pytree
class Patches:
    """Images of any size, cut into patches: `pixel_values` and `image_grid_thw` of Hugging Face's Qwen processors.

    Pixtral's processors return whole images, which its `Vision.patches` cuts.

    Rows belong to rows of tokens: row `r` of `R` holds the images of the `r`-th of `R` equal parts of the batch, in the
    order of their placeholders. Without a row axis there is one row, with the images of the whole batch. To split a
    batch over devices or microbatches, use one row per row of tokens. `pad_patches` makes this from a
    processor's arrays.

    Args:
        pixels: `R P C` or `P C`, patches image after image; within an image, one square of `m` x `m` neighbours after
            the other. Padding is last.
        grids: `R I 3` or `I 3`, numbers of frames (1), rows and columns of patches of each image; zeros for no image.
        seconds: `R I` or `I`, time of each frame after the first one of its video, 0 for images; None for models that
            read no times, or without videos.
    """

    pixels: Float[Array | np.ndarray, "*R P C"]
    grids: Int[Array | np.ndarray, "*R I 3"]
    seconds: Float[Array | np.ndarray, "*R I"] | None = None

    @property
    def in_rows(self) -> "Patches":
        """Returns the same patches with an axis of rows."""
        return self if self.pixels.ndim == 3 else jax.tree.map(lambda x: x[None], self)


def pad_patches(pixels: Any, grids: Any, *, counts: Any = None, second_per_grid: Any = None) -> Patches:
    """Converts a processor's arrays to `Patches`, padded so that similar batches use the same compiled program.

    The number of patches is rounded up by less than a quarter, the number of images to a power of two. Each frame of a
    video becomes an image, as each frame has its own placeholders.

    Args:
        pixels: `n C`, the patches of all images.
        grids: `i 3`, frames, rows and columns of each image.
        counts: Number of images in each row of tokens, to make one row of patches per row of tokens; None makes one
            row.
        second_per_grid: `i`, seconds between the frames of each image; any number for one that is no video. None for
            models that read no times.

    Raises:
        ValueError: when the number of patches does not match the grids, or the number of images does not match the
            counts or the seconds.
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
    if second_per_grid is not None and np.shape(second_per_grid) != (len(grids),):
        raise ValueError(
            f"second_per_grid must have a number for each of the {len(grids)} images, got {second_per_grid}"
        )
    # Row r has the images first[r] to first[r + 1]; image i has the patches ends[i] to ends[i + 1].
    first, ends = np.cumsum([0, *counts]), np.cumsum([0, *grids.prod(axis=1)])
    rows = [(pixels[ends[a] : ends[b]], _frames(grids[a:b])) for a, b in itertools.pairwise(first)]
    num_patches = bucket(max(len(row) for row, _ in rows))
    num_images = max(1, *(len(row) for _, row in rows))
    num_images = 1 << (num_images - 1).bit_length()  # the next power of two
    pixels = np.stack([_padded(row, num_patches) for row, _ in rows])
    padded = np.stack([_padded(row, num_images) for _, row in rows]).astype(np.int32)
    seconds = None
    if second_per_grid is not None:
        times = [_seconds(grids[a:b], second_per_grid[a:b]) for a, b in itertools.pairwise(first)]
        seconds = np.stack([_padded(row, num_images)[:, 0] for row in times])
    patches = Patches(pixels, padded, seconds)
    return patches if len(counts) > 1 else jax.tree.map(lambda x: x[0], patches)


def _seconds(grids: np.ndarray, steps: Any) -> Float[np.ndarray, "frames 1"]:
    """Returns the time of each frame of some images."""
    times = [
        np.arange(frames, dtype=np.float32) * np.float32(step) for (frames, *_), step in zip(grids, steps, strict=True)
    ]
    return np.concatenate([np.zeros(0, np.float32), *times])[:, None]


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
    """Appends zeros up to this number of rows."""
    return np.pad(x, ((0, rows - len(x)), (0, 0)))


def patchify(image: Float[np.ndarray, "3 H W"], patch_size: int, *, merge: int = 2, frames: int = 2) -> Patches:
    """Cuts an image into patches, `n C`, as Hugging Face's Qwen processors do after resizing it.

    Args:
        image: RGB, whose sides are multiples of `patch_size * merge`.
        patch_size: Side of a patch in pixels.
        merge: Side m of the squares of patches that are stored together.
        frames: Number of times that a patch repeats its pixels.

    Raises:
        ValueError: when the sides are not such multiples.
    """
    p, m, (_, H, W) = patch_size, merge, image.shape
    if H % (p * m) or W % (p * m):
        raise ValueError(f"the sides of an image must be multiples of {p * m}, got {H} x {W}: resize it")
    # [C, y, m, p, x, m, p] -> [y, x, m, m, C, p, p], then repeat each patch for every frame.
    squares = image.reshape(3, H // (p * m), m, p, W // (p * m), m, p).transpose(1, 4, 2, 5, 0, 3, 6)
    shown = np.repeat(squares[:, :, :, :, :, None], frames, axis=5)
    return Patches(shown.reshape(-1, 3 * frames * p * p), np.array([[1, H // p, W // p]], np.int32))


def pad_patches_by_position(pixels: Any, positions: Any, *, merge: int, counts: Any = None) -> Patches:
    """Converts padded patches with positions, as Gemma 4's processors make them, to `Patches`.

    Args:
        pixels: `images n C`, patches of each image (or frame) in any order, with padding.
        positions: `images n 2`, column and row of each patch; -1 for padding.
        merge: Side of the squares of patches that become one vector (`model.cfg.vision.merge`).
        counts: Number of images in each row of tokens, as for `pad_patches`.

    Raises:
        ValueError: when the arrays do not match each other, the patches of an image do not fill a grid of such squares,
            or counts do not have as many images.
    """
    pixels, positions = np.asarray(pixels), np.asarray(positions)
    if pixels.ndim != 3 or positions.shape != (*pixels.shape[:2], 2):
        raise ValueError(
            "pixels must be `images patches numbers` and positions `images patches 2` (columns, rows), got the shapes "
            f"{pixels.shape} and {positions.shape}"
        )
    images = [_in_squares(patches, at, merge) for patches, at in zip(pixels, positions, strict=True)]
    none = np.zeros((0, pixels.shape[2]), pixels.dtype), np.zeros((0, 3), np.int32)
    rows, grids = zip(none, *images, strict=True)
    return pad_patches(np.concatenate(rows), np.concatenate(grids), counts=counts)


def _in_squares(pixels: np.ndarray, positions: np.ndarray, merge: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the patches of an image ordered by squares, without padding, and their grid."""
    real = (positions >= 0).all(axis=1)
    x, y = positions[real].T
    width, height = (1 + max(axis, default=-1) for axis in (x, y))
    place = np.sort(y * width + x)
    if not real.any() or height % merge or width % merge or not np.array_equal(place, np.arange(height * width)):
        raise ValueError(
            f"the positions of an image must fill a grid whose sides are multiples of {merge}, without repeats, got "
            f"{real.sum()} patches in {height} rows and {width} columns"
        )
    # lexsort's last key is the first: the square's row and column, then the row and column in it.
    order = np.lexsort((x % merge, y % merge, x // merge, y // merge))
    return pixels[real][order], np.array([[1, height, width]], np.int32)


def _frames(grids: np.ndarray) -> np.ndarray:
    """Returns a grid for each frame."""
    each = np.repeat(grids, grids[:, 0], axis=0)
    return np.concatenate([np.ones_like(each[:, :1]), each[:, 1:]], axis=1)


def bucket(length: int) -> int:
    """Rounds up by less than a quarter, or to 64, so that four programs cover each doubling."""
    multiple = max(64, (1 << max(length - 1, 0).bit_length()) // 8)
    return -(-max(length, 1) // multiple) * multiple


class Places(NamedTuple):
    """Image, index and grid of each item (a patch or a vector) in a row of images.

    Attributes:
        image: Index of its image; the number of images for padding.
        first: Index of the first item of its image.
        index: Its index within its image.
        height: Number of rows of its image; 1 for padding.
        width: Number of columns of its image; 1 for padding.
    """

    image: Int[Array, "R P"]
    first: Int[Array, "R P"]
    index: Int[Array, "R P"]
    height: Int[Array, "R P"]
    width: Int[Array, "R P"]


def places(grids: Int[Array, "R I 3"], item: Int[Array, "R P"]) -> Places:
    """Finds the `Places` of items, given their indices in their row."""
    sizes = grids.prod(axis=2)
    ends = jnp.cumsum(sizes, axis=1)
    # The first image that ends after the item; empty images are skipped.
    image = jax.vmap(functools.partial(jnp.searchsorted, side="right"))(ends, item)
    inside = image < grids.shape[1]

    def of(x: Array) -> Array:
        # [R, I] at [R, P]
        return jnp.where(inside, jnp.take_along_axis(x, jnp.minimum(image, grids.shape[1] - 1), axis=1), 1)

    first = jnp.where(inside, of(ends - sizes), ends[:, -1:])
    return Places(image, first, item - first, *(jnp.maximum(of(grids[:, :, axis]), 1) for axis in (1, 2)))


class PatchPositions(NamedTuple):
    """Image, row and column of each patch, `R P`.

    Attributes:
        segment_ids: Index of its image, counted from 1; 0 for padding.
        row: Its row on the grid.
        column: Its column on the grid.
        height: Number of rows of its grid.
        width: Number of columns of its grid.
    """

    segment_ids: Int[Array, "R P"]
    row: Int[Array, "R P"]
    column: Int[Array, "R P"]
    height: Int[Array, "R P"]
    width: Int[Array, "R P"]


def patch_positions(grids: Int[Array, "R I 3"], length: int, merge: int) -> PatchPositions:
    """Finds each patch's image, row and column; squares of `merge` x `merge` patches are stored together.

    Args:
        grids: Frames (1), rows and columns of each image.
        length: Number P of patches of a row.
        merge: Side of the squares.
    """
    at = places(grids, jnp.broadcast_to(jnp.arange(length, dtype=grids.dtype), (len(grids), length)))
    # index = ((square's row * squares in a row + square's column) * merge + row in it) * merge + column in it
    square, inside = jnp.divmod(at.index, merge * merge)
    y, x = jnp.divmod(square, jnp.maximum(at.width // merge, 1))
    row, column = y * merge + inside // merge, x * merge + inside % merge
    real = at.image < grids.shape[1]
    segments = jnp.where(real, at.image + 1, 0)
    return PatchPositions(segments, jnp.where(real, row, 0), jnp.where(real, column, 0), at.height, at.width)


def placeholder_index(is_image: Bool[Array, "B T"], rows: int) -> Int[Array, "R N"]:
    """Returns the index of each placeholder among those of its row of patches; tokens as `R (B T / R)`."""
    flat = is_image.reshape(rows, -1)
    return jnp.maximum(jnp.cumsum(flat, axis=1, dtype=jnp.int32) - 1, 0)


def take_features(
    is_image: Bool[Array, "B T"], features: Float[Array, "R S *n D"], counts: Int[Array, " R"]
) -> Float[Array, "B T *n D"]:
    """Returns the vector of each placeholder, and zeros for all other tokens.

    If a row has more or fewer placeholders than vectors, all of its vectors are NaN: call `check_patches` first.

    Args:
        is_image: True for placeholders.
        features: Vectors of the images of each row of patches, followed by padding.
        counts: Number of vectors in each row.
    """
    R, rest = len(features), features.shape[2:]
    flat = features.reshape(*features.shape[:2], -1)
    fits = is_image.reshape(R, -1).sum(axis=1) == counts
    # [R, S, F] at [R, N, 1] -> [R, N, F] -> [B, T, ...]
    taken = jnp.take_along_axis(flat, placeholder_index(is_image, R)[:, :, None], axis=1, mode="clip")
    taken = jnp.where(fits[:, None, None], taken, jnp.nan).reshape(*is_image.shape, *rest)
    return jnp.where(jnp.expand_dims(is_image, range(2, 2 + len(rest))), taken, 0)


def check_patches(is_image: Bool[Any, "B T"], images: Patches, merge: int, size: int) -> None:
    """Raises ValueError unless patches, grids and placeholders match; inside jit only shapes are checked.

    Args:
        is_image: True for placeholders.
        images: The images.
        merge: Side of the squares of patches that have one placeholder.
        size: Number of values in a patch.
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
                f"{used.tolist()}; `nn.vision.pad_patches` turns each frame into an image"
            )
        if (sizes := grids.prod(axis=2).sum(axis=1)).max(initial=0) > shapes[0][-2]:
            raise ValueError(
                f"the grids have up to {sizes.max()} patches in a row, but only {shapes[0][-2]} were given"
            )
        placeholders, made = np.asarray(is_image).reshape(rows, -1).sum(axis=1), sizes // merge**2
        if (placeholders != made).any():
            raise ValueError(
                f"the tokens hold {placeholders.tolist()} image placeholders by rows of patches, but the grids of the images "
                f"make {made.tolist()} vectors: the numbers must be equal; take prompt and images from one call of the "
                "processor"
            )
