"""Each workaround is still needed: without it the compiled program has what it is there against.

One that fails here has become needless with the installed jax: delete it, with its test.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from maxlib.ops import _xla_workarounds as workarounds


@pytest.mark.parametrize("kept", [True, False])
def test_a_loop_that_runs_once_is_unrolled(kept):
    def update(x):
        times, x = workarounds.run_once_later(x) if kept else (jnp.int32(1), x)
        return lax.fori_loop(0, times, lambda _, x: 2 * jnp.sin(x), x)

    x = jnp.ones(4)
    compiled = jax.jit(update).lower(x).compile()
    assert ("while(" in compiled.as_text()) == kept
    assert jnp.array_equal(compiled(x), jax.jit(lambda x: 2 * jnp.sin(x))(x))
