"""Rotary embedding of patches: against a float64 formula, and which inputs it depends on."""

import jax
import numpy as np
import pytest

from maxlib.ops import GridRope, apply_rope


def test_tables_against_formula():
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
