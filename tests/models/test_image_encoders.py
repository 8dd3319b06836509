"""Parts of image encoders: which patches become one vector, and sizes that are refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxlib.models._gemma3_vision import PoolProjector, SigLIP
from maxlib.models._llama4_vision import Llama4Vision, ShuffleProjector


def test_pooling_takes_squares():
    """Of a 4 x 4 grid of patches numbered row by row, the means of its 2 x 2 corners."""
    model = PoolProjector(1, 1, pool=2, norm=jnp.asarray, rngs=nnx.Rngs(0))
    model.proj.w[...] = jnp.ones((1, 1))
    got = model(jnp.arange(16.0).reshape(1, 16, 1))
    np.testing.assert_array_equal(got.reshape(-1), [2.5, 4.5, 10.5, 12.5])


def test_shuffling_puts_squares_side_by_side():
    """Of a 4 x 4 grid of patches numbered row by row, the upper left square holds 0, 1, 4 and 5, in this order."""
    model = ShuffleProjector(1, 4, 1, shuffle=2, rngs=nnx.Rngs(0))
    model.down.w[...], model.proj.w[...] = jnp.eye(4), jnp.array([[1.0, 10.0, 100.0, 1000.0]])
    model.up.w[...] = jnp.eye(4)
    got = model(64 * jnp.arange(16.0).reshape(1, 16, 1))  # so far from zero GELU is the identity
    np.testing.assert_allclose(got.reshape(-1) / 64, [5410, 7632, 14_298, 16_520], rtol=1e-6)


@pytest.mark.parametrize("tower", [SigLIP, Llama4Vision])
@pytest.mark.parametrize("sizes", [{"patch_size": 5}, {"num_heads": 3}])
def test_sizes_that_do_not_divide_are_refused(tower, sizes):
    with pytest.raises(ValueError, match="patch_size must divide image_size, and num_heads dim"):
        tower(8, 16, **({"num_layers": 1, "num_heads": 2, "image_size": 12, "patch_size": 3} | sizes), rngs=nnx.Rngs(0))
