"""Writers for trackers: Weights & Biases, trackio, MLflow and TensorBoard. Each package is an extra."""

import importlib
import importlib.util
import json
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlib._utils.files import read_json, write_atomically
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
