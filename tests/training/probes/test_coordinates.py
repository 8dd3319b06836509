"""With muP's factors, the size of activations does not depend on the width; without them it grows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxlib import training
from maxlib.training import probes
from tests.training import tiny

WIDTHS = (16, 256)
BLOCKS = [f"layers.{i}.mlp" for i in range(2)]
BATCHES = [jax.tree.map(jnp.asarray, tiny.batch(seed=i)) for i in range(4)]


def build(width):
    return tiny.Bigram(width, kinds=2, rngs=nnx.Rngs(0))


BASE = jax.eval_shape(lambda: build(WIDTHS[0]))


@functools.cache
def check(mup: bool) -> dict[str, np.ndarray]:
    def optimizer(model):
        factors = training.mup_lr_factors(model, BASE) if mup else {}
        return optax.chain(
            training.adamw(2e-2, mask=None, weight_decay=0.0), training.scale_by_path(factors, model=model)
        )

    start = (lambda width: training.mup_init(build(width), BASE)) if mup else build
    return probes.mup_coord_check(start, WIDTHS, optimizer=optimizer, batches=BATCHES, loss=tiny.loss)


def growth(sizes: np.ndarray) -> float:
    return np.polyfit(np.log(WIDTHS), np.log(sizes), 1)[0]


def test_flat_with_the_factors():
    mup = check(True)
    assert mup.keys() >= {"embed", "layers.0", "layers.1.mlp.down", "logits"}
    assert mup["logits"].shape == (len(WIDTHS), len(BATCHES) + 1)
    assert max(abs(growth(mup[name][:, -1])) for name in BLOCKS) < 0.15 and growth(mup["logits"][:, -1]) < 0.15


@pytest.mark.full
def test_growing_without():
    free = check(False)
    assert free.keys() == check(True).keys()
    assert max(growth(free[name][:, -1]) for name in BLOCKS) > 0.4 and growth(free["logits"][:, -1]) > 0.8
    assert all(abs(growth(free[name][:, 0])) < 0.1 for name in BLOCKS)  # nothing has learnt yet


def test_what_cannot_be_compared():
    with pytest.raises(ValueError, match=r"at least two widths, got \[16, 16\]"):
        probes.mup_coord_check(build, [16, 16], optimizer=lambda model: optax.sgd(0.1), batches=BATCHES, loss=tiny.loss)
