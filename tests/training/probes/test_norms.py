"""Norms of layer outputs, also near float32's maximum."""

import jax.numpy as jnp
import numpy as np
import pytest

from maxlib.training.probes._layers import _norm


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30, 3e38])
def test_a_norm_is_finite_where_its_numbers_are(scale):
    """Squares of these overflow or vanish; the norm does not, unless float32 has no number for it."""
    x = np.array([[1.0, -0.5, 0.25], [0.0, 1.0, 1.0]]) * scale
    want = np.minimum(np.sqrt((x**2).sum(axis=1)), np.finfo(np.float32).max)
    np.testing.assert_allclose(_norm(jnp.asarray(x, jnp.float32), 1), want, rtol=1e-6)


def test_of_what_is_not_finite_it_says_so():
    assert not np.isfinite(_norm(jnp.array([1.0, jnp.inf]), 1))
