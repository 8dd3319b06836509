"""Coordinates of patches and positions of tokens against loops over images; buckets and errors."""

import functools

import jax
import numpy as np
import pytest

from maxlib.nn import vision
from maxlib.nn.vision._patches import check_patches

GRIDS = np.array([[1, 4, 6], [1, 2, 2], [1, 8, 4], [1, 6, 6]], np.int32)
mrope_positions = jax.jit(functools.partial(vision.mrope_positions, merge=2))
PLACES = [(0, 2), (0, 12), (1, 5), (2, 0)]  # row and place of each image's first placeholder
BY_ROW = np.zeros((3, 2, 3), np.int32)
BY_ROW[0], BY_ROW[1, 0], BY_ROW[2, 1] = GRIDS[:2], GRIDS[2], GRIDS[3]  # zeros are no images


def placeholders() -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are images', and documents of packed rows, one of them without any token before its image."""
    is_image, segments = np.zeros((3, 30), bool), np.ones((3, 30), np.int32)
    for (row, start), (_, height, width) in zip(PLACES, GRIDS, strict=True):
        is_image[row, start : start + height * width // 4] = True
    segments[0, 9:], segments[0, 25:], segments[1, :3] = 2, 0, 0
    return is_image, segments


def one_by_one(is_image: np.ndarray, segments: np.ndarray) -> np.ndarray:
    """Token by token: an image has one time, its rows and columns, and goes on behind the larger side."""
    positions, images = np.zeros((*is_image.shape, 3), int), iter(GRIDS // [1, 2, 2])
    for row in range(len(is_image)):
        position = t = 0
        while t < is_image.shape[1]:
            position = 0 if t == 0 or segments[row, t] != segments[row, t - 1] else position
            if is_image[row, t]:
                _, height, width = next(images)
                for i in range(height * width):
                    positions[row, t + i] = position + np.array([0, i // width, i % width])
                t, position = t + height * width, position + max(height, width)
            else:
                positions[row, t], t, position = position, t + 1, position + 1
    return positions


@pytest.mark.parametrize("grids", [GRIDS, BY_ROW], ids=["one row of patches", "a row for each of tokens"])
def test_positions_are_those_of_a_loop_over_images(grids):
    is_image, segments = placeholders()
    got = mrope_positions(is_image, grids, segment_ids=segments)
    real = segments > 0
    np.testing.assert_array_equal(np.asarray(got)[real], one_by_one(is_image, segments)[real])


def test_frames_of_a_video_begin_at_the_same_row_and_column():
    """A word, two frames of 1 x 2 squares, a word; then the same as another document."""
    is_image = np.array([[0, 1, 1, 1, 1, 0] * 2], bool)
    segments = np.repeat([1, 2], 6)[None].astype(np.int32)
    grids = np.tile(np.array([1, 2, 4], np.int32), (4, 1))
    positions = jax.jit(functools.partial(vision.mrope_positions, merge=2, frame_step=3))
    got = np.asarray(positions(is_image, grids, segment_ids=segments))
    want = [[0, 0, 0], [1, 1, 1], [1, 1, 2], [4, 1, 1], [4, 1, 2], [5, 5, 5]]
    np.testing.assert_array_equal(got[0], want * 2)


def test_padding_on_the_left_and_a_start_shift_nothing_else():
    is_image, _ = placeholders()
    alone = np.asarray(mrope_positions(is_image, GRIDS))
    padded = np.pad(is_image, ((0, 0), (4, 0)))
    valid, start = np.broadcast_to(np.arange(34) >= 4, (3, 34)), np.array([0, 7, 3], np.int32)
    got = mrope_positions(padded, GRIDS, valid=valid, start=start)
    np.testing.assert_array_equal(got[:, 4:], alone + start[:, None, None])


def test_squares_of_patches_stand_together():
    at = jax.jit(vision.patch_positions, static_argnums=(1, 2))(GRIDS[None], 100, 2)
    want = []
    for i, (_, height, width) in enumerate(GRIDS):
        y, x = (
            np.mgrid[:height, :width].reshape(2, height // 2, 2, width // 2, 2).transpose(0, 1, 3, 2, 4).reshape(2, -1)
        )
        want += [np.stack([np.full_like(y, i + 1), y, x, np.full_like(y, height), np.full_like(y, width)])]
    want = np.concatenate(want, axis=1)
    np.testing.assert_array_equal(np.stack(at)[:, 0, : want.shape[1]], want)
    np.testing.assert_array_equal(at.segment_ids[0, want.shape[1] :], 0)


def test_buckets_hold_everything_in_order():
    pixels = np.arange(96 * 5, dtype=np.float32).reshape(96, 5)
    flat, rows = vision.pad_patches(pixels, GRIDS), vision.pad_patches(pixels, GRIDS, counts=[2, 0, 2])
    assert flat.pixels.shape == (128, 5) and rows.pixels.shape == (3, 128, 5) and rows.grids.shape == (3, 2, 3)
    np.testing.assert_array_equal(flat.pixels[:96], pixels)
    np.testing.assert_array_equal(np.concatenate([rows.pixels[0, :28], rows.pixels[2, :68]]), pixels)
    np.testing.assert_array_equal(rows.grids[:, :, 1].sum(axis=1), [6, 0, 14])


def test_frames_become_images():
    images = vision.pad_patches(np.zeros((24, 5), np.float32), [[3, 2, 4]])
    np.testing.assert_array_equal(images.grids, [[1, 2, 4]] * 3 + [[0, 0, 0]])


@pytest.mark.parametrize("counts", [None, [1, 2]])
def test_what_does_not_fit_is_refused(counts):
    with pytest.raises(ValueError, match="whose grids have 96 patches" if counts is None else "each of the 4 images"):
        vision.pad_patches(np.zeros((95 if counts is None else 96, 5)), GRIDS, counts=counts)


@pytest.mark.parametrize(
    ("grids", "message"),
    [
        ([[2, 2, 4]], "must be 1 frame"),
        ([[1, 0, 4]], "must be 1 frame"),
        ([[1, 3, 4]], "multiples of 2"),
        ([[1, 4, 4]], "up to 16 patches in a row, but only 8 were given"),
    ],
)
def test_a_grid_that_is_none_is_refused(grids, message):
    images = vision.Patches(np.zeros((8, 5), np.float32), np.asarray(grids))
    with pytest.raises(ValueError, match=message):
        check_patches(np.ones((3, 2), bool), images, 2, 5)


def test_one_patch_and_as_many_as_are_given_are_taken():
    """One list of patches serves all rows of tokens, however many those are."""
    images = vision.Patches(np.zeros((3, 5), np.float32), np.asarray([[1, 1, 1], [1, 2, 1]]))
    check_patches(np.asarray([[True], [True], [True]]), images, 1, 5)
