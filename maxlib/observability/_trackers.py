"""Writers for trackers, Weights & Biases, trackio, MLflow and TensorBoard, each of which is an extra; and for
Prometheus, with the health of a run, over HTTP.
"""

import http.server
import importlib
import importlib.util
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlib._utils.files import read_json, write_atomically
from maxlib.observability._goodput import GoodputRecorder
from maxlib.observability._metrics import Values


class _Tracker:
    """Base class of trackers: only the first process writes, and a resumed run continues under the same id.

    Args:
        directory: The run's directory, where the id is stored; None only keeps it in this object.
        config: Settings to show with the run.
    """

    name = ""

    def __init__(self, directory: str | Path | None, config: Mapping[str, Any] | None):
        self._file = None if directory is None else Path(directory) / f"{self.name}.json"
        self._config = {key: _plain(value) for key, value in (config or {}).items()}
        self._run: Any = None
        self._run_id: str | None = None
        if self.name not in sys.modules and importlib.util.find_spec(self.name) is None:  # now, not after a step
            raise ImportError(f"{self.name} must be installed to log there: pip install {self.name}")

    def resume(self, step: int) -> None:
        """Does nothing: trackers keep what was logged."""

    def write(self, step: int, values: Values) -> None:
        if jax.process_index() > 0 or not values:
            return
        if self._run is None:
            self._run = self._start(importlib.import_module(self.name), self._id())
        self._log(step, numbers(values))

    def close(self) -> None:
        if self._run is not None:
            self._finish()
        self._run = None

    def _id(self) -> str | None:
        """Returns the id of the run that this object or its directory belongs to; None for a new one."""
        record = read_json(self._file.read_text()) if self._file is not None and self._file.exists() else None
        return record.get("id") if isinstance(record, dict) else self._run_id

    def _keep(self, run_id: str) -> None:
        self._run_id = run_id
        if self._file is not None:
            write_atomically(self._file, json.dumps({"id": run_id}))

    def _start(self, package: Any, run_id: str | None) -> Any: ...

    def _log(self, step: int, numbers: dict[str, float]) -> None: ...

    def _finish(self) -> None: ...


class WandB(_Tracker):
    """Writer for Weights & Biases: `trainer.writers.append(observability.WandB("project", directory="run"))`.

    Needs the extra `wandb`. With `mode="offline"` everything stays on disk, and `wandb sync` uploads it later.

    Args:
        project: The project.
        directory: The run's directory. A run that is resumed from it goes on in the same chart.
        config: Settings to show with the run.
        **options: Arguments of `wandb.init`, such as `name`, `entity` or `mode`.
    """

    name = "wandb"

    def __init__(
        self,
        project: str,
        *,
        directory: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        super().__init__(directory, config)
        self._options = {"project": project, "dir": directory} | options

    def _start(self, package: Any, run_id: str | None) -> Any:
        run_id = run_id or str(self._options.get("id") or uuid.uuid4().hex[:8])
        self._keep(run_id)
        return package.init(**{"resume": "allow", "config": self._config, **self._options, "id": run_id})

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(numbers, step=step)

    def _finish(self) -> None:
        self._run.finish()


class Trackio(WandB):
    """Writer for trackio, Hugging Face's local tracker: `trainer.writers.append(observability.Trackio("project"))`.

    Needs the extra `trackio`. `trackio show` opens the dashboard.

    Args:
        project: The project.
        directory: The run's directory. A run that is resumed from it goes on in the same chart.
        config: Settings to show with the run.
        **options: Arguments of `trackio.init`, such as `space_id`.
    """

    name = "trackio"

    def _start(self, package: Any, run_id: str | None) -> Any:
        name = run_id or self._options.get("name") or f"run-{uuid.uuid4().hex[:8]}"
        self._keep(name)  # trackio knows runs by name
        settings = {key: value for key, value in self._options.items() if key != "dir"}
        return package.init(**{"resume": "allow", "config": self._config, **settings, "name": name})


class MLflow(_Tracker):
    """Writer for MLflow: `trainer.writers.append(observability.MLflow("experiment", uri="http://host:5000"))`.

    Needs the extra `mlflow`.

    Args:
        experiment: The experiment, created if it does not exist.
        uri: Address of the server, or a folder; by default MLflow's own choice (`MLFLOW_TRACKING_URI`).
        directory: The run's directory. A run that is resumed from it goes on in the same chart.
        config: Settings to show with the run, as parameters.
        name: Name of the run.
    """

    name = "mlflow"

    def __init__(
        self,
        experiment: str,
        *,
        uri: str | None = None,
        directory: str | Path | None = None,
        config: Mapping[str, Any] | None = None,
        name: str | None = None,
    ):
        super().__init__(directory, config)
        self._experiment, self._uri, self._run_name = experiment, uri, name

    def _start(self, package: Any, run_id: str | None) -> Any:
        self._client = package.MlflowClient(tracking_uri=self._uri)
        if run_id is None:
            experiment = self._client.get_experiment_by_name(self._experiment)
            number = experiment.experiment_id if experiment else self._client.create_experiment(self._experiment)
            run_id = str(self._client.create_run(number, run_name=self._run_name).info.run_id)
            for key, value in self._config.items():
                self._client.log_param(run_id, key, value)
            self._keep(run_id)
        return run_id

    def _log(self, step: int, numbers: dict[str, float]) -> None:
        for name, value in numbers.items():
            self._client.log_metric(self._run, name, value, step=step)

    def _finish(self) -> None:
        self._client.set_terminated(self._run)


class TensorBoard:
    """Writer of scalars for TensorBoard: `trainer.writers.append(observability.TensorBoard("run/tensorboard"))`.

    Needs the extra `tensorboard`. Only the first process writes. What a resumed run does again replaces what was there.

    Args:
        directory: The directory that TensorBoard reads.

    Raises:
        ImportError: without the package tensorboardX.
    """

    def __init__(self, directory: str | Path):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError('TensorBoard needs tensorboardX: pip install "maxlib[tensorboard]"') from error
        self._make, self._writer = SummaryWriter, None
        self._directory = str(directory)

    def resume(self, step: int) -> None:
        self.close()
        if jax.process_index() == 0:
            self._writer = self._make(self._directory, purge_step=step + 1)

    def write(self, step: int, values: Values) -> None:
        if jax.process_index() > 0:
            return
        if self._writer is None:
            self._writer = self._make(self._directory)
        for name, number in numbers(values).items():
            self._writer.add_scalar(name, number, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def numbers(values: Values) -> dict[str, float]:
    """Returns scalars unchanged, and the mean, minimum and maximum of arrays, such as one number per layer."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        array = np.asarray(value, np.float64)
        if array.ndim == 0:
            numbers[name] = float(array)
        elif array.size:
            numbers[f"{name}/mean"] = float(array.mean())
            numbers[f"{name}/min"] = float(array.min())
            numbers[f"{name}/max"] = float(array.max())
    return numbers


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


class Prometheus:
    """Writer that serves `/metrics` for Prometheus and `/healthz` for probes of Kubernetes and load balancers.

        writer = Prometheus(0)  # a free port; in training, trainer.writers.append(writer)
        writer.write(3, {"loss": 2.5})
        writer.close()

    `/metrics` has the newest value of each metric as a gauge, `maxlib_loss`, `maxlib_grad_norm`, ..., with the mean,
    minimum and maximum of arrays; the step; the time of the newest step; and, with a recorder, the seconds by what they
    were spent on. `/healthz` answers 200, or 503 after `stalled` seconds without metrics, with a JSON object in both
    cases. Every process serves its own: give processes on one host different ports. It serves from its creation on,
    so that a probe also sees a run that hangs before its first step, until `close`; the next `resume` or `write`
    serves again.

    Args:
        port: Port to listen on; 0 takes a free one.
        host: Address to listen on; "" for all interfaces.
        stalled: Seconds without metrics after which the run is unhealthy; must exceed start-up with compilation, the
            longest evaluation and the longest save. None for always healthy.
        recorder: The run's recorder of goodput, `trainer.clock`.

    Attributes:
        port: The port it listens on.

    Raises:
        OSError: When the port is in use.
    """

    def __init__(
        self, port: int, *, host: str = "", stalled: float | None = 1800.0, recorder: GoodputRecorder | None = None
    ):
        self.port, self._host, self._stalled, self._recorder = port, host, stalled, recorder
        self._server: http.server.ThreadingHTTPServer | None = None
        self._lock, self._values = threading.Lock(), {}
        self._step, self._time, self._alive = 0, 0.0, time.monotonic()
        self._serve()

    def resume(self, step: int) -> None:
        """Sets the step from which training continues."""
        self._serve()
        self._step, self._alive = step, time.monotonic()

    def write(self, step: int, values: Values) -> None:
        """Replaces the values of these metrics."""
        self._serve()
        with self._lock:
            self._values |= numbers(values)
        self._step, self._time, self._alive = step, time.time(), time.monotonic()

    def close(self) -> None:
        """Stops serving, so that an ended run is not taken for a running one."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    def text(self) -> str:
        """Returns the metrics in Prometheus' text format (version 0.0.4)."""
        return "".join(f"{line}\n" for line in self._lines())

    def health(self) -> tuple[bool, dict[str, Any]]:
        """Returns whether the run is healthy, with its step and the seconds since its newest metrics."""
        silent = time.monotonic() - self._alive
        healthy = self._stalled is None or silent <= self._stalled
        return healthy, {"healthy": healthy, "step": self._step, "seconds_without_metrics": round(silent, 1)}

    def _lines(self) -> Iterator[str]:
        with self._lock:
            values = dict(self._values)
        values |= {"step": self._step, "step_timestamp_seconds": self._time}
        gauges = {_name(name): value for name, value in values.items()}  # "a/b" and "a_b" would be one name twice
        for name, value in gauges.items():
            yield f"# TYPE {name} gauge"
            yield f"{name} {_number(value)}"
        if self._recorder is not None:
            name = "maxlib_spent_seconds_total"
            yield f"# HELP {name} Seconds of this process, by what they were spent on."
            yield f"# TYPE {name} counter"
            for span, seconds in dict(self._recorder.seconds).items():
                yield f'{name}{{span="{span}"}} {_number(seconds)}'

    def _serve(self) -> None:
        if self._server is not None:
            return
        server = http.server.ThreadingHTTPServer((self._host, self.port), _handler(self))
        server.daemon_threads = True
        self._server, self.port = server, server.server_port
        threading.Thread(target=server.serve_forever, name="maxlib-prometheus", daemon=True).start()


def _handler(metrics: Prometheus) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10.0

        def do_GET(self) -> None:
            match self.path.partition("?")[0]:
                case "/metrics":
                    self._answer(200, "text/plain; version=0.0.4; charset=utf-8", metrics.text())
                case "/healthz":
                    healthy, status = metrics.health()
                    self._answer(200 if healthy else 503, "application/json", json.dumps(status) + "\n")
                case _:
                    self.send_error(404, "there are /metrics and /healthz")

        def _answer(self, status: int, kind: str, text: str) -> None:
            content = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Prints nothing."""

    return Handler


def _name(name: str) -> str:
    return "maxlib_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def _number(value: float) -> str:
    return {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}.get(text := repr(float(value)), text)
