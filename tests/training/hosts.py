"""One of two hosts, each with two devices: `python -m tests.training.hosts PORT HOST DIRECTORY WHAT`."""

import faulthandler
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from maxlib import distributed, ops, sharding, training
from maxlib.checkpoint import Checkpointer, DamagedError, InUseError, SaveError
from maxlib.checkpoint import _lock as owner
from maxlib.checkpoint import _records as records
from maxlib.checkpoint import _storage as storage
from tests.training import tiny

VALUES = np.random.default_rng(0).normal(size=(8, 600)).astype(np.float32)
COPIES = {
    "w": VALUES,
    "zeros": np.array([0.0, -0.0, np.nan, np.inf], np.float32),
    "bf16": np.array([-0.0, 1.5], ml_dtypes.bfloat16),
    "int8": np.array([-128, 127], np.int8),
    "bool": np.array([True, False]),
    "step": np.array(7, np.int32),
}


def main(port: str, host: int, directory: str, what: str) -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=host)
    known = (save, restore, copies, faults, raises, export, sigterm, in_use, late)
    {function.__name__: function for function in known}[what](host, directory)


def place(values: np.ndarray, spec: P, *axes: tuple[str, int]) -> jax.Array:
    names, sizes = zip(*axes, strict=True)
    mesh = jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    return jax.make_array_from_callback(values.shape, NamedSharding(mesh, spec), lambda index: values[index])


def save(host: int, directory: str) -> None:
    w = place(VALUES, P("data"), ("data", 4))
    with Checkpointer(directory) as ck:
        for step in (1, 2):
            ck.save(step, {"params": {"w": w}}, data={str(host): {"n": "x" * (3 + 5 * host)}})


def restore(host: int, directory: str) -> None:
    with Checkpointer(directory) as ck:
        got = ck.restore(like={"params": {"w": place(VALUES, P(), ("data", 4))}})
    check(got["params"], {"w": VALUES})
    print(got["meta"]["step"], sorted(got["data"].items()))


def copies(host: int, directory: str) -> None:
    """Arrays that both hosts hold are read by one of them."""
    spec = lambda x: P("shard") if x.ndim == 2 else P()
    items = {name: place(x, spec(x), ("replica", 2), ("shard", 2)) for name, x in COPIES.items()}
    items["own"] = place(VALUES, P("replica"), ("replica", 2), ("shard", 2))  # each host has half of it
    reads = Counter()

    def counted(read):
        return lambda directory, item, abstract: reads.update(list(abstract)) or read(directory, item, abstract)

    with Checkpointer(directory, seconds=3600) as ck:
        assert not ck.should_save(1)  # the hosts agree
        for step in () if ck.steps() else (1, 2):
            ck.save(step, {"params": items})
        ck.wait()
        storage._read, storage.read_here = counted(storage._read), counted(storage.read_here)
        with jax.set_mesh(items["w"].sharding.mesh):  # as a Trainer does
            got = ck.restore(like={"params": items})
        counts = dict(sorted(reads.items()))
        ck.save(9, {"params": items})  # the hosts are in step with each other
    check(got["params"], COPIES | {"own": VALUES})
    assert got["params"]["w"].sharding == items["w"].sharding
    print(got["meta"]["step"], counts)


def check(got: dict, wanted: dict) -> None:
    for name, array in got.items():
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == wanted[name][shard.index].tobytes(), name


def small(model: Any, **more: Any) -> training.Trainer:
    return training.Trainer(
        model,
        optimizer=training.adamw(1e-2, mask=None),
        loader=tiny.Loader(rows=4),
        loss=tiny.loss,
        layout=sharding.Layout(sharding.make_mesh(data=4)),
        **more,
    )


def raises(host: int, directory: str) -> None:
    """An error of one host while a checkpoint is written."""

    def fail(trainer: training.Trainer) -> None:
        if host == 1 and trainer.step == 3:
            raise RuntimeError("of this host alone")

    trainer = small(tiny.model, checkpointer=Checkpointer(directory, every=2), callbacks=[(1, fail)])
    try:
        trainer.fit(500)
    except Exception as error:
        print(error, flush=True)
        os._exit(0)  # as `distributed.initialize` would have it


def export(host: int, directory: str) -> None:
    """The host that writes is refused, when the others are ready to gather with it."""
    model = tiny.llama(rope=ops.Rope(12, max_length=64))  # built in each process, on one device
    trainer = small(model, callbacks=[training.HuggingFaceExport(directory, every=2)])
    trainer.fit(5)
    print(trainer.step)


def sigterm(host: int, directory: str) -> None:
    """One host of two is told to go; both stop after the same step, which is saved."""
    tell = lambda trainer: os.kill(os.getpid(), signal.SIGTERM) if host == 1 and trainer.step == 3 else None
    trainer = small(tiny.model, checkpointer=Checkpointer(directory), callbacks=[(1, tell)])
    try:
        trainer.fit(500)
    except distributed.Interrupted as stopped:
        trainer.checkpointer.close()
        print(stopped.code, trainer.step, trainer.checkpointer.steps())


def faults(host: int, directory: str) -> None:
    """What one host alone meets concerns both."""
    items = {"params": {"w": place(VALUES, P("data"), ("data", 4))}}
    with Checkpointer(directory) as ck:
        for step in (1, 2, 3):
            ck.save(step, items)
        with mock.patch("os.mkdir", side_effect=OSError(28, "disk full")) if host == 0 else nullcontext():
            said = failure(lambda: ck.save(4, items))
        if host == 0:
            cut(Path(directory) / "2", VALUES[4:6].tobytes())  # the other host's
        with mock.patch.object(records, "read", without(3)) if host == 1 else nullcontext():
            step = ck.restore(like=items)["meta"]["step"]
        time.sleep(host)  # the first host is ahead
        ck.save(3, items)
    with Checkpointer(directory, replace=True) as ck:
        time.sleep(host)
        ck.save(3, items)
    print(step, "disk full" in said, ck.steps(), (Path(directory) / "3.damaged").exists())


def failure(call: Callable[[], Any]) -> str:
    try:
        call()
    except SaveError as error:
        return str(error)
    return ""


def cut(directory: Path, part: bytes) -> None:
    for file in (f for f in directory.rglob("*") if f.is_file() and part in f.read_bytes()):
        file.write_bytes(file.read_bytes()[:100])


def without(step: int) -> Callable[[Any], Any]:
    """`records.read` of a host that cannot read this step's."""
    read = records.read

    def refused(path: Any) -> Any:
        if path.parent.parent.name == str(step):
            raise DamagedError(f"{path} cannot be read")
        return read(path)

    return refused


def in_use(host: int, directory: str) -> None:
    """Another run takes the directory over between two saves."""
    items = {"params": {"w": place(VALUES, P("data"), ("data", 4))}}
    ck = Checkpointer(directory)
    ck.save(1, items)
    ck.wait()
    if host == 0:
        (Path(directory) / owner.FILE).write_text('{"run": "another"}')
    try:
        ck.save(2, items)
    except InUseError:
        print("refused")


def late(host: int, directory: str) -> None:
    """The second host fails in the background, when the first one waits for it."""
    items = {"params": {"w": place(VALUES, P("data"), ("data", 4))}}
    broken = mock.patch.object(storage._Text, "_write", refuse) if host == 1 else nullcontext()
    with Checkpointer(directory) as ck:
        ck.save(1, items)
        ck.wait()
        with broken:
            ck.save(2, items)
            begin = time.monotonic()
            said = failure(ck.wait)
        soon = time.monotonic() - begin < 60
        ck.save(3, items)
    print(soon, "of this host alone" in said, ck.steps())


async def refuse(*_: Any) -> None:
    raise OSError(5, "of this host alone")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4])
