"""What only Kimi delta attention has: one decay for a head, gradients on plain XLA, its FLOPs and errors."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlib import ops
from maxlib.observability import forward_flops
from tests.ops.recurrences import KDA, B, close

N, HK, HV = 3, 8, 6


def test_a_decay_for_each_head_is_the_gated_delta_rule():
    x = KDA.inputs()
    x["log_decay"] = np.broadcast_to(x["log_decay"][..., :1], x["log_decay"].shape)
    want = jax.jit(ops.gated_delta_rule)(**x | {"log_decay": x["log_decay"][..., 0]}, initial_state=KDA.initial_state())
    for ours, theirs in zip(KDA.run(x, None, None, KDA.initial_state()), want, strict=True):
        close(ours, theirs, 2e-5)


GRADIENTS = """
import sys
import jax, jax.numpy as jnp
from maxlib import ops

def gradients(implementation, x):
    return jax.jit(jax.grad(lambda x: jnp.sum(ops.kimi_delta_attention(**x, implementation=implementation)[0] ** 2)))(x)

q, k, v, decay = jax.random.normal(jax.random.key(0), (4, *map(int, sys.argv[1:])))
x = {"q": q, "k": k, "v": v, "log_decay": -jax.nn.softplus(decay), "beta": jax.nn.sigmoid(v[..., 0])}
got, want = gradients("chunked", x), gradients("sequential", x)
for name in x:
    assert jnp.abs(got[name] - want[name]).max() < 1e-4 * jnp.std(want[name]), name
"""


@pytest.mark.full  # the same axes run by default in the comparisons of gradients
@pytest.mark.parametrize("shape", [(2, 128, 2, 8), (2, 150, 3, 8), (1, 256, 4, 32), (1, 512, 4, 128)])
def test_gradients_do_not_crash_xla(shape):
    """For `B T N H`, in a process of its own without the options of tests/conftest.py.

    XLA for CPUs (jax 0.10.2) crashes in `x y^T` of eight axes, which halves of chunks as axes of their own would have.
    """
    env = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", GRADIENTS, *map(str, shape)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]


def test_flops_are_those_of_the_matmuls():
    """By the formula of the op."""
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in KDA.inputs(tokens=1024).items()}
    counted = forward_flops(lambda x: ops.kimi_delta_attention(**x)[0], x)
    assert counted == 2 * 1024 * B * N * (2 * 64 * HK + 64 * (HK + 2 * HV) + 3 * HK * HV)


def test_bad_input():
    x = jax.tree.map(jnp.asarray, KDA.inputs(tokens=3))
    with pytest.raises(ValueError, match="there must be at least one token"):
        ops.kimi_delta_attention(**{name: a[:, :0] for name, a in x.items()})
    with pytest.raises(ValueError, match="one of jax_linear_attention, fla, chunked, sequential"):
        ops.kimi_delta_attention(**x, implementation="fast")
