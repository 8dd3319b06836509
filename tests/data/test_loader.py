"""Global batches depend only on the data and the number of shards, not on hosts, interruptions or threads."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from itertools import pairwise

import grain
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from maxlib import data
from maxlib.data import _loader
from tests.data.corpus import documents, process, shuffled

STRATEGIES = ("first_fit", "concat_then_split", "best_fit")
LENGTH, BATCH, SHARDS = 16, 12, 6


def shard_rows(part: slice, *, docs, strategy="first_fit"):
    return data.pack(docs[part], length=LENGTH, strategy=strategy, bins=4)


def loader(docs=None, *, strategy="first_fit", host=0, hosts=1, **kwargs) -> data.Loader:
    docs = shuffled() if docs is None else docs
    kwargs = {"batch_size": BATCH, "num_shards": SHARDS, "timeout": 60.0, **kwargs}
    with process(host, hosts):
        return data.Loader(partial(shard_rows, docs=docs, strategy=strategy), **kwargs)


def take(loader, count):
    return [next(loader) for _ in range(count)]


def drain(loader, batches):
    for batch in loader:
        batches.append(batch)


def assert_equal(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        assert batch.keys() == other.keys()
        for name in batch:
            np.testing.assert_array_equal(batch[name], other[name])


def through_json(state):
    return json.loads(json.dumps(state))


class Hosts:
    """Several hosts' loaders as one, which puts rows where they belong in the global batch."""

    def __init__(self, count, state=None, **kwargs):
        self.loaders = [loader(host=i, hosts=count, **kwargs) for i in range(count)]
        if state is not None:
            for host in self.loaders:
                host.set_state(state)

    def __next__(self):
        joined = {}
        for loader in self.loaders:
            for name, rows in next(loader).items():
                joined.setdefault(name, np.full((BATCH, *rows.shape[1:]), -7, rows.dtype))[loader.rows] = rows
        return joined

    def get_state(self):
        return through_json({shard: state for loader in self.loaders for shard, state in loader.get_state().items()})


@pytest.mark.parametrize(
    ("strategy", "counts"), [(STRATEGIES[0], (1, 3, 2)), (STRATEGIES[1], (4, 1, 6)), (STRATEGIES[2], (2, 3, 1))]
)
def test_hosts_come_and_go(strategy, counts):
    uninterrupted = take(loader(strategy=strategy), 10)
    state, batches = None, []
    for count, steps in zip(counts, (3, 3, 4), strict=True):
        hosts = Hosts(count, state, strategy=strategy)
        batches += take(hosts, steps)
        state = hosts.get_state()
    assert_equal(batches, uninterrupted)


@pytest.mark.parametrize("strategy", [STRATEGIES[0], pytest.param(STRATEGIES[1], marks=pytest.mark.full)])
def test_resume_is_exact_after_every_batch(strategy):
    """Through JSON, on a used loader and on a new one; more batches than an epoch and than a set of bins."""
    reading, uninterrupted = loader(strategy=strategy, num_shards=2), take(loader(strategy=strategy, num_shards=2), 9)
    used = loader(strategy=strategy, num_shards=2)
    for step in range(7):
        state = through_json(reading.get_state())
        for resumed in (used, loader(strategy=strategy, num_shards=2)):
            resumed.set_state(state)
            assert through_json(resumed.get_state()) == state
            assert resumed.batches == step
            assert_equal(take(resumed, 2), uninterrupted[step : step + 2])
        next(reading)


@pytest.mark.parametrize(
    "strategy", [STRATEGIES[0], *(pytest.param(name, marks=pytest.mark.full) for name in STRATEGIES[1:])]
)
def test_resume_near_the_end_of_finite_data(strategy):
    finite = partial(loader, data.in_memory(documents()), strategy=strategy, num_shards=3)
    uninterrupted, reading = list(finite()), finite()
    for step in range(len(uninterrupted) + 1):
        resumed = finite()
        resumed.set_state(through_json(reading.get_state()))
        assert_equal(list(resumed), uninterrupted[step:])
        next(reading, None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_epoch_holds_every_prediction_once(strategy):
    pairs = Counter()
    for batch in loader(shuffled(epochs=1), strategy=strategy):
        assert batch["tokens"].shape == (BATCH, LENGTH)
        learned = batch["targets"] >= 0
        assert np.all(batch["segment_ids"][learned] > 0)
        pairs.update(zip(batch["tokens"][learned].tolist(), batch["targets"][learned].tolist(), strict=True))
    assert pairs == Counter((int(a), int(b)) for doc in documents() for a, b in pairwise(doc))


def test_seed_and_epoch_decide_the_order():
    def order(epochs, seed):
        docs = shuffled(epochs=epochs, seed=seed)
        return [int(docs[i]["tokens"][0]) // 1000 for i in range(len(docs))]

    two = order(2, seed=3)
    assert two == order(2, seed=3)
    assert sorted(two[:40]) == sorted(two[40:]) == list(range(1, 41))
    assert two[:40] != two[40:]
    assert two != order(2, seed=11)


def test_rows_of_hosts_are_the_whole_batch():
    rows = [loader(host=i, hosts=3).rows for i in range(3)]
    np.testing.assert_array_equal(np.concatenate(rows), np.arange(BATCH))
    assert [len(r) for r in rows] == [4, 4, 4]


def test_a_loader_follows_a_sharding():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    everything = NamedSharding(mesh, PartitionSpec("data", "tensor"))
    rows = partial(shard_rows, docs=shuffled())
    loader = data.Loader(rows, batch_size=BATCH, num_shards=SHARDS)
    loader.follow(everything)
    np.testing.assert_array_equal(loader.rows, np.arange(BATCH))
    with pytest.raises(ValueError, match="batch_size=6 does not divide over the mesh"):
        data.Loader(rows, batch_size=6, num_shards=SHARDS).follow(everything)


def test_a_loader_follows_before_its_first_batch(monkeypatch):
    """The mesh gives this process other rows than an equal part would."""
    make = lambda: data.Loader(partial(shard_rows, docs=shuffled()), batch_size=BATCH, num_shards=SHARDS, timeout=60.0)
    late, early = make(), make()
    want = next(late)["tokens"][6:]
    monkeypatch.setattr(_loader, "_rows_of_process", lambda *_: (np.arange(6, 12),) * 2)
    with pytest.raises(ValueError, match="hold the rows 6-11 of each global batch, but its loader returns 0-11"):
        late.follow(None)
    early.follow(None)
    np.testing.assert_array_equal(next(early)["tokens"], want)
    assert list(early.get_state()) == ["3", "4", "5"]


def test_fewer_rows_than_hosts_is_said_on_all_hosts(monkeypatch):
    state = data.Loader(partial(shard_rows, docs=shuffled()), batch_size=2, num_shards=1).get_state()
    for host in range(3):
        with process(host, 3):
            alone = data.Loader(partial(shard_rows, docs=shuffled()), batch_size=2, num_shards=1)
        for read in (partial(next, alone), partial(alone.set_state, state)):
            with pytest.raises(ValueError, match="3 processes for batch_size=2: use at least as many rows"):
                read()
    monkeypatch.setattr(_loader, "_rows_of_process", lambda *_: (np.arange(2),) * 2)
    alone.follow(None)  # as replicas that train alone do
    assert len(next(alone)["tokens"]) == 2


def test_hosts_that_do_not_divide_the_shards_share_them():
    """Every host hands out its own rows of the shards it reads with others, as many as any other, all to the same end;
    each shard is counted once.
    """
    docs = data.in_memory(documents())
    make = lambda: data.Loader(partial(shard_rows, docs=docs), batch_size=BATCH, num_shards=num_shards, timeout=60.0)
    for num_shards, hosts in ((1, 2), (2, 3), (6, 4)):
        loaders = []
        for host in range(hosts):
            with process(host, hosts):
                loaders.append(make())
        held = {(1, 2): [1, 1], (2, 3): [1, 2, 1], (6, 4): [2] * 4}
        assert [len(each.shards) for each in loaders] == held[num_shards, hosts]
        single = make()
        assert {len(loader.rows) for loader in loaders} == {BATCH // hosts}
        for _ in range(3):
            want, got = next(single), [next(loader) for loader in loaders]
            for name in want:
                np.testing.assert_array_equal(np.concatenate([batch[name] for batch in got]), want[name])
        states = [loader.get_state() for loader in loaders]
        assert {shard: state for loader in states for shard, state in loader.items()} == single.get_state()
        if num_shards == 1:
            assert {len(list(loader)) for loader in loaders} == {len(list(single))}


TWO_PROCESSES = """
import sys
from unittest import mock
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from maxlib import data, distributed

jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
docs = data.in_memory([np.arange(1, 30) + 100 * i for i in range(1, 40)])
docs = data.Mixture({"a": docs, "b": docs}, weights={"a": 1, "b": 2}, seed=1)
make = lambda num_shards=4, **more: data.Loader(
    lambda part: data.pack(docs[part], length=8), batch_size=8, num_shards=num_shards, **more
)
with mock.patch.multiple(jax, process_index=lambda: 0, process_count=lambda: 1):
    every_row, alone = next(make())["tokens"], make()
devices = np.array(jax.devices()).reshape(2, -1)[::-1]  # the second process's rows come first
sharding = NamedSharding(Mesh(devices, ("data", "tensor")), PartitionSpec("data"))
loader = make()
loader.follow(sharding)
for part in jax.make_array_from_process_local_data(sharding, next(loader)["tokens"], (8, 8)).addressable_shards:
    np.testing.assert_array_equal(part.data, every_row[part.index])
shared = make()
shared.follow(NamedSharding(sharding.mesh, PartitionSpec("tensor")))  # both processes hold all rows
np.testing.assert_array_equal(next(shared)["tokens"], every_row)
counts = sum(distributed.allgather_json(sum(shared.metrics().values())))
next(alone)
assert counts == sum(alone.metrics().values()) > 0, counts
print("fine", loader.shards, shared.shards)
"""


@pytest.mark.full
def test_two_processes_hold_the_rows_their_devices_need():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", TWO_PROCESSES, port]
    both = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
    assert [process.communicate(timeout=120)[0].splitlines()[-1] for process in both] == [  # below what Gloo says
        "fine [2, 3] [0, 1, 2, 3]",
        "fine [0, 1] [0, 1, 2, 3]",
    ]


def test_iteration_starts_again_after_reset():
    finite = loader(data.in_memory(documents()))
    first = list(finite)
    assert list(finite) == []
    finite.reset()
    assert_equal(list(finite), first)


def test_shards_that_run_out_give_padding():
    docs = data.in_memory([np.arange(1, 200), [1, 2, 3]])
    batches = list(loader(docs, num_shards=2, batch_size=2))
    assert len(batches) == 13  # ceil(199 / 16)
    assert all(np.all(b["segment_ids"][1] == 0) and np.all(b["targets"][1] == -1) for b in batches[1:])
    batches = list(loader(docs, num_shards=2, batch_size=2, num_batches=20))
    assert len(batches) == 20
    assert np.all(batches[-1]["targets"] == -1)


def test_one_hosts_end_is_not_the_runs():
    docs = data.in_memory(documents())
    with pytest.raises(
        RuntimeError, match=r"shards \[3, 4, 5\] ended after .* repeat the documents, or pass num_shards=1"
    ):
        list(loader(docs, host=1, hosts=2))
    assert len(list(loader(docs, host=1, hosts=2, num_batches=30))) == 30


class Hangs:
    """A source whose document 30 does not come before it is let go."""

    def __init__(self):
        self.let_go = threading.Event()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index == 30:
            self.let_go.wait(60)
        return {"tokens": documents()[index]}


def test_a_stage_that_hangs_is_named_and_may_come_back():
    source = Hangs()
    docs = grain.MapDataset.source(source)
    stuck = loader(docs, num_shards=2, batch_size=2, timeout=0.5)
    batches, begin = [], time.perf_counter()
    with pytest.raises(
        TimeoutError, match=r"(?s)No data within 0.5 s: waited for batch \d+ of shard 0 of 2.*let_go.wait"
    ):
        drain(stuck, batches)
    assert time.perf_counter() - begin < 20
    assert stuck.wait_seconds >= 0.5
    state = stuck.get_state()
    source.let_go.set()
    uninterrupted = list(loader(docs, num_shards=2, batch_size=2))
    resumed = loader(docs, num_shards=2, batch_size=2)
    resumed.set_state(state)
    assert_equal(batches + list(resumed), uninterrupted)
    assert_equal(batches + list(stuck), uninterrupted)


REPEATED = grain.MapDataset.source([{"tokens": np.arange(9), "targets": np.arange(9)}] * 5).repeat()
LEFT_OUT = {
    "packed": lambda part: data.pack(REPEATED[part], length=2, overlong="drop"),
    "packed from a stream": lambda part: data.pack(
        data.Mixture({"a": REPEATED}, {"a": 1})[part], length=2, overlong="drop"
    ),
    "padded": lambda part: data.pad(REPEATED, length=1, overlong="drop")[part],
    "read by grain": lambda part: data.pad(REPEATED, length=1, overlong="drop")[part].to_iter_dataset(),
    "filtered": lambda part: data.pack(REPEATED.filter(lambda document: False)[part], length=8),
    "in workers": lambda part: data.pack(data.in_workers(REPEATED.map(lambda document: None)[part], 0), length=8),
}


@pytest.mark.parametrize("rows", LEFT_OUT.values(), ids=LEFT_OUT)
def test_endless_data_of_which_nothing_is_left_is_an_error_at_once(rows, monkeypatch):
    monkeypatch.setattr("maxlib.data._reader._STREAM_PATIENCE", 50)
    with pytest.raises(ValueError, match=r"No document in \d+ reads: .* all of it is filtered out or dropped"):
        next(data.Loader(rows, batch_size=2, timeout=20))


@pytest.mark.parametrize(
    "read", [lambda part: part, lambda part: data.in_workers(part, 0)], ids=["in order", "workers"]
)
def test_a_place_among_other_documents_is_refused(read):
    """Somebody added files between two runs: shuffled documents lie elsewhere."""
    few, more = shuffled(30), shuffled(31)
    rows = lambda docs: data.Loader(lambda part: data.pack(read(docs[part]), length=LENGTH), batch_size=4, num_shards=2)
    begun = rows(few)
    next(begun)
    resumed = rows(more)
    resumed.set_state(begun.get_state())
    with pytest.raises(ValueError, match="number of documents or files is 30, but here it is 31"):
        next(resumed)


def test_a_dataset_is_read_in_order_and_not_far_ahead():
    """Rows may have images: grain would read 500 of each shard ahead."""
    read = []
    rows = grain.MapDataset.range(400).map(lambda i: read.append(i) or {"tokens": np.full(4, i)})
    batches = data.Loader(lambda part: rows[part], batch_size=4, num_shards=2, prefetch=2)
    assert next(batches)["tokens"][:, 0].tolist() == [0, 2, 1, 3] and len(read) <= 4 * 4
    resumed = data.Loader(lambda part: rows[part], batch_size=4, num_shards=2, prefetch=2)
    resumed.set_state(batches.get_state())
    assert_equal(take(resumed, 3), take(batches, 3))


def test_an_error_in_a_stage_reaches_the_reader():
    def fails(document):
        raise ZeroDivisionError("from the map")

    with pytest.raises(ZeroDivisionError, match="from the map") as caught:
        next(loader(shuffled().map(fails)))
    assert "While reading batch 0 of data shard 0 of 6." in caught.value.__notes__


def test_threads_end_with_the_loader():
    before = set(threading.enumerate())
    reading = loader()
    next(reading)
    readers = [thread for thread in threading.enumerate() if thread not in before]
    assert len(readers) == SHARDS
    del reading
    for thread in readers:
        thread.join(20)
    assert not any(thread.is_alive() for thread in readers)


READING_AT_EXIT = """
from maxlib import data

docs = data.in_memory([range(i, i + 30) for i in range(100)]).shuffle(seed=0).repeat()
loaders = [data.Loader(lambda part: data.pack(docs[part], length=64), batch_size=8, prefetch=10**6) for _ in range(2)]
for loader in loaders:
    next(loader)
"""


@pytest.mark.full
def test_process_ends_well_while_threads_read():
    """Threads that the interpreter cuts off inside native code abort the process."""
    done = subprocess.run([sys.executable, "-c", READING_AT_EXIT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_loader_reads_on():
    reading, uninterrupted = loader(), take(loader(), 4)
    batches = take(reading, 2)
    reading.close()
    assert_equal(batches + take(reading, 2), uninterrupted)


def test_bad_arguments():
    with pytest.raises(
        ValueError, match="batch_size must be a positive multiple of num_shards, got batch_size=12 and num_shards=5"
    ):
        loader(num_shards=5)
    with pytest.raises(ValueError, match="prefetch must be at least 1"):
        loader(prefetch=0)
    with pytest.raises(ValueError, match=r"The shards \[3, 4, 5\] of 6 have no rows"):
        next(loader(data.in_memory([[1, 2]]), host=1, hosts=2))


def test_states_that_do_not_fit():
    reading = loader()
    take(reading, 2)
    state = reading.get_state()
    with pytest.raises(ValueError, match=r"lacks the shards \[6, 7\] of 8"):
        loader(num_shards=8, batch_size=16).set_state(state)
    with pytest.raises(ValueError, match=r"has num_shards=6, but this loader has num_shards=3"):
        loader(num_shards=3).set_state(state)
    with pytest.raises(ValueError, match=r"has batch_size=12, but this loader has batch_size=24"):
        loader(batch_size=24).set_state(state)
    with pytest.raises(ValueError, match=r"are at different batches \[0, 2\]"):
        loader().set_state({**state, "3": loader().get_state()["3"]})
    other = loader(strategy="concat_then_split")
    other.set_state(state)
    with pytest.raises(ValueError, match="data state does not fit this pipeline"):
        next(other)


def test_import_is_light():
    code = "import sys, maxlib.data; print([m for m in ('grain', 'jax', 'numpy', 'tokenizers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        data.nonsense
    assert all(callable(getattr(data, name)) for name in dir(data) if not name.startswith("_"))
