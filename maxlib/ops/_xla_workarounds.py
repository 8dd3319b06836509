"""Workarounds for XLA. Each function gives its reason and the version; a test fails when it is no longer needed.

Arrays pass through unchanged: a workaround affects how a program is compiled, never its result. The tests in
tests/ops/test_xla_workarounds.py compile the program without the workaround and expect the problem to occur.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def run_once_later(inputs: Any) -> tuple[Int[Array, ""], Any]:
    """Returns 1 as a trip count that XLA does not know, and `inputs`, which the loop must use.

    XLA (jax 0.10.2) unrolls a loop that runs once. Its body can then move to where its operands are ready: an
    optimizer's update fetches all moments from the host before the backward pass and holds them on the device.
    """
    return lax.optimization_barrier((jnp.int32(1), inputs))
