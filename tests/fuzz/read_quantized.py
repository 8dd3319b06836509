"""quantization.json, which says how each weight of a quantized model is stored."""

import json
from pathlib import Path

from maxlib.quantization import _files as files
from maxlib.quantization import _formats as formats
from tests.fuzz.run import Target

FORMATS = {"layers.groups.0.0.attn.q": {"weights": "int8", "activations": None, "gradients": None, "group": None}}
FORMATS |= {"layers.groups.0.0.mlp.up": {"weights": "nf4", "activations": None, "gradients": None, "group": 64}}


def make(directory: Path) -> None:
    layouts = {"layers": [[1, 4]]}
    manifest = {"version": 2, "formats": FORMATS, "dtypes": dict.fromkeys(FORMATS, "bfloat16"), "layouts": layouts}
    (directory / files.MANIFEST).write_text(json.dumps(manifest, indent=2))


def read(directory: Path) -> None:
    manifest = files._read(directory / files.MANIFEST)
    assert all(isinstance(kind, formats.Format) and str(kind) for kind in manifest["formats"].values())


TARGET = Target(make, read, {files.MANIFEST: "json"})
