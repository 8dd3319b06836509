"""Parquet files of texts, of tokens and of chats."""

from pathlib import Path

from maxlib import data
from tests.fuzz.run import Target

COLUMNS = {
    "text": [f"document {i} of some, é" for i in range(6)],
    "tokens": [[1, 2, i] for i in range(6)],
    "messages": [[{"role": "user", "content": "a"}, {"role": "assistant", "content": str(i)}] for i in range(6)],
}


def make(directory: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    for name, column in COLUMNS.items():
        parquet.write_table(pa.table({name: column}), directory / f"{name}.parquet", row_group_size=3)


def read(directory: Path) -> None:
    (path,) = directory.iterdir()
    documents = data.parquet(path, field=path.stem)
    for i in range(min(len(documents), 10)):
        documents[i]


# pyarrow's threads count as address space.
KINDS = {f"{name}.parquet": "bytes" for name in COLUMNS}
TARGET = Target(make, read, KINDS, alone=True, gib=16, needs="pyarrow")
