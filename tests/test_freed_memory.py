"""Memory that a process frees and keeps."""

import os
import platform
import subprocess
import sys

import jax
import pytest

import maxlib

PROGRAM = """
import resource
import maxlib
assert maxlib.keep_freed_memory()
import jax, jax.numpy as jnp

@jax.jit
def step(x):  # 50 MB of products, read twice
    y = x @ jnp.tile(x, (6, 1)).T
    return (y.T[:8] * 2).sum() + y.max()

def faults(x):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

x = jnp.ones((1448, 32))
print(min(faults(x) for _ in range(20)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these settings")
def test_a_program_gets_its_memory_back():
    """Its temporaries are 12,300 pages, which glibc would return to the system after each run."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100


def test_it_is_too_late_once_jax_has_started():
    jax.devices()
    with pytest.raises(RuntimeError, match="too late to keep freed memory"):
        maxlib.keep_freed_memory()
