"""Images among text: which token gets which vector, and which tokens attend to each other. Encoders are compared in
tests/models.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import nn
from maxlib.nn.vision._inputs import check_placeholders
from maxlib.nn.vision._patches import take_features

INSIDE = jnp.asarray([[0, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0]], bool)
BLOCKS = jax.jit(nn.vision.bidirectional_blocks)


def test_features_go_to_placeholders_in_order():
    features, want = jnp.arange(1.0, 22.0).reshape(1, 7, 3), np.zeros((2, 6, 3))
    want[np.asarray(INSIDE)] = np.asarray(features)[0]
    np.testing.assert_array_equal(jax.jit(take_features)(INSIDE, features, jnp.array([7])), want)


@pytest.mark.parametrize("count", [6, 8])
def test_too_few_or_too_many_features_show(count):
    placed = jax.jit(take_features)(INSIDE, jnp.ones((1, 7, 3)), jnp.array([count]))
    np.testing.assert_array_equal(jnp.isnan(placed[..., 0]), INSIDE)
    check_placeholders(INSIDE, 7)
    with pytest.raises(ValueError, match=f"have 7 image placeholders, but the given images make {count} vectors"):
        check_placeholders(INSIDE, count)


def test_spans_are_runs_within_documents():
    start, stop = BLOCKS(INSIDE)
    np.testing.assert_array_equal(start, [[0, 1, 1, 3, 4, 5], [0, 0, 0, 0, 4, 5]])
    np.testing.assert_array_equal(stop, [[1, 3, 3, 4, 5, 6], [4, 4, 4, 4, 5, 6]])
    segments = jnp.asarray([[1, 1, 2, 2, 2, 0], [1, 1, 1, 2, 2, 2]], jnp.int32)  # the last of row 0 is padding
    start, stop = BLOCKS(INSIDE, segment_ids=segments)
    np.testing.assert_array_equal(start, [[0, 1, 2, 3, 4, 5], [0, 0, 0, 3, 4, 5]])
    np.testing.assert_array_equal(stop, [[1, 2, 3, 4, 5, 6], [3, 3, 3, 4, 5, 6]])


def test_spans_count_what_is_cached():
    start, stop = BLOCKS(INSIDE, cache=nn.cache.Cache(None, jnp.asarray([10, 20], jnp.int32)))
    np.testing.assert_array_equal(start, [[10, 11, 11, 13, 14, 15], [20, 20, 20, 20, 24, 25]])
    np.testing.assert_array_equal(stop, [[11, 13, 13, 14, 15, 16], [24, 24, 24, 24, 25, 26]])
