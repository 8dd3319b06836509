"""Gated delta rule in matmuls, chunk by chunk, in blocks of chunks (Yang et al. 2024, arXiv:2412.06464).

A block computes for all its chunks at once what does not need the state, then passes the state through them
(`_block.py`). The backward pass saves only the inputs and the state at the beginning of each block and recomputes the
rest, so memory per token does not depend on the size of the state.

Shapes: B rows, n chunks of a block, C tokens of a chunk, K key heads, G value heads of each, Hk and Hv wide.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxlib._utils.varying import vary_alike
from maxlib.ops._chunks import ChunkTiles, count_starts, in_blocks, in_chunks, joined
from maxlib.ops._gated_delta.block import backward, forward
from maxlib.ops._gated_delta.inputs import Inputs, widened
from maxlib.ops._gated_delta.inverse import SMALL
from maxlib.ops._recurrences import Call

_HEADS = (1, 1, 2, 2, 2, 0)  # axes of heads in each of `Inputs`
LARGE_VECTOR_MEMORY = ("TPU v5 lite", "TPU v6 lite")  # 128 MiB; other TPUs have half of it or less


@dataclasses.dataclass(frozen=True)
class DeltaTiles(ChunkTiles):
    """Tokens of a chunk, a power of two as its triangle is inverted by doubling, and of a block of `chunked`."""

    kernel: ClassVar[str] = "gated_delta_rule/chunked"

    def __post_init__(self):
        super().__post_init__()
        self.require(SMALL, "chunk")
        self.require_powers_of_two("chunk")


def delta_tiles(call: Call) -> DeltaTiles:
    """Chooses tile sizes: one wide chunk a block where the intermediates of more do not fit into vector memory."""
    small = call.platform == "tpu" and call.device_kind not in LARGE_VECTOR_MEMORY
    return DeltaTiles(128, 128) if small else DeltaTiles()


class _Static(NamedTuple):
    """Static parameters: tokens of a chunk, and those of `chunked`."""

    size: int
    scale: float
    l2_norm: bool
    precision: jax.lax.Precision

    def chunks(self, x: Inputs) -> Inputs:
        """Cuts a block, `B t ...`, into chunks; widens and normalizes its queries and keys."""
        cut: Callable[..., Any] = lambda a, heads: None if a is None else in_chunks(a, heads, self.size)
        return widened(Inputs(*map(cut, x, _HEADS)), scale=self.scale, l2_norm=self.l2_norm)

    @property
    def dot(self) -> Callable[..., Array]:
        """Einsum in the chosen precision."""
        return functools.partial(jnp.einsum, precision=self.precision)


def chunked(
    x: Inputs,
    state: Array,
    *,
    scale: float,
    l2_norm: bool,
    precision: jax.lax.Precision,
    tiles: ChunkTiles = DeltaTiles(),
) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
      x: inputs of each token; queries and keys not yet scaled or normalized.
      state: state before the first token, `B K G Hk Hv`.
      scale: factor on the queries.
      l2_norm: True if queries and keys are to have length one.
      precision: precision of the matmuls; the triangular system is solved in the highest precision.
      tiles: tokens of a chunk and of a block.

    Returns:
      The outputs, `B T K G Hv`, in the dtype of the values, and the state after the last token.
    """
    tokens = x.q.shape[1]
    size = min(tiles.chunk, max(SMALL, 1 << (tokens - 1).bit_length()))  # a power of two
    blocks, per_block = tiles.count(tokens, size)
    xs: Inputs = jax.tree.map(lambda a: in_blocks(a, blocks, per_block * size), x)
    xs, state = vary_alike((xs._replace(is_start=count_starts(xs.is_start, size)), state))
    out, state = cast(tuple[Array, Array], _apply(_Static(size, scale, l2_norm, precision), xs, state))
    # [blocks, B, t, K, G, Hv] -> [B, T, K, G, Hv]
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :tokens], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(static: _Static, xs: Inputs, state: Array) -> tuple[Array, Array]:
    """Passes the state through all blocks; returns the outputs, `blocks B t K G Hv`, and the last state."""
    return _apply_forward(static, xs, state)[0]


def _apply_forward(static: _Static, xs: Inputs, state: Array):
    def step(state, x):
        after, out = forward(state, static.chunks(x), static.dot)
        return after, (joined(out, 2).astype(x.v.dtype), state)

    last, (out, before) = jax.lax.scan(step, state, xs)
    return (out, last), (xs, before)


def _apply_backward(static: _Static, saved: tuple[Inputs, Array], cotangents: tuple[Array, Array]):
    (xs, before), (d_out, d_last) = saved, cotangents

    def step(d_state, block):
        state, x, d_out = block
        x, uncut = jax.vjp(static.chunks, x)
        d, d_state = backward(state, x, in_chunks(d_out, 2, static.size).astype(state.dtype), d_state, static.dot)
        return d_state, uncut(d)[0]._replace(is_start=None)

    d_first, d_xs = jax.lax.scan(step, d_last, (before, xs, d_out), reverse=True)
    return d_xs, d_first


_apply.defvjp(_apply_forward, _apply_backward)
