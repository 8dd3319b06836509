"""config.json of every family."""

import itertools
import json
from pathlib import Path

from maxlib import weights
from maxlib.weights import _family
from tests.fuzz.run import Target


def presets() -> dict[str, dict]:
    """Two published configurations of each family, by a file's name."""
    some = ((f, name, cfg) for f in weights.families() for name, cfg in itertools.islice(f.presets.items(), 2))
    return {
        f"{family.name}-{name.replace('/', '-')}/config.json": family.fields.write(cfg) for family, name, cfg in some
    }


def make(directory: Path) -> None:
    for name, config in presets().items():
        (directory / name).parent.mkdir(parents=True)
        (directory / name).write_text(json.dumps(config))


TARGET = Target(make, _family.read_model, dict.fromkeys(presets(), "json"), alone=True)
