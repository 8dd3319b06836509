"""Rotary tables by several positions against formulas pair by pair."""

import jax
import numpy as np
import pytest

from maxlib.ops import AxialRope, GridRope, MRope, Rope, apply_rope

POSITIONS = np.random.RandomState(0).randint(0, 50, (2, 7, 3))


def angles(positions: np.ndarray, axes: list[int], rope: Rope) -> np.ndarray:
    """Each pair's angle by the position that turns it."""
    frequencies = rope.theta ** (-2.0 * np.arange(rope.dim // 2) / rope.dim)
    return np.stack([positions[:, :, axis] * frequencies[pair] for pair, axis in enumerate(axes)], axis=-1)


@pytest.mark.parametrize(
    ("sections", "alternating", "axes"),
    [
        ((4, 2, 2), True, [0, 1, 2, 0, 1, 2, 0, 0]),
        ((3, 3, 2), True, [0, 1, 2, 0, 1, 2, 0, 1]),
        ((8, 0, 0), True, [0] * 8),
        ((1, 3, 4), False, [0, 1, 1, 1, 2, 2, 2, 2]),
    ],
)
def test_pairs_turn_by_time_row_and_column(sections, alternating, axes):
    """In turn, or one section after the other."""
    rope = Rope(16, 100.0)
    cos, sin = MRope(rope, sections, alternating=alternating).tables(POSITIONS)
    want = angles(POSITIONS, axes, rope)
    np.testing.assert_allclose(cos, np.cos(want), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(want), atol=1e-5)


def test_equal_positions_are_one():
    rope = Rope(16, 100.0, max_length=64)
    alike = np.broadcast_to(POSITIONS[:, :, :1], POSITIONS.shape)
    for got in (MRope(rope, (4, 2, 2)).tables(alike), MRope(rope, (4, 2, 2)).tables(POSITIONS[:, :, 0])):
        np.testing.assert_array_equal(np.stack(got), np.stack(rope.tables(POSITIONS[:, :, 0])))


def test_half_of_the_pairs_turns_by_the_row():
    rope = Rope(8, 100.0)  # the frequencies of either half
    cos, sin = AxialRope(16, 100.0).tables(POSITIONS[:, :, :2])
    want = np.concatenate([angles(POSITIONS, [axis] * 4, rope) for axis in (0, 1)], axis=-1)
    np.testing.assert_allclose(cos, np.cos(want), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(want), atol=1e-5)


def test_rows_and_columns_take_turns_with_the_frequencies():
    """Pair i by the row has the frequency of pair 2i of one axis, pair i by the column that of pair 2i + 1."""
    cos, sin = AxialRope(16, 100.0, alternating=True).tables(POSITIONS[:, :, :2])
    frequencies = 100.0 ** (-2.0 * np.arange(8) / 16)
    rows, columns = (POSITIONS[:, :, axis, None] * frequencies[axis::2] for axis in range(2))
    want = np.concatenate([rows, columns], axis=-1)
    np.testing.assert_allclose(cos, np.cos(want), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(want), atol=1e-5)


@pytest.mark.parametrize("sections", [(8,), (4, 2), (4, 2, 3), (2, 3, 3), (0, 4, 4), (9, -1, 0)])
def test_sections_that_do_not_fill_the_pairs_are_refused(sections):
    with pytest.raises(ValueError, match="mrope_section"):
        MRope(Rope(16), sections)


def test_sections_are_checked_before_anything_is_made():
    with pytest.raises(ValueError, match="whose sum is the 549755813888 rotary pairs"):
        MRope(Rope(2**40), (24, 20, 20))


def test_two_positions_are_refused():
    with pytest.raises(ValueError, match="three rows, time, row and column"):
        MRope(Rope(16), (4, 2, 2)).tables(POSITIONS[:, :, :2])
    with pytest.raises(ValueError, match="multiple of 4"):
        AxialRope(6)


def test_tables_of_a_grid_against_formula():
    dim, side, theta = 12, 3, 50.0
    cos, sin = jax.jit(GridRope(dim, side, theta).tables)(np.arange(10)[None])
    frequencies = theta ** (-2 * np.arange(3) / 6)
    for patch in range(9):
        row, column = divmod(patch, 3)
        angles = np.concatenate([(column + 1) * frequencies, (row + 1) * frequencies])
        np.testing.assert_allclose(cos[0, patch], np.cos(angles), atol=1e-6)
        np.testing.assert_allclose(sin[0, patch], np.sin(angles), atol=1e-6)
    np.testing.assert_array_equal(cos[0, 9], 1)  # the class token
    np.testing.assert_array_equal(sin[0, 9], 0)


def test_scores_of_patches_depend_on_where_they_lie_to_each_other():
    rope = GridRope(8, side=5)
    cos, sin = jax.jit(rope.tables)(np.arange(25)[None])
    turn = jax.jit(lambda x: apply_rope(x, cos, sin, interleaved=True)[0, :, 0])
    q, k = (np.random.RandomState(i).standard_normal((1, 1, 1, 8)).astype(np.float32) for i in (0, 1))
    q, k = (np.asarray(turn(np.broadcast_to(x, (1, 25, 1, 8)))) for x in (q, k))
    scores = (q @ k.T).reshape(5, 5, 5, 5)  # row and column of the query, then of the key
    np.testing.assert_allclose(scores[1:, 2:, 1:, 2:], scores[:-1, :-2, :-1, :-2], atol=1e-5)
    assert abs(scores[0, 0, 0, 1] - scores[0, 0, 1, 0]) > 1e-3


@pytest.mark.parametrize("sizes", [{"dim": 6, "side": 2}, {"dim": 8, "side": 0}])
def test_impossible_sizes_are_refused(sizes):
    with pytest.raises(ValueError, match="must be a multiple of 4"):
        GridRope(**sizes)
