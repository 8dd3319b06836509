"""The headers and the index of safetensors."""

from pathlib import Path

import numpy as np

from maxlib.weights import files
from tests.fuzz.run import Target

DTYPES = (np.float32, np.int8, np.float64)


def make(directory: Path) -> None:
    headers = [files.Header(f"layers.{i}.w", np.dtype(d), (i + 1, 3)) for i, d in enumerate(DTYPES)]
    parts = files.shard(headers, 20)
    for name, part in parts.items():
        files.write_file(directory / name, part, (np.ones(h.shape, h.dtype) for h in part))
    files.write_index(directory, parts)


def read(directory: Path) -> None:
    for stored in files.find_tensors(directory).values():
        assert stored.view().nbytes < 1000


FILES = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
TARGET = Target(make, read, {files.INDEX: "json"} | dict.fromkeys(FILES, "safetensors"))
