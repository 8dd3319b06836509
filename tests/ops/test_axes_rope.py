"""Rotary tables by several positions against formulas pair by pair."""

import numpy as np
import pytest

from maxlib.ops import AxialRope, MRope, Rope

POSITIONS = np.random.RandomState(0).randint(0, 50, (2, 7, 3))


def angles(positions: np.ndarray, axes: list[int], rope: Rope) -> np.ndarray:
    """Each pair's angle by the position that turns it."""
    frequencies = rope.theta ** (-2.0 * np.arange(rope.dim // 2) / rope.dim)
    return np.stack([positions[:, :, axis] * frequencies[pair] for pair, axis in enumerate(axes)], axis=-1)


@pytest.mark.parametrize(
    ("sections", "axes"),
    [((4, 2, 2), [0, 1, 2, 0, 1, 2, 0, 0]), ((3, 3, 2), [0, 1, 2, 0, 1, 2, 0, 1]), ((8, 0, 0), [0] * 8)],
)
def test_pairs_turn_by_time_row_and_column_in_turn(sections, axes):
    rope = Rope(16, 100.0)
    cos, sin = MRope(rope, sections).tables(POSITIONS)
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
