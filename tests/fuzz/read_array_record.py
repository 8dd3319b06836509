"""ArrayRecord files: of texts, and of tokens with the manifest beside them."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np

from maxlib import data
from maxlib.tokenization import train_bpe
from tests.fuzz.run import Target

TEXTS = [f"document {i} of some, é" for i in range(6)]


def make(directory: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(directory / "a.array_record"), "group_size:1")
    for text in TEXTS:
        writer.write(json.dumps({"text": text}).encode())
    writer.close()
    with tempfile.TemporaryDirectory() as folder:
        data.write_tokens(data.in_memory(TEXTS), folder, train_bpe(TEXTS, vocab_size=300))
        for name in ("manifest.json", "tokens-00000.array_record"):
            shutil.copy(Path(folder) / name, directory / name)


def read(directory: Path) -> None:
    texts = data.array_record(directory / "a.array_record", field="text")
    for i in range(min(len(texts), 10)):
        assert (texts[i] or {})["text"] in TEXTS, "another text"
    tokens = data.read_tokens(directory)
    for i in range(min(len(tokens), 10)):
        assert (tokens[i] or {})["tokens"].dtype == np.int32


KINDS = {"a.array_record": "bytes", "tokens-00000.array_record": "bytes", "manifest.json": "json"}
# The reader's threads count as address space.
TARGET = Target(make, read, KINDS, gib=16)
