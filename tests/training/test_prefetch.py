"""A loader that reads ahead of the loop, while its state does not."""

import numpy as np
import pytest

from maxlib import sharding, training
from tests.training import tiny

MESH = sharding.make_mesh(fsdp=8)


class Counting(tiny.Loader):
    def metrics(self):
        return {"data/read": self.next}


def same(batch, number):
    return all(np.array_equal(x, batch[name]) for name, x in tiny.batch(seed=number).items())


def test_batches_are_in_their_place_before_they_are_asked_for():
    loader = Counting(5)
    layout = sharding.Layout(MESH, sharding.FSDP)
    ahead = training.Prefetch(loader, layout=layout, size=2)
    assert loader.next == 0 and ahead.get_state() == {"0": {"next": 0}}
    first = next(ahead)
    assert same(first, 1) and loader.next == 2 and ahead.get_state() == {"0": {"next": 1}}
    assert ahead.metrics()["data/read"] == 1 and ahead.metrics()["data/wait_seconds"] > 0
    place = training.place_batch(tiny.batch(), layout)["tokens"].sharding
    assert first["tokens"].sharding == place and len(first["tokens"].addressable_shards) == 8
    assert training.place_batch(first, layout)["tokens"] is first["tokens"]
    assert [same(batch, n) for n, batch in enumerate(ahead, 2)] == [True] * 4  # the last ones too
    assert next(ahead, None) is None


def test_it_goes_on_where_its_state_was_taken():
    ahead = training.Prefetch(tiny.Loader(9), size=3)
    next(ahead), next(ahead)
    again = training.Prefetch(tiny.Loader(9))
    again.set_state(ahead.get_state())
    assert same(next(again), 3)
    again.reset()
    assert same(next(again), 1)
    assert same(next(training.Prefetch(tiny.Loader(), size=1)), 1)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        training.Prefetch(tiny.Loader(), size=0)
