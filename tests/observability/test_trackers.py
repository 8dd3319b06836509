"""Trackers with their real packages, offline: logged values are on disk, under the same id after a restart."""

import json
import sqlite3
import sys

import numpy as np
import pytest

from maxlib import observability


def log(make, steps):
    """One process of a run: it starts, logs and ends."""
    tracker = make()
    tracker.resume(steps[0] - 1)
    for step in steps:
        tracker.write(step, {"loss": np.float32(10 / step), "load": np.array([0.25, 0.75])})
    tracker.close()
    return tracker


class Package:
    """A fake tracker package that records its calls."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        self.runs.append(options)
        return self

    def log(self, values, step):
        pass

    def finish(self):
        pass


@pytest.mark.parametrize(("kind", "key"), [("WandB", "id"), ("Trackio", "name")])
def test_a_tracker_stays_with_its_run(monkeypatch, kind, key):
    """Also without a directory, and under an id of the user's."""
    package = Package()
    monkeypatch.setitem(sys.modules, kind.lower(), package)
    tracker = getattr(observability, kind)("p")
    renewed = getattr(observability, kind)("p", **{key: "mine", "resume": "must"})
    for writer in (tracker, tracker, renewed, renewed):
        writer.write(1, {"loss": 1.0})
        writer.close()
    ids = [run[key] for run in package.runs]
    assert ids[0] == ids[1] and ids[2:] == ["mine", "mine"] and package.runs[2]["resume"] == "must"


def test_a_missing_package_says_what_to_install(monkeypatch):
    """Before the first step, which may be hours of waiting away."""
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="wandb must be installed to log there: pip install wandb"):
        observability.WandB("p")


def test_only_the_first_process_writes(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    monkeypatch.setitem(sys.modules, "wandb", Package())
    tracker = observability.WandB("p")
    tracker.write(1, {"loss": 1.0})
    tracker.close()
    assert tracker._run is None


def test_wandb_offline(tmp_path):
    pytest.importorskip("wandb")
    make = lambda: observability.WandB(
        "p", directory=tmp_path, config={"dim": 64}, mode="offline", settings={"silent": True}
    )
    log(make, [1, 2])
    log(make, [3])
    files = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    run_id = json.loads((tmp_path / "wandb.json").read_text())["id"]
    assert len(files) == 2 and {file.stem for file in files} == {f"run-{run_id}"}
    assert all(b"loss" in file.read_bytes() and b"load/max" in file.read_bytes() for file in files)


def test_trackio_local(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    make = lambda: observability.Trackio("p", directory=tmp_path, config={"dim": 64})
    log(make, [1, 2])
    log(make, [3])
    (file,) = (tmp_path / "trackio").glob("p*.db")
    with sqlite3.connect(file) as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    assert [step for _, step, _ in rows] == [1, 2, 3] and len({name for name, *_ in rows}) == 1
    assert json.loads(rows[1][2])["loss"] == 5.0 and json.loads(rows[1][2])["load/mean"] == 0.5


def test_mlflow_in_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow asks for a database otherwise
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "store").as_uri()
    make = lambda: observability.MLflow("e", uri=uri, directory=tmp_path, config={"dim": 64})
    log(make, [1, 2])
    tracker = log(make, [3])
    client = mlflow.MlflowClient(tracking_uri=uri)
    run_id = json.loads((tmp_path / "mlflow.json").read_text())["id"]
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "load/max")] == [(s, 0.75) for s in (1, 2, 3)]
    assert client.get_run(run_id).data.params == {"dim": "64"} and tracker._run is None
