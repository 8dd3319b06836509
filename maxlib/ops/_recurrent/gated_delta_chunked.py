"""Gated delta rule in matmuls, chunk by chunk, in blocks of chunks (Yang et al. 2024, arXiv:2412.06464).

A block computes for all its chunks at once what does not need the state, then passes the state through them
(`gated_delta_block.py`). The backward pass saves only the inputs and the state at the beginning of each block and
recomputes the rest, so memory per token does not depend on the size of the state.

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
from maxlib.ops._recurrent.chunks import ChunkTiles, count_starts, in_blocks, in_chunks, joined
from maxlib.ops._recurrent.delta_inputs import DeltaInputs, normalized
from maxlib.ops._recurrent.gated_delta_block import backward, forward
from maxlib.ops._recurrent.inverse import SMALL
from maxlib.ops._recurrent.recurrence import RecurrentCall, Settings

_HEADS = (1, 1, 2, 2, 2, 0)  # axes of heads in each of `DeltaInputs`
LARGE_VECTOR_MEMORY = ("TPU v5 lite", "TPU v6 lite")  # 128 MiB; other TPUs have half of it or less


@dataclasses.dataclass(frozen=True)
class DeltaTiles(ChunkTiles):
    """Tokens of a chunk, a power of two as its triangle is inverted by doubling, and of a block of `chunked`."""

    kernel: ClassVar[str] = "gated_delta_rule/chunked"

    def __post_init__(self):
        super().__post_init__()
        self.require(SMALL, "chunk")
        self.require_powers_of_two("chunk")


def delta_tiles(call: RecurrentCall) -> DeltaTiles:
    """Chooses tile sizes: one wide chunk a block where the intermediates of more do not fit into vector memory."""
    small = call.platform == "tpu" and call.device_kind not in LARGE_VECTOR_MEMORY
    return DeltaTiles(128, 128) if small else DeltaTiles()


class _Static(NamedTuple):
    """Static parameters: tokens of a chunk, and how the call runs."""

    size: int
    settings: Settings

    def chunks(self, x: DeltaInputs) -> DeltaInputs:
        """Cuts a block, `B t ...`, into chunks; widens and normalizes its queries and keys."""
        pairs = zip(x, _HEADS, strict=True)
        cut: Any = [None if a is None else in_chunks(a, heads, self.size) for a, heads in pairs]
        return normalized(DeltaInputs(*cut), self.settings)

    @property
    def dot(self) -> Callable[..., Array]:
        """Einsum in the chosen precision."""
        return functools.partial(jnp.einsum, precision=self.settings.precision)


def chunked(x: DeltaInputs, state: Array, settings: Settings) -> tuple[Array, Array]:
    """Applies the recurrence chunk by chunk.

    Args:
        x: Inputs of each token; queries and keys not yet scaled or normalized.
        state: State before the first token, `B K G Hk Hv`.
        settings: How it runs; its tiles are `DeltaTiles`.

    Returns:
        The outputs, `B T K G Hv`, in the dtype of the values, and the state after the last token.
    """
    tokens, tiles = x.q.shape[1], cast(DeltaTiles, settings.tiles)
    size = min(tiles.chunk, max(SMALL, 1 << (tokens - 1).bit_length()))  # a power of two
    blocks, per_block = tiles.count(tokens, size)
    xs: DeltaInputs = jax.tree.map(lambda a: in_blocks(a, blocks, per_block * size), x)
    xs, state = vary_alike((xs._replace(is_start=count_starts(xs.is_start, size)), state))
    out, state = cast(tuple[Array, Array], _apply(_Static(size, settings), xs, state))
    # [blocks, B, t, K, G, Hv] -> [B, T, K, G, Hv]
    return jnp.moveaxis(out, 0, 1).reshape(out.shape[1], -1, *out.shape[3:])[:, :tokens], state


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(static: _Static, xs: DeltaInputs, state: Array) -> tuple[Array, Array]:
    """Passes the state through all blocks; returns the outputs, `blocks B t K G Hv`, and the last state."""
    return _apply_forward(static, xs, state)[0]


def _apply_forward(static: _Static, xs: DeltaInputs, state: Array):
    def step(state, x):
        after, out = forward(state, static.chunks(x), static.dot)
        return after, (joined(out, 2).astype(x.v.dtype), state)

    last, (out, before) = jax.lax.scan(step, state, xs)
    return (out, last), (xs, before)


def _apply_backward(static: _Static, saved: tuple[DeltaInputs, Array], cotangents: tuple[Array, Array]):
    (xs, before), (d_out, d_last) = saved, cotangents

    def step(d_state, block):
        state, x, d_out = block
        x, uncut = jax.vjp(static.chunks, x)
        d, d_state = backward(state, x, in_chunks(d_out, 2, static.size).astype(state.dtype), d_state, static.dot)
        return d_state, uncut(d)[0]._replace(is_start=None)

    d_first, d_xs = jax.lax.scan(step, d_last, (before, xs, d_out), reverse=True)
    return d_xs, d_first


_apply.defvjp(_apply_forward, _apply_backward)
