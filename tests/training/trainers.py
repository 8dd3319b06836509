"""Small trainers for tests, and the bare loop that they must equal."""

import functools

import numpy as np
import optax

from maxlib import training
from tests.training import tiny

OPTIMIZER = training.adamw(1e-2, mask=training.decay_mask(tiny.model()))
SGD, ADAMW = optax.sgd(0.1), training.adamw(1e-3, mask=None)


def trainer(model=tiny.model, **options):
    options = {"optimizer": OPTIMIZER, "loader": tiny.Loader(), "loss": tiny.loss} | options
    return training.Trainer(model, options.pop("optimizer"), options.pop("loader"), **options)


def same(a, b):
    return all(np.array_equal(a[path], b[path]) for path in a)


@functools.cache
def bare_step():
    return tiny.jit_step(training.make_train_step(tiny.loss, OPTIMIZER))


def by_hand(steps):
    """The bare loop."""
    state, step, loader = training.make_state(tiny.model(), OPTIMIZER), bare_step(), tiny.Loader()
    for _ in range(steps):
        state, metrics = step(state, next(loader))
    return state, metrics
