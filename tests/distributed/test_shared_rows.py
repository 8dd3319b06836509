"""Processes whose devices hold the same rows, or parts of the same rows, of a batch."""

import socket
import subprocess
import sys

import pytest

TWO_PROCESSES = """
import sys
import jax
import numpy as np
from maxlib import sharding, training
from maxlib.training._placement import host_rows

jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize("localhost:" + sys.argv[1], 2, int(sys.argv[2]))
layout = lambda strategy, **degrees: sharding.Layout(sharding.make_mesh(**degrees, tensor=-1), strategy)
tokens = np.arange(24).reshape(4, 6)
for name, at in (
    ("pipeline", layout(sharding.TP | sharding.PP, stage=2)),
    ("context", layout(sharding.TP | sharding.CP_RING, context=2)),
):
    placed = training.shard_batch({"tokens": tokens, "one": np.arange(4), "none": np.int32(3)}, at)
    assert [x.shape for x in jax.tree.leaves(placed)] == [(), (4,), (4, 6)]
    for shard in placed["tokens"].addressable_shards:
        np.testing.assert_array_equal(shard.data, tokens[shard.index])
    np.testing.assert_array_equal(host_rows(placed)["tokens"], tokens)
    print(name, placed["tokens"].addressable_shards[0].data.shape, flush=True)
rows = tokens[2 * jax.process_index() :][:2]
print("rows", training.shard_batch({"tokens": rows}, layout(sharding.TP, data=2))["tokens"].shape, flush=True)
try:
    training.shard_batch({"tokens": tokens + jax.process_index()}, layout(sharding.TP))
except ValueError as error:
    print(error, flush=True)
"""


@pytest.mark.full
def test_processes_that_share_rows_place_the_same_batch():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-c", TWO_PROCESSES, port]
    both = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(2)]
    for process in both:
        said = process.communicate(timeout=300)[0].splitlines()
        pipeline, context, rows, error = (line for line in said if not line.startswith("[Gloo]"))
        assert (pipeline, context, rows) == ("pipeline (4, 6)", "context (4, 3)", "rows (4, 6)")
        assert error.startswith("processes 0 and 1 hold the same rows of a batch") and "loader.follow" in error
