"""A bucket instead of a disk: gs:// and s3:// through tensorstore and etils, against emulators of the services."""

import os
import socket
import subprocess
import sys

import pytest

# What the emulator lacks of the service: the generation that comes with a download, and moving an object.
EMULATOR = r"""
import logging, sys
import numpy as np
from gcp_storage_emulator.handlers import objects

def download(request, response, storage, *, send=objects.download):
    if found := storage.objects.get(request.params["bucket_name"], {}).get(request.params["object_id"]):
        response["x-goog-generation"] = found["generation"]
    send(request, response, storage)

def move(request, response, storage, **options):
    request.params["dest_bucket_name"] = request.params["bucket_name"]
    objects.copy(request, response, storage)
    objects._delete(storage, request.params["bucket_name"], request.params["object_id"])

objects.download = download
from gcp_storage_emulator import server
MOVE = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<dest_object_id>.+)$"
server.HANDLERS = ((MOVE, {server.POST: move}), *server.HANDLERS)
server.create_server("localhost", int(sys.argv[1]), in_memory=True, default_bucket="bucket").start()
"""

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
import os; os._exit(0)
"""


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_bucket(tmp_path):
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    place = {
        "STORAGE_EMULATOR_HOST": f"http://localhost:{port}",
        "TENSORSTORE_GCS_HTTP_URL": f"http://localhost:{port}",
    }
    environment = os.environ | place | {"GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "EPATH_USE_TF": "false"}
    command = [sys.executable, "-c", EMULATOR + BUCKET, port, str(tmp_path), "gs://bucket/run"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-5000:]
    assert done.stdout.splitlines()[-1] == "done" and "process 1 on there" in done.stdout


MAKE = "import boto3; boto3.client('s3').create_bucket(Bucket='bucket')\n"
LEARN = """
import sys
import numpy as np
from maxlib.checkpoint import Checkpointer

of = lambda step: {"params": {"w": np.arange(20_000, dtype=np.float32) + step}}
with Checkpointer(sys.argv[1], keep=2) as ck:
    for step in (1, 2, 3):
        ck.save(step, of(step))
    ck.wait()
    assert ck.steps() == [2, 3] and ck.verify(3) == []
    np.testing.assert_array_equal(ck.restore(like=of(0))["params"]["w"], of(3)["params"]["w"])
"""
KEYS = {"AWS_ACCESS_KEY_ID": "SENTINELIDENTITY", "AWS_SECRET_ACCESS_KEY": "SENTINELSECRET"}


@pytest.fixture
def s3(tmp_path):
    """A function that runs a script against the emulator, and the emulator's faults."""
    for name in ("s3fs", "moto.server"):
        pytest.importorskip(name)
    from tests.checkpoint.s3_emulator import emulate

    with emulate(tmp_path) as (environment, faults):
        own = {"AWS_REGION": "us-east-1", "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        environment = os.environ | environment | own | KEYS | {"EPATH_USE_TF": "false"}

        def run(script: str, *arguments: str) -> str:
            command = [sys.executable, "-c", script, *arguments]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stderr[-5000:]
            assert not any(key in done.stdout + done.stderr for key in KEYS.values())
            return done.stdout

        yield run, faults


@pytest.mark.full
@pytest.mark.timeout(600)
def test_an_s3_bucket(s3, tmp_path):
    run, _ = s3
    out = run(MAKE + BUCKET, "", str(tmp_path), "s3://bucket/run")
    assert out.splitlines()[-1] == "done" and "process 1 on there" in out
    run(READ_ALL, *KEYS.values())


# No file of any checkpoint may hold a credential.
READ_ALL = """
import boto3, sys
s3 = boto3.client("s3")
names = [found["Key"] for found in s3.list_objects_v2(Bucket="bucket")["Contents"]]
assert len(names) > 20, names
for name in names:
    body = s3.get_object(Bucket="bucket", Key=name)["Body"].read()
    assert not any(key.encode() in body for key in sys.argv[1:]), name
"""


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["throttled", "dropped"])
def test_a_busy_s3_bucket_is_asked_again(s3, fault):
    run, faults = s3
    run(MAKE)
    setattr(faults, fault, 7)
    run(LEARN, f"s3://bucket/{fault}")
    assert faults.made >= 5


def test_an_orbax_built_another_way_is_named(monkeypatch):
    from orbax.checkpoint._src.path import gcs_utils

    from maxlib.checkpoint import _s3

    monkeypatch.delattr(gcs_utils, "get_kvstore_for_gcs")
    with pytest.raises(RuntimeError, match=r"gcs_utils: get_kvstore_for_gcs; this is .* mounted bucket"):
        _s3.enable.__wrapped__()
