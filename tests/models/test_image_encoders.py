"""Parts of image encoders: which patches become one vector, and sizes that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib.models import _gemma3_vision, _llama4_vision


def test_pooling_takes_squares():
    """Of a 4 x 4 grid of patches numbered row by row, the means of its 2 x 2 corners."""
    cfg = _gemma3_vision.Vision(dim=1, num_heads=1, image_size=4, patch_size=1, num_tokens=4)
    model = _gemma3_vision.PoolProjector(cfg, 1, rngs=nnx.Rngs(0))
    model.norm = jnp.asarray
    model.proj.w[...] = jnp.ones((1, 1))
    got = jax.jit(model)(jnp.arange(16.0).reshape(1, 16, 1))
    np.testing.assert_array_equal(got.reshape(-1), [2.5, 4.5, 10.5, 12.5])


def test_shuffling_puts_squares_side_by_side():
    """Of a 4 x 4 grid of patches numbered row by row, the upper left square holds 0, 1, 4 and 5, in this order."""
    cfg = _llama4_vision.Vision(dim=1, num_heads=1, image_size=4, patch_size=1, projector_dim=4)
    model = _llama4_vision.ShuffleProjector(cfg, 1, rngs=nnx.Rngs(0))
    model.down.w[...], model.proj.w[...] = jnp.eye(4), jnp.array([[1.0, 10.0, 100.0, 1000.0]])
    model.up.w[...] = jnp.eye(4)
    got = jax.jit(model)(64 * jnp.arange(16.0).reshape(1, 16, 1))  # so far from zero GELU is the identity
    np.testing.assert_allclose(got.reshape(-1) / 64, [5410, 7632, 14_298, 16_520], rtol=1e-6)


@pytest.mark.parametrize("family", [_gemma3_vision, _llama4_vision])
@pytest.mark.parametrize("sizes", [{"patch_size": 5}, {"num_heads": 3}])
def test_sizes_that_do_not_divide_are_refused(family, sizes):
    with pytest.raises(ValueError, match="patch_size must divide image_size, and num_heads dim"):
        family.Vision(**({"dim": 8, "num_heads": 2, "image_size": 12, "patch_size": 3} | sizes))
