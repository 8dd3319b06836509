"""A small corpus whose tokens encode their document and position."""

from unittest import mock

import jax
import numpy as np

from maxlib import data


def documents(count: int = 40, longest: int = 70) -> list[np.ndarray]:
    """Documents of 1 to `longest` tokens; token = 1000 * (document + 1) + its index."""
    lengths = np.random.default_rng(0).integers(1, longest, count)
    lengths[:3] = 1, 2, longest
    return [1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)]


def shuffled(count: int = 40, *, epochs: int | None = None, seed: int = 3):
    return data.in_memory(documents(count)).shuffle(seed=seed).repeat(epochs)


def process(index, count):
    """Lets jax say that this is one of several processes."""
    return mock.patch.multiple(jax, process_index=lambda: index, process_count=lambda: count)
