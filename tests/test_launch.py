"""The files in examples/launch are well formed, and set the variables that `distributed.initialize` reads."""

import argparse
import inspect
import json
import os
import re
import runpy
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import yaml
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding

from maxlib import data, sharding, tokenization, weights
from maxlib.distributed import _initialize as distributed
from maxlib.models import llama
from maxlib.sharding._mesh import MESH_AXES as AXES

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
    assert called[0].endswith("python examples/pretrain.py --out runs/pretrain --batch-size 96 --dim 768 --steps 5")


@pytest.mark.parametrize(("status", "restarts"), [(0, "0"), (137, "5")])
def test_sbatch_ends_when_done_and_in_the_end(tmp_path, status, restarts):
    ended, called = run_sbatch(tmp_path, status, SLURM_RESTART_COUNT=restarts)
    assert ended == status and [line.split()[0] for line in called] == ["srun"]


def test_tasks_of_an_array_have_their_own_directory_and_options(tmp_path):
    (tmp_path / "sweep.txt").write_text("--learning-rate 1e-3\n--learning-rate 2e-3 --layers 2\n")
    variables = {"OUT": "runs/lr", "SLURM_ARRAY_TASK_ID": "2", "SWEEP": str(tmp_path / "sweep.txt")}
    _, (called,) = run_sbatch(tmp_path, 0, **variables)
    assert " --out runs/lr-2 " in called and called.endswith(" --steps 5 --learning-rate 2e-3 --layers 2")


def asked_of_slurm() -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)=?(.*)$", SBATCH.read_text(), re.MULTILINE))


def test_jobset_makes_a_cluster_of_its_pods(job, monkeypatch):
    (worker,) = job["replicatedJobs"]
    pods, spec = worker["template"]["spec"], worker["template"]["spec"]["template"]["spec"]
    assert pods["completionMode"] == "Indexed" and pods["backoffLimit"] == 0 and job["failurePolicy"]["maxRestarts"] > 0
    assert pods["parallelism"] == pods["completions"] and worker["replicas"] == 1
    (container,) = spec["containers"]
    annotations = {"jobset-name": "pretrain", "replicatedjob-name": worker["name"], "job-index": "0"}
    for entry in container["env"]:
        path = entry.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        match = re.fullmatch(r"metadata\.annotations\['jobset\.sigs\.k8s\.io/([a-z-]+)'\]", path)
        monkeypatch.setenv(entry["name"], annotations[match[1]] if match else entry["value"])
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


def test_the_tpu_manifest_asks_for_the_hosts_of_its_topology_and_starts_the_program(monkeypatch):
    (replicated,) = yaml.safe_load((LAUNCH / "tpu.yaml").read_text())["spec"]["replicatedJobs"]
    pods = replicated["template"]["spec"]
    spec = pods["template"]["spec"]
    (container,) = spec["containers"]
    x, y, z = map(int, spec["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = int(container["resources"]["limits"]["google.com/tpu"])
    assert pods["parallelism"] == pods["completions"] == x * y * z // chips
    program = runpy.run_path(str(LAUNCH / "train_preset.py"))
    monkeypatch.setattr("sys.argv", container["command"][1:])
    args = program["arguments"]()
    assert args.preset in weights.presets() and args.checkpoints.startswith("gs://")


def strict(schema: Any) -> Any:
    """A schema of Kubernetes that allows only the fields it names, as `kubectl --validate=strict` does."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: strict(value) for key, value in schema.items()}
    if "x-kubernetes-int-or-string" in schema:
        return {"type": ["integer", "string"]}
    if isinstance(schema.get("properties"), dict) and "x-kubernetes-preserve-unknown-fields" not in schema:
        result["additionalProperties"] = False
    return result


@pytest.mark.full
@pytest.mark.skipif("MAXLIB_JOBSET_CRD" not in os.environ, reason="needs jobset.x-k8s.io_jobsets.yaml of JobSet")
@pytest.mark.parametrize("name", ["jobset.yaml", "tpu.yaml"])
def test_manifests_follow_the_published_schema(name):
    """`MAXLIB_JOBSET_CRD` is config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of kubernetes-sigs/jobset."""
    jsonschema = pytest.importorskip("jsonschema")
    crd = yaml.safe_load(Path(os.environ["MAXLIB_JOBSET_CRD"]).read_text())
    manifest = yaml.safe_load((LAUNCH / name).read_text())
    (version,) = (candidate for candidate in crd["spec"]["versions"] if candidate["served"])
    assert manifest["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}  # every object has it; the file does not describe it
    jsonschema.validate(manifest, schema)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["parallelsim"] = job.pop("parallelism")
    with pytest.raises(jsonschema.ValidationError, match="parallelsim"):
        jsonschema.validate(manifest, schema)


@pytest.mark.full
def test_the_program_for_presets_resumes_from_its_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    documents = data.in_memory([f"{i} cats sat on {i} mats" for i in range(60)])
    tokenizer = tokenization.train_bpe((document["text"] for document in documents), vocab_size=300)
    data.write_tokens(documents, "tokens", tokenizer)
    program = runpy.run_path(str(LAUNCH / "train_preset.py"))["main"]
    for steps in (2, 4):
        options = f"gpt3-52k --tokens tokens --checkpoints ck --length 32 --save-every 2 --steps {steps}"
        monkeypatch.setattr("sys.argv", ["train_preset.py", *options.split()])
        program()
    rows = [json.loads(line) for line in Path("runs/preset/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]


@pytest.fixture
def pretrain():
    return SimpleNamespace(**runpy.run_path(str(LAUNCH.parent / "pretrain.py")))


def parsed(pretrain, command: list[str], monkeypatch) -> argparse.Namespace:
    monkeypatch.setattr("sys.argv", command[command.index("examples/pretrain.py") :])
    return pretrain.arguments()


def check_divides(pretrain, args: argparse.Namespace, devices: int) -> None:
    """Raises ValueError if `pretrain.main` would on this number of devices, from shapes only."""
    sizes = [devices if axis == "fsdp" else 1 for axis in AXES]
    mesh = AbstractMesh(tuple(sizes), AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))
    model = jax.eval_shape(lambda: llama.Llama(pretrain.config(args.vocab, args), rngs=nnx.Rngs(0)))
    layout = sharding.Layout(mesh, sharding.FSDP)
    sharding.shardings(model, layout)
    rows = NamedSharding(mesh, layout.spec("batch", "seq"))
    rows.shard_shape((args.batch_size, args.length))


def test_sbatch_trains_on_each_number_of_nodes(pretrain, tmp_path, monkeypatch):
    fewest, most = map(int, asked_of_slurm()["nodes"].split("-"))
    args = parsed(pretrain, run_sbatch(tmp_path, 0)[1][0].split(), monkeypatch)
    assert (fewest, most) == (1, 4) and args.steps == 5
    for nodes in range(fewest, most + 1):
        check_divides(pretrain, args, nodes * int(asked_of_slurm()["gpus-per-node"]))


def test_jobset_trains_on_each_number_of_nodes(pretrain, job, monkeypatch):
    (container,) = job["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    args = parsed(pretrain, container["command"], monkeypatch)
    for nodes in range(1, 5):
        check_divides(pretrain, args, nodes * container["resources"]["limits"]["nvidia.com/gpu"])


def test_jobset_says_what_crosses_slices(pretrain, job, monkeypatch):
    """The words that it tells to append are words of the example, and mean replicas in the slices."""
    (container,) = job["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    assert parsed(pretrain, container["command"], monkeypatch).layout.mesh.dcn == ()
    words = re.search(r"append (--dcn), (\S+) ", JOBSET.read_text()).groups()
    mesh = parsed(pretrain, [*container["command"], *words], monkeypatch).layout.mesh
    assert dict(mesh.dcn) == {"data": -1} and dict(mesh.degrees) == {"fsdp": -1}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--dim=448", "'embed' .size 448. is not divisible"),
        ("--batch-size=32", "partitioned 24 times, but the dimension size is 32"),
    ],
)
def test_sizes_that_three_nodes_do_not_divide_are_noticed(pretrain, option, message, monkeypatch):
    args = parsed(pretrain, ["examples/pretrain.py", "--batch-size=96", "--dim=768", option], monkeypatch)
    with pytest.raises(ValueError, match=message):
        check_divides(pretrain, args, 24)
