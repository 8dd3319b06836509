"""Checkpoints on the hosts' own disks: every shard survives the loss of a disk, and any mesh can read them."""

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib.checkpoint import Checkpointer, DamagedError, Local, SaveError, Tiers, _replicas
from maxlib.checkpoint._parts import Part, PartStore, _Server, peers_of
from tests.checkpoint import local_hosts

ROOT = Path(__file__).parents[2]
KILLS = int(os.environ.get("MAXLIB_KILLS", "3"))


def placed(values, *axes):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    return jax.device_put(values, NamedSharding(mesh, P(*axes)))


def parameters():
    return {
        "w": placed(np.arange(64, dtype=np.float32).reshape(8, 8), "a", "b"),
        "half": placed(np.array([-0.0, 1.5] * 4, jnp.bfloat16), "b"),
        "copied": placed(np.int32(4)),
        "host": np.arange(3.0),
        "empty": np.zeros((0, 3), np.float32),
        "key": jax.random.key(3),
    }


def test_any_mesh_reads_what_was_saved(tmp_path):
    params = parameters()
    with Local(tmp_path, every=2) as local:
        assert [local.should_save(step) for step in (1, 2)] == [False, True]
        local.save(2, {"params": params}, data={"0": {"n": 1}}, metrics={"loss": 0.5})
        local.save(4, {"params": params})
        assert local.steps() == [2]  # the running save is not complete
        local.wait()
        assert (local.steps(), local.verify(4)) == ([4], [])
    transposed = NamedSharding(params["w"].sharding.mesh, P("b", "a"))
    like = params | {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=transposed)}
    with Local(tmp_path, every=10) as local:
        restored = local.restore(like={"params": like})
        assert local.should_save(5)  # copies may be lost
        local.save(5, {"params": restored["params"]})
        assert not local.should_save(6) and local.should_save(10)
        with pytest.raises(ValueError, match="it lacks"):
            local.restore(like={"params": like | {"other": np.zeros(3)}})
    assert restored["meta"]["step"] == 4 and restored["params"]["w"].sharding == transposed
    for name, value in params.items():
        values = [jax.random.key_data(x) if name == "key" else x for x in (value, restored["params"][name])]
        assert np.asarray(values[0]).tobytes() == np.asarray(values[1]).tobytes(), name


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b""), lambda file: flip_last(file)])
def test_a_damaged_step_is_refused_and_the_next_tier_is_read(tmp_path, damage):
    params = {"w": placed(np.arange(64, dtype=np.float32).reshape(8, 8), "a", "b")}
    with Tiers(Local(tmp_path / "near", every=1), Checkpointer(tmp_path / "far", every=2)) as tiers:
        for step in (2, 3):
            assert tiers.should_save(step)
            tiers.save(step, {"params": params})
        tiers.wait()
        near = tiers.tiers[0]
        damage(next((tmp_path / "near").glob("3-*/*")))
        assert tiers.verify(3) == near.verify(3) != [] and tiers.verify(2) == []
        with pytest.raises(DamagedError):
            near.restore(like={"params": params})
        assert tiers.restore(like={"params": params})["meta"]["step"] == 2


def test_unreadable_leaves_are_named_by_the_first_reading(tmp_path, monkeypatch):
    params = {name: placed(np.arange(64, dtype=np.float32).reshape(8, 8), "a", "b") for name in ("v", "w")}
    with Local(tmp_path, every=1) as local:
        local.save(1, {"params": params})
        local.wait()
        flip_last(next(tmp_path.glob("1-*/*")))  # the last shard is of w
        reads = []
        monkeypatch.setattr(local._store, "read_here", count_reads(local._store.read_here, reads))
        with pytest.raises(DamagedError) as error:
            local.restore(1, like={"params": params})
        assert error.value.leaves == ("params: w",) and error.value.__cause__ is not None
        assert len(reads) <= 2 + 2 * 8  # the header, and each shard once


def count_reads(read, reads: list[int]):
    def counted(part, start, size):
        reads.append(start)
        return read(part, start, size)

    return counted


def flip_last(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_save_that_fails_is_reported_and_the_step_before_stays(tmp_path):
    with Local(tmp_path / "disk", every=1, max_failed_saves=1) as local:
        local.save(1, {"params": {"w": jnp.ones(3)}})
        local.wait()
        (tmp_path / "disk" / f"2-{local._store.run}").touch()  # a file where the directory must be
        local.save(2, {"params": {"w": jnp.ones(3)}})
        with pytest.raises(SaveError, match="Step 2"):
            local.wait()
        assert local.steps() == [1] and local.unsaved() is not None
        with pytest.raises(FileNotFoundError, match="7"):
            local.restore(7, like={"params": {"w": jnp.ones(3)}})
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="Checkpoints cannot be written to .*file"):
        Local(tmp_path / "file", every=1)
    with pytest.raises(ValueError, match="peers of at least 0; got .*, 0, None, 3 and 1"):
        Local(tmp_path, every=0)
    with pytest.raises(ValueError, match="Tiers needs at least one Checkpointer"):
        Tiers()


def test_peers_are_on_other_hosts_and_spread():
    assert [peers_of(i, list("abcd"))[0] for i in range(4)] == [1, 2, 3, 0]
    assert [peers_of(i, list("aabb"))[0] for i in range(4)] == [2, 3, 0, 1]
    assert peers_of(0, list("aaa")) == [1, 2] and peers_of(0, ["a"]) == []
    assert Part.parse("../../etc/1-of-2") is None and Part.parse(str(Part(3, "ab", 0, 2))) == Part(3, "ab", 0, 2)


def test_parts_go_to_peers_and_come_from_them(tmp_path, monkeypatch):
    """Here a process is its own peer; nobody without the secret is served."""
    store = PartStore(tmp_path / "own", peers=0)
    peer = PartStore(tmp_path / "peer", peers=0)
    peer._server, peer.secret = _Server(peer), store.secret
    threading.Thread(target=peer._server.serve_forever, daemon=True).start()
    store._processes.append({"address": "127.0.0.1", "port": peer._server.server_port})
    store.peers, part = [1], Part(3, "ab", 0, 2)
    store.holders = {part: [0, 1]}
    store.write(part, [b"0123", b"4567"])
    store.copy(part)
    (store.directory / str(part)).unlink()
    assert store.read(part, lambda read_range: read_range(2, 4)) == b"2345" and peer.held() == [part]
    with pytest.raises(OSError, match="GET 4-ab/0-of-2.0-8 was answered with 404"):
        store._read_range(1, Part(4, "ab", 0, 2), 0, 8)
    with pytest.raises(OSError, match="was answered with 404"):
        store._request(1, "PUT", "../outside", body=b"x")
    peer.write(part, [b"01234567"])
    monkeypatch.setattr(peer, "write", lambda part, chunks: _raise(OSError("disk full")))
    shutil.copytree(peer.directory, store.directory, dirs_exist_ok=True)
    with pytest.raises(OSError, match="was answered with 507 disk full"):
        store.copy(part)
    store.secret = "guessed"
    with pytest.raises(OSError, match="was answered with 403"):
        store._read_range(1, part, 0, 8)
    peer.close()


def _raise(error: Exception) -> None:
    raise error


def test_what_replicas_share_is_read_once_and_merged_bit_for_bit(monkeypatch):
    mesh = jax.make_mesh((2, 4), ("replica", "b"), axis_types=(AxisType.Auto,) * 2)
    values = {
        "w": np.array([-0.0, np.nan, 1.5, -2.0], np.float32),
        "half": np.array([-0.0, 1.5] * 4, jnp.bfloat16),
        "ids": np.arange(-4, 4, dtype=np.int32),
    }
    split = NamedSharding(mesh, P("b"))
    abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for name, x in values.items()}
    with monkeypatch.context() as two_hosts:
        two_hosts.setattr(jax, "process_count", lambda: 2)
        assert _replicas.replica_axis(abstract["w"]) is None  # both replicas are on one host
        two_hosts.setattr(_replicas, "_hosts", lambda mesh, axis: [{0}, {1}] if axis == 0 else [{0, 1}] * 4)
        assert [_replicas.replica_axis(leaf) for leaf in abstract.values()] == [0, 0, 0]
        complex_leaf = jax.ShapeDtypeStruct((4,), jnp.complex64, sharding=split)
        assert _replicas.replica_axis(complex_leaf) is None

    def read_here(leaves):
        assert all(leaf.sharding.mesh.devices.shape == (1, 4) for leaf in leaves.values())
        return {name: jax.device_put(values[name], leaf.sharding) for name, leaf in leaves.items()}

    monkeypatch.setattr(_replicas, "replica_axis", lambda leaf: 0)
    loaded = _replicas.load(lambda others: dict(others), read_here, abstract)
    for name, x in values.items():
        assert loaded[name].sharding == split
        np.testing.assert_array_equal(np.asarray(loaded[name]).view(np.uint8), x.view(np.uint8))


def start(directory: Path, processes: int = 4) -> list[subprocess.Popen]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    command = [sys.executable, "-m", "tests.checkpoint.local_hosts", port]
    return [
        subprocess.Popen(
            [*command, str(process), str(processes), directory],
            stdout=subprocess.PIPE,
            stderr=(directory / f"{process}.txt").open("w"),
            text=True,
            cwd=ROOT,
            env=os.environ | {"XLA_FLAGS": " ".join(flags)},
        )
        for process in range(processes)
    ]


def run(directory: Path, *, until: int | None = None) -> tuple[int, list[int], str]:
    """Runs to the end, or kills one process after it has printed step `until`; returns the first step, the local steps
    then, and the last line.
    """
    running = start(directory)
    first, line = [], ""
    try:
        assert running[0].stdout is not None
        for line in map(str.strip, running[0].stdout):
            if line.startswith("from"):
                first = line.split(maxsplit=2)
            if line == f"step {until}":
                running[-1].send_signal(signal.SIGKILL)
                break
    finally:
        for child in running if until is not None else ():
            child.kill()
        for child in running:
            child.wait(100)
    assert first, (directory / "0.txt").read_text()[-3000:]
    return int(first[1]), [int(step) for step in first[2].strip("[]").split(",") if step.strip()], line


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_killed_process_and_its_disk_cost_at_most_one_local_interval(tmp_path):
    """`MAXLIB_KILLS=50` and `-o faulthandler_timeout=3600` repeat it fifty times."""
    untouched, killed = tmp_path / "untouched", tmp_path / "killed"
    untouched.mkdir()
    killed.mkdir()
    expected = run(untouched)[2]
    assert expected.startswith("end")
    rng, reached, lost = random.Random(0), 0, []
    for kill in range(KILLS):
        until = (reached // local_hosts.EVERY + 1) * local_hosts.EVERY + rng.randrange(1, local_hosts.EVERY)
        if until >= local_hosts.STEPS:
            shutil.rmtree(killed)
            killed.mkdir()
            reached, until = 0, local_hosts.EVERY + rng.randrange(1, local_hosts.EVERY)
        begin, _, _ = run(killed, until=until)
        if reached:
            lost.append(reached - begin)
        shutil.rmtree(killed / f"disk-{kill % 4}")
        reached = until
    begin, near, end = run(killed)
    lost.append(reached - begin)
    print(f"steps lost at each of {len(lost)} restarts: {lost}")
    # The save at the last interval may be unfinished, so that it continues from the one before.
    assert begin in near and max(lost) < 2 * local_hosts.EVERY, (begin, near, lost)
    assert end == expected
