"""Checkpoints in buckets: gs:// and s3:// through tensorstore and etils, against emulators of the services."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# A child that hangs says where, and ends; it must not outlive a test that was ended.
HANG = "import faulthandler; faulthandler.dump_traceback_later(240, exit=True)\n"
BUCKET = """
import logging, sys
import numpy as np
from etils import epath
from maxlib import checkpoint
from maxlib.checkpoint import Best, Checkpointer, InUseError, Tiers

logging.getLogger("gcsfs").setLevel(logging.ERROR)
root = epath.Path(sys.argv[3])
noise = np.random.default_rng(0).normal(size=5000).astype(np.float32)
of = lambda step: {"params": {"w": noise + np.float32(step)}}
with Checkpointer(root, every=1, keep=2, best=Best("loss")) as ck:
    for step in (1, 2, 3, 4):
        ck.save(step, of(step), data={"0": {"n": step}}, metrics={"loss": step})
    ck.wait()
    assert ck.steps() == [1, 3, 4] and ck.verify(4) == [], ck.steps()

raw = next(p for p in (root / "4" / "params" / "ocdbt.process_0" / "d").iterdir() if of(4)["params"]["w"].tobytes() in p.read_bytes())
body = bytearray(raw.read_bytes())
body[body.find(of(4)["params"]["w"].tobytes()) + 50] ^= 1
raw.write_bytes(bytes(body))
(root / "5" / "params").mkdir(parents=True)  # a save that was killed: no commit_success.txt
with Checkpointer(root, keep=2) as ck:
    got = ck.restore(like=of(0))
    assert got["meta"]["step"] == 3 and got["data"] == {"0": {"n": 3}}, got["meta"]
    np.testing.assert_array_equal(got["params"]["w"], of(3)["params"]["w"])
    ck.save(4, of(4))
    ck.wait()
    assert ck.steps() == [3, 4] and (root / "4.damaged").exists(), ck.steps()

near = sys.argv[2] + "/near"
with Tiers(Checkpointer(near, every=1, keep=1), Checkpointer(root, every=2)) as ck:
    assert ck.restore()["meta"]["step"] == 4
    for step in (5, 6, 7):
        assert ck.should_save(step)
        ck.save(step, of(step))
assert checkpoint.load(near)["meta"]["step"] == 7 and checkpoint.load(sys.argv[3])["meta"]["step"] == 6

import json
from maxlib.checkpoint import _lock as owner
ck = Checkpointer(root)
(root / owner.FILE).write_text(json.dumps({"run": "another", "pid": 1, "host": "there", "since": "now"}))
try:
    ck.save(8, of(8))
except InUseError as error:
    print("refused:", error)
print("done", flush=True)
"""


WEIGHTS = """
import sys
from pathlib import Path
import jax, numpy as np, optax
import fsspec, maxlib
from flax import nnx
from maxlib import adapters, nn, ops, quantization, training
from maxlib.weights import buckets
from tests.nn.tiny import filled_llama

root = sys.argv[-1]
model = filled_llama(rope=ops.Rope(12, theta=10_000.0, max_length=64))
same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))

maxlib.save_pretrained(model, f"{root}/model", max_shard_bytes=4000)  # several files and an index
assert same(maxlib.from_pretrained(f"{root}/model"), model)
copies = lambda: sorted(p.name for p in (Path(sys.argv[-2]) / "cache" / "buckets").iterdir() if p.is_dir())
assert len(copies()) == 1 and same(maxlib.from_pretrained(f"{root}/model/"), model)
assert len(copies()) <= 2

try:
    maxlib.save_pretrained(model, f"{root}/model")
    raise AssertionError("replaced in silence")
except FileExistsError as error:
    assert "overwrite=True" in str(error), error
changed = nn.combine({k: v + 1 for k, v in nn.partition(model, nn.tree.is_trainable)[0].items()}, nn.partition(model, nn.tree.is_trainable)[1])
maxlib.save_pretrained(changed, f"{root}/model", overwrite=True)  # one file, no index: the old ones go
assert same(maxlib.from_pretrained(f"{root}/model"), changed)

fs, path = fsspec.url_to_fs(f"{root}/model")
fs.invalidate_cache()
names = sorted(p.rsplit("/", 1)[1] for p in fs.ls(path, detail=False))
assert names == ["config.json", "model.safetensors"], names
fs.pipe_file(f"{path}/notes.txt", b"mine")
try:
    maxlib.save_pretrained(model, f"{root}/model", overwrite=True)
    raise AssertionError("notes lost")
except FileExistsError as error:
    assert "notes.txt" in str(error), error
fs.rm_file(f"{path}/notes.txt")
fs.rm_file(f"{path}/config.json")  # an export that a kill has cut short
try:
    maxlib.from_pretrained(f"{root}/model")
    raise AssertionError("half a model")
except FileNotFoundError as error:
    assert "config.json" in str(error), error
try:
    maxlib.from_pretrained(f"{root}/nothing")
    raise AssertionError("a model from nothing")
except FileNotFoundError as error:
    assert "nothing" in str(error), error

adapted = adapters.add(model, adapters.LoRA(2, 4), rngs=nnx.Rngs(0))
adapters.save(adapted, f"{root}/lora")
assert same(adapters.load(model, f"{root}/lora"), adapted)
int8 = quantization.for_inference(model, "int8")
quantization.save(int8, f"{root}/int8")
assert same(quantization.load(f"{root}/int8"), int8)

state = training.make_state(model, optax.sgd(0.1))
export = training.HuggingFaceExport(f"{root}/exports", every=1, keep=2)
for step in (1, 2, 3):
    export.save(step, state)
export.wait()
assert [export.has(step) for step in (1, 2, 3, 4)] == [False, True, True, False]
assert sorted(buckets.children(f"{root}/exports")) == ["2", "3"]
assert same(maxlib.from_pretrained(f"{root}/exports/3"), model)
print("weights done", flush=True)
"""


LEARN = """
import sys
import numpy as np
from maxlib.checkpoint import Checkpointer

of = lambda step: {"params": {"w": np.arange(20_000, dtype=np.float32) + step}}
with Checkpointer(sys.argv[-1], keep=2) as ck:
    for step in (1, 2, 3):
        ck.save(step, of(step))
    ck.wait()
    assert ck.steps() == [2, 3] and ck.verify(3) == []
    np.testing.assert_array_equal(ck.restore(like=of(0))["params"]["w"], of(3)["params"]["w"])
"""

TWO_HOSTS = """
import sys
from tests.checkpoint.test_hosts import both

both(sys.argv[-1], "save")
data = {"0": {"n": "xxx"}, "1": {"n": "xxxxxxxx"}}
said = both(sys.argv[-1], "restore")
assert said == [f"2 {sorted(data.items())}"] * 2, said
"""

# Threads of clients and of the emulator would keep the process alive.
END = "import os; os._exit(0)\n"
GS = """
import sys
from tests.checkpoint import gs_emulator
faults = gs_emulator.start(int(sys.argv[1]))
"""
# No object may hold a credential.
READ_ALL = """
import fsspec
fs = fsspec.filesystem(sys.argv[-1].partition(":")[0])
fs.invalidate_cache()
assert (names := fs.find("bucket")) and not any(secret in fs.cat_file(name) for name in names for secret in {secrets})
"""
MAKE = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')\n"
KEYS = {"AWS_ACCESS_KEY_ID": "SENTINELIDENTITY", "AWS_SECRET_ACCESS_KEY": "SENTINELSECRET"}


def run(script: str, secrets: list[str], directory: Path, environment: dict[str, str], *arguments: str) -> list[str]:
    """Runs a script in a process of its own and returns the lines that it prints."""
    environment = os.environ | {"MAXLIB_CACHE": str(directory / "cache"), "PYTHONPATH": os.getcwd()} | environment
    command = [sys.executable, "-c", HANG + script + END, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    assert not any(secret in done.stdout + done.stderr for secret in secrets)
    cached = [path for path in (directory / "cache").rglob("*") if path.is_file()]
    assert not any(secret.encode() in path.read_bytes() for path in cached for secret in secrets)
    return done.stdout.splitlines()


def run_on_gs(directory: Path, script: str, fault: str | None, every: int) -> tuple[list[str], int]:
    """Runs a script beside an emulator in its process; returns the lines that it prints, and the number of faults."""
    from tests.checkpoint import gs_emulator

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    faults = {} if fault is None else {gs_emulator.FAULT: fault, gs_emulator.EVERY: str(every)}
    read_all = READ_ALL.format(secrets=[gs_emulator.TOKEN.encode()]) + "print(faults.made, flush=True)\n"
    arguments = str(port), str(directory), "gs://bucket/run"
    environment = gs_emulator.clients(port) | faults
    *lines, made = run(GS + script + read_all, [gs_emulator.TOKEN], directory, environment, *arguments)
    return lines, int(made)


def run_on_s3(directory: Path, script: str, fault: str | None, every: int) -> tuple[list[str], int]:
    """The same beside an emulator of S3 in this process."""
    from tests.checkpoint.s3_emulator import emulate

    # The server keeps its buckets from test to test.
    secrets, arguments = [*KEYS.values()], ("", str(directory), f"s3://bucket/{directory.name}")
    region = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
    with emulate(directory) as (environment, faults):
        environment |= region | KEYS | {"EPATH_USE_TF": "false"}
        run(MAKE, secrets, directory, environment)
        if fault is not None:
            setattr(faults, fault, every)
        lines = run(script, secrets, directory, environment, *arguments)
        faults.throttled = faults.dropped = 0
        run(
            "import sys" + READ_ALL.format(secrets=[s.encode() for s in secrets]),
            secrets,
            directory,
            environment,
            *arguments,
        )
    return lines, faults.made


@pytest.fixture(params=["gs", "s3"])
def bucket(request, tmp_path):
    """A function that runs a script with a bucket, of whose requests every n-th may fail."""
    for name in {"gs": ("gcsfs", "gcp_storage_emulator"), "s3": ("s3fs", "moto.server")}[request.param]:
        pytest.importorskip(name)
    store = {"gs": run_on_gs, "s3": run_on_s3}[request.param]

    def run_script(script: str, fault: str | None = None, every: int = 9) -> list[str]:
        lines, made = store(tmp_path, script, fault, every)
        assert made >= 5 if fault else made == 0
        return lines

    return run_script


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("script", "says"), [(BUCKET, "done"), (WEIGHTS, "weights done")])
def test_a_bucket(bucket, script, says):
    lines = bucket(script)
    assert lines[-1] == says
    assert script is WEIGHTS or any("process 1 on there" in line for line in lines)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("fault", ["throttled", "dropped"])
@pytest.mark.parametrize("script", [LEARN, WEIGHTS], ids=["checkpoints", "weights"])
def test_a_busy_bucket_is_asked_again(bucket, script, fault):
    """Checkpoints and weights, while many requests fail."""
    bucket(script, fault, every=7 if script is LEARN else 9)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [None, "throttled"])
def test_two_hosts(bucket, fault):
    """Both hosts write their part of each array, and both restore all of it, bit for bit."""
    bucket(TWO_HOSTS, fault)


def test_an_orbax_built_another_way_is_named(monkeypatch):
    from orbax.checkpoint._src.path import gcs_utils

    from maxlib.checkpoint import _s3

    monkeypatch.delattr(gcs_utils, "get_kvstore_for_gcs")
    with pytest.raises(RuntimeError, match=r"gcs_utils: get_kvstore_for_gcs; this is .* mounted bucket"):
        _s3.enable.__wrapped__()
