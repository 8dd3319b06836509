"""Documents from worker processes are those of reading without them, in the same order, and so is their state."""

import itertools
import json
import os
import threading

import numpy as np
import pytest

from maxlib import data
from tests.data.corpus import documents


def transformed(document):
    """Leaves out every third document, as a filter does."""
    tokens = np.asarray(document["tokens"])
    return None if tokens[0] // 1000 % 3 == 0 else {"tokens": tokens, "process": os.getpid()}


def failing(document):
    if document["tokens"][0] // 1000 == 5:
        raise ValueError("no fives")
    return document


def source():
    return data.in_memory(documents(20)).shuffle(seed=1).repeat().map(transformed)


def loader(num_workers, **options):
    rows = lambda part: data.pack(data.in_workers(source()[part], num_workers), length=32, bins=4)
    return data.Loader(rows, batch_size=4, num_shards=1, prefetch=1, **options)


@pytest.mark.full
def test_order_and_state_are_those_without_workers():
    plain, workers = loader(0), loader(3)
    for _ in range(3):
        np.testing.assert_array_equal(next(plain)["tokens"], next(workers)["tokens"])
    assert plain.get_state() == workers.get_state()
    resumed = loader(2)  # another number of them
    resumed.set_state(json.loads(json.dumps(workers.get_state())))
    workers.close()
    for _ in range(4):
        np.testing.assert_array_equal(next(plain)["tokens"], next(resumed)["tokens"])
    resumed.close()


@pytest.mark.full
def test_two_workers_share_the_documents():
    reading = iter(data.in_workers(source(), 2))
    plain = iter(data.in_workers(source(), 0))
    ours = list(itertools.islice(reading, 24))
    for document, wanted in zip(ours, plain, strict=False):
        np.testing.assert_array_equal(document["tokens"], wanted["tokens"])
    assert len({document["process"] for document in ours} - {os.getpid()}) == 2
    state = reading.get_state()
    after = next(reading)
    reading.set_state(state)
    np.testing.assert_array_equal(next(reading)["tokens"], after["tokens"])
    reading.close()


def test_without_workers_documents_are_those_of_the_dataset():
    finite = data.in_memory(documents(7)).map(transformed)
    ours = [d["tokens"][0] for d in data.in_workers(finite, 0)]
    assert ours == [d["tokens"][0] for d in finite if d is not None]


@pytest.mark.full
def test_an_error_in_a_worker_arrives():
    reading = data.in_workers(data.in_memory(documents(8)).map(failing), 1)
    with pytest.raises(ValueError, match="no fives"):
        list(reading)


def test_what_cannot_be_shared_is_refused():
    guarded = data.SkipBadRecords(limit=1).guard(data.in_memory(documents(8))).shuffle(seed=0)
    with pytest.raises(ValueError, match="Bad records are counted in one process"):
        data.in_workers(guarded, 2)
    with pytest.raises(ValueError, match="num_workers must be at least 0"):
        data.in_workers(data.in_memory([[1]]), -1)


@pytest.mark.full
def test_a_closed_loader_leaves_no_process():
    from multiprocessing import active_children

    before = {process.pid for process in active_children()}
    workers = loader(2)
    next(workers)
    assert {process.pid for process in active_children()} - before
    workers.close()
    for thread in threading.enumerate():
        if thread.name == "maxlib-data":
            thread.join(30)
    assert {process.pid for process in active_children()} == before
