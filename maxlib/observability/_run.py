"""Other files of a run's directory, for reports: its configuration and samples."""

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

import maxlib
from maxlib._utils.files import write_atomically
from maxlib.observability._metrics import read_json


def write_config(directory: str | Path, **values: Any) -> None:
    """Adds `values` and a description of the hardware to `directory/config.json`. Values without a JSON type become
    strings.
    """
    path = Path(directory) / "config.json"
    config = read_config(directory) | values | {"environment": _environment()}
    write_atomically(path, json.dumps(config, indent=1, default=str))


def read_config(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    found = read_json(path.read_text(errors="replace")) if path.exists() else {}
    return found if isinstance(found, dict) else {}  # truncated or damaged


def add_sample(directory: str | Path, step: int, text: str, prompt: str = "") -> None:
    """Appends the model's text after `step` steps to `directory/samples.jsonl`."""
    path = Path(directory) / "samples.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")


class Samples:
    """Callback that stores the text that `generate(model)` returns: `callbacks=[(1000, Samples("run", generate))]`."""

    def __init__(self, directory: str | Path, generate: Callable[[Any], str]):
        self._directory, self._generate = directory, generate

    def __call__(self, trainer: Any) -> None:
        text = self._generate(trainer.model)
        if jax.process_index() == 0:
            add_sample(self._directory, trainer.step, text)


def _environment() -> dict[str, Any]:
    kind = jax.devices()[0]
    return {
        "devices": f"{jax.device_count()} x {kind.device_kind} ({kind.platform})",
        "hosts": jax.process_count(),
        "maxlib": maxlib.__version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
    }
