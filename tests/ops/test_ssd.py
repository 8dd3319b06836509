"""What only state-space duality has: the memory of its blocks, its FLOPs and errors."""

import jax
import jax.numpy as jnp
import pytest

from maxlib import ops
from maxlib.observability import forward_flops
from maxlib.ops._ssd.chunked import SSDTiles
from tests.ops.recurrences import SSD, B

G, N, WIDTH, SIZE = 2, 6, 5, 7


def test_memory_does_not_grow_with_the_state():
    """For a state four times as wide the op keeps no more for the backward pass than what it was given, and one state
    for each block.
    """
    tokens = 4096

    def kept(size: int) -> int:
        x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in SSD.inputs(tokens=tokens).items()}
        x |= dict.fromkeys("bc", jax.ShapeDtypeStruct((B, tokens, G, size), jnp.float32))
        _, backward = jax.eval_shape(lambda x: jax.vjp(lambda x: ops.ssd(**x)[0], x), x)
        return sum(a.size for a in jax.tree.leaves(backward))

    narrow, wide = kept(SIZE), kept(4 * SIZE)
    # b and c, and a state for each of four blocks; a state for each token would be 1024 times as much.
    assert wide - narrow <= 3 * SIZE * B * (2 * tokens * G + 8 * N * WIDTH) * 1.2


def test_flops_are_those_of_the_matmuls():
    """By the formula of the op."""
    x = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in SSD.inputs(tokens=1024).items()}
    counted = forward_flops(lambda x: ops.ssd(**x)[0], x)
    chunk = SSDTiles().chunk
    assert counted == 2 * 1024 * B * (G * chunk * SIZE + N * (chunk * WIDTH + 2 * WIDTH * SIZE))


def test_bad_input():
    x = jax.tree.map(jnp.asarray, SSD.inputs(tokens=3))
    with pytest.raises(ValueError, match="heads must be a multiple of the G groups"):
        ops.ssd(**x | {"b": x["b"].repeat(2, 2), "c": x["c"].repeat(2, 2)})
    with pytest.raises(ValueError, match="one of jax_linear_attention, fla, chunked, sequential"):
        ops.ssd(**x, implementation="fast")
