"""What XLA has to be kept from. Each function says why, and since which version; a test fails when it is needless.

Arrays go through unchanged: a workaround decides how a program is compiled, never what it computes. The tests in
tests/ops/test_xla_workarounds.py compile the program without the workaround, and expect what it is there against.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def run_once_later(inputs: Any) -> tuple[Int[Array, ""], Any]:
    """Returns 1, as a trip count that XLA does not know, and `inputs`, which the loop must take.

    XLA (jax 0.10.2) unrolls a loop that runs once. Its body then moves to where its operands are ready: an optimizer's
    update fetches all moments from the host before the backward pass, and holds them on the device.
    """
    return lax.optimization_barrier((jnp.int32(1), inputs))
