"""A loader that reads ahead of the loop, while its state does not."""

import json
import threading

import numpy as np
import pytest

from maxlib import post_training, sharding, training
from maxlib.training._prefetch import as_loader
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
    place = training.shard_batch(tiny.batch(), layout)["tokens"].sharding
    assert first["tokens"].sharding == place and len(first["tokens"].addressable_shards) == 8
    assert training.shard_batch(first, layout)["tokens"] is first["tokens"]
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


@pytest.mark.parametrize("kind", ["list", "generator", "prefetched"])
def test_any_iterable_is_a_loader_that_continues_after_the_batches_read(kind):
    def batches():
        made = [tiny.batch(seed=number) for number in (1, 2, 3, 4)]
        return iter(made) if kind == "generator" else made

    def loader():
        return training.Prefetch(batches()) if kind == "prefetched" else as_loader(batches(), "loader")

    first = loader()
    assert same(next(first), 1) and same(next(first), 2)
    state = first.get_state()
    assert same(next(first), 3)
    first.set_state(state)  # as after an interrupt: this batch was read, but not used
    assert same(next(first), 3)
    resumed = loader()
    resumed.set_state(json.loads(json.dumps(state)))
    assert same(next(resumed), 3) and same(next(resumed), 4) and next(resumed, None) is None
    if kind == "generator":
        with pytest.raises(ValueError, match="a list_iterator cannot go back to its first batch"):
            resumed.reset()
    else:
        resumed.reset()
        assert same(next(resumed), 1)


class Slow(Counting):
    """Reads a batch only after it was told to go on."""

    def __init__(self, *args):
        super().__init__(*args)
        self.go, self.begun = threading.Semaphore(1), threading.Semaphore(0)

    def __next__(self):
        self.begun.release()
        assert self.go.acquire(timeout=30)
        return super().__next__()


def test_fewer_batches_than_were_read_cannot_be_resumed():
    loader = as_loader([tiny.batch()] * 3, "loader")
    with pytest.raises(ValueError, match="has read 5 batches, but this list ends after 3"):
        loader.set_state({"batches": 5})


def test_a_thread_reads_while_the_loop_computes():
    """The second read begins before the first batch's step would end, after `before_read` in the loop's thread."""
    loader, called = Slow(3), []
    before = lambda: called.append((threading.current_thread() is threading.main_thread(), loader.next))
    ahead = training.Prefetch(loader, size=1, in_thread=True, before_read=before)
    assert same(next(ahead), 1)
    assert loader.begun.acquire(timeout=30) and loader.begun.acquire(timeout=30)  # nobody has asked for the second
    assert called == [(True, 0), (True, 1)]
    assert ahead.get_state() == {"0": {"next": 1}} and ahead.metrics()["data/read"] == 1
    for _ in range(9):
        loader.go.release()
    assert same(next(ahead), 2) and same(next(ahead), 3)
    assert next(ahead, None) is None and next(ahead, None) is None
    ahead.reset()
    assert same(next(ahead), 1)


def test_a_thread_stops_before_the_position_changes():
    """What was read ahead is dropped: a resumed loop reads the batch after the last one that it trained on."""
    ahead = training.Prefetch(tiny.Loader(9), size=3, in_thread=True)
    next(ahead), next(ahead)
    state = ahead.get_state()
    next(ahead)
    for _ in range(20):
        ahead.set_state(state)
        assert same(next(ahead), 3) and same(next(ahead), 4)


def test_errors_in_the_thread_reach_the_loop():
    def broken(number):
        if number == 1:
            raise RuntimeError("the server is gone")
        return tiny.batch(), {}

    ahead = training.Prefetch(post_training.Rollouts(broken), size=1, in_thread=True)
    next(ahead)
    with pytest.raises(RuntimeError, match="the server is gone"):
        next(ahead)
