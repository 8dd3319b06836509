"""What the processes of a run do together besides computing."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextmanager
def first_process_first(what: str) -> Iterator[None]:
    """The first process runs the body before the others do, who find on disk what it made there: `what`, by name."""
    if jax.process_index() != 0:
        multihost_utils.sync_global_devices(what)
    yield
    if jax.process_index() == 0 and jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def of_all_processes(value: Any) -> list[Any]:
    """Everybody's `value`, of JSON's types, in the order of the processes; all of them have to call it."""
    if jax.process_count() == 1:
        return [value]
    mine = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.array(mine.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: mine.size] = mine
    everyone = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(row[: int(size)].tobytes()) for row, size in zip(everyone, np.ravel(sizes), strict=True)]
