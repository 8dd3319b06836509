"""The files in examples/launch are well formed, and what they set is what `sharding.initialize` reads."""

import inspect
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from maxlib.sharding import distributed

LAUNCH = Path(__file__).parents[1] / "examples" / "launch"
SBATCH, JOBSET = LAUNCH / "pretrain.sbatch", LAUNCH / "jobset.yaml"


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in list(os.environ):
        if re.match("SLURM_|JOB|JAX_COORD|JAX_NUM_PROC|JAX_PROCESS|NNODES|REPLICATED|TPU_|KUBERNETES_", name):
            monkeypatch.delenv(name)


@pytest.fixture
def job():
    return yaml.safe_load(JOBSET.read_text())["spec"]


def run_sbatch(tmp_path: Path, status: int, **environment: str) -> tuple[int, list[str]]:
    """The script with programs in place of SLURM's, which write down how they were called."""
    called = tmp_path / "called"
    for name, code in (("srun", status), ("scontrol", 0)):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "{name} $*" >> {called}\nexit {code}\n')
        (tmp_path / name).chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"} | environment
    done = subprocess.run(["bash", str(SBATCH), "--steps", "5"], env=env, capture_output=True, timeout=60)
    return done.returncode, called.read_text().splitlines()


def test_sbatch_starts_the_example_and_requeues_what_fails(tmp_path):
    assert subprocess.run(["bash", "-n", str(SBATCH)]).returncode == 0
    status, called = run_sbatch(tmp_path, 137, SLURM_RESTART_COUNT="4")
    assert status == 137 and called[1] == "scontrol requeue 7"
    assert called[0].endswith("python examples/pretrain.py --out runs/pretrain --steps 5")


@pytest.mark.parametrize(("status", "restarts"), [(0, "0"), (137, "5")])
def test_sbatch_ends_when_done_and_in_the_end(tmp_path, status, restarts):
    ended, called = run_sbatch(tmp_path, status, SLURM_RESTART_COUNT=restarts)
    assert ended == status and [line.split()[0] for line in called] == ["srun"]


def test_sbatch_asks_for_one_process_a_node():
    """And for all the node's GPUs, which `initialize` then gives it."""
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", SBATCH.read_text(), re.MULTILINE))
    assert asked["ntasks-per-node"] == "1" and asked["signal"].startswith("TERM@") and "requeue" in asked


def test_jobset_makes_a_cluster_of_its_pods(job, monkeypatch):
    (worker,) = job["replicatedJobs"]
    pods, spec = worker["template"]["spec"], worker["template"]["spec"]["template"]["spec"]
    assert pods["completionMode"] == "Indexed" and pods["backoffLimit"] == 0 and job["failurePolicy"]["maxRestarts"] > 0
    assert pods["parallelism"] == pods["completions"] and worker["replicas"] == 1
    (container,) = spec["containers"]
    annotations = {"jobset-name": "pretrain", "replicatedjob-name": worker["name"], "job-index": "0"}
    for entry in container["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        found = re.fullmatch(r"metadata\.annotations\['jobset\.sigs\.k8s\.io/([a-z-]+)'\]", path)
        monkeypatch.setenv(entry["name"], annotations[found[1]] if found else entry["value"])
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "2")  # Kubernetes sets it for indexed jobs
    cluster = distributed.find()
    assert cluster is not None
    assert (cluster.num_processes, cluster.process_id) == (pods["completions"], 2)
    name, port = cluster.coordinator.split(":")
    assert name == "pretrain-worker-0-0.pretrain"
    assert [int(port)] == [each["containerPort"] for each in container["ports"]]


def test_everything_set_is_read(job):
    env = job["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    unread = [entry["name"] for entry in env if f'"{entry["name"]}"' not in inspect.getsource(distributed)]
    assert unread == []


def test_the_programs_that_are_started_exist(job):
    command = job["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]["command"]
    for program in (command[1], re.search(r"python (\S+)", SBATCH.read_text())[1]):
        assert (LAUNCH.parents[1] / program).exists()
