"""Gated delta rule on TPUs: layouts, and the custom gradient around the kernels.

The kernels are imported when they are first called: importing Pallas takes longer than importing maxlib.
"""

import dataclasses
import functools
from typing import Any, ClassVar, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxlib.kernels.gated_delta.chunk import Spec
from maxlib.kernels.tile_sizes import TileSizes

SMALLEST = 16  # rows shorter than a chunk are one chunk of 16, 32, 64 ... tokens
VMEM = 12 * 2**20  # bytes available to buffers, of the 16 MiB that every generation gives a kernel by default


@dataclasses.dataclass(frozen=True)
class DeltaTPUTiles(TileSizes):
    """Tiles of maxlib's gated delta rule on TPUs.

    Args:
      chunk: tokens of a chunk, a power of two. Matrices of 128 fill the lanes and the matmul unit.
      chunks: maximum number of chunks of a block; fewer if they do not fit into vector memory.
    """

    chunk: int = 128
    chunks: int = 8

    kernel: ClassVar[str] = "gated_delta_rule/mosaic_tpu"

    def __post_init__(self):
        self.require(SMALLEST, "chunk")
        self.require(1, "chunks")
        self.require_powers_of_two("chunk")


class _Static(NamedTuple):
    """Static parameters: the maths and the tiles."""

    spec: Spec
    tiles: DeltaTPUTiles


def mosaic_tpu(
    q: Float[Array, "B T K Hk"],
    k: Float[Array, "B T K Hk"],
    v: Float[Array, "B T K G Hv"],
    log_decay: Float[Array, "B T K G"],
    beta: Float[Array, "B T K G"],
    is_start: Bool[Array, "B T"],
    state: Float[Array, "B K G Hk Hv"],
    *,
    scale: float,
    l2_norm: bool,
    tiles: DeltaTPUTiles = DeltaTPUTiles(),
) -> tuple[Float[Array, "B T K G Hv"], Float[Array, "B K G Hk Hv"]]:
    """Returns the outputs, in the dtype of `v`, and the state after the last token.

    Rates and states are float32. Differentiable once (reverse mode) in all arrays but `is_start`, which is True where
    the state before a token is zero.
    """
    spec = Spec(scale, l2_norm, parts=(2, 2) if v.dtype.itemsize < 4 else (3, 3))
    return _apply(_Static(spec, tiles), q, k, v, log_decay, beta, is_start.astype(jnp.float32), state)


def refuses(
    groups: int, key_dim: int, value_dim: int, dtype: Any, tiles: DeltaTPUTiles = DeltaTPUTiles()
) -> str | None:
    """Returns the reason why the kernels cannot run a call, or None.

    Args:
      groups: value heads that share a key head.
      key_dim: width of keys.
      value_dim: width of values.
      dtype: dtype of the values.
      tiles: sizes of a chunk.
    """
    if str(dtype) not in ("bfloat16", "float32"):
        return f"takes values in bfloat16 or float32, not in {dtype}"
    if (least := _vmem(1, tiles.chunk, groups, key_dim, value_dim, jnp.dtype(dtype).itemsize)) > VMEM:
        return (
            f"needs {least / 2**20:.0f} MiB of vector memory for {groups} states of {key_dim} x {value_dim} and one chunk, "
            f"of which there are {VMEM >> 20}"
        )
    return None


# ---------------------------------------------------------------------------------------------- the custom VJP


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply(static: _Static, q, k, v, log_decay, beta, starts, state):
    return _forward(static, q, k, v, log_decay, beta, starts, state, keep=False)[0]


def _forward(static: _Static, *args, keep: bool):
    from maxlib.kernels.gated_delta.kernels import forward

    *tokens, state = args
    cut = _Cut.of(*tokens[1:3], tiles=static.tiles)
    out, last, before = forward(cut.blocks(*tokens), state, spec=static.spec, keep=keep)
    return (cut.joined(out), last), before


def _apply_forward(static: _Static, *args):
    results, before = _forward(static, *args, keep=True)
    return results, (args[:-1], before)


def _apply_backward(static: _Static, kept, cotangents):
    from maxlib.kernels.gated_delta.kernels import backward

    (tokens, before), (d_out, d_last) = kept, cotangents
    cut = _Cut.of(*tokens[1:3], tiles=static.tiles)
    d, d_state = backward(cut.blocks(*tokens), before, cut.by_head(d_out), d_last, spec=static.spec)
    return *(cut.joined(a) for a in (d.q, d.k, d.v)), cut.rates(d.log_decay), cut.rates(d.beta), None, d_state


_apply.defvjp(_apply_forward, _apply_backward)


# ---------------------------------------------------------------------------------------------- layouts


def _vmem(chunks: int, chunk: int, groups: int, key_dim: int, value_dim: int, width: int) -> int:
    """Returns the bytes of the backward kernel's buffers, for values of `width` bytes."""
    keys, values, lanes = (-(-size // 128) * 128 for size in (key_dim, value_dim, chunk))
    tokens, state = chunks * chunk, 4 * key_dim * values
    # Inputs and outputs are double-buffered: q, k, v, the output's gradient, their gradients; states.
    moving = 2 * (tokens * width * (4 * keys + 3 * values) + state * (1 + 2 * groups))
    return moving + chunks * (4 * chunk * lanes + state) + 2 * 4 * tokens * keys


class _Cut(NamedTuple):
    """Sizes by which T tokens are cut: `count` blocks of `chunks` chunks of `chunk` tokens."""

    tokens: int
    count: int
    chunks: int
    chunk: int

    @classmethod
    def of(cls, k, v, tiles: DeltaTPUTiles) -> "_Cut":
        """Returns the sizes for keys `B T K Hk` and values `B T K G Hv`."""
        T, (groups, value_dim) = k.shape[1], v.shape[3:]
        chunk = min(tiles.chunk, max(SMALLEST, 1 << (T - 1).bit_length()))
        vmem = functools.partial(
            _vmem, chunk=chunk, groups=groups, key_dim=k.shape[3], value_dim=value_dim, width=v.dtype.itemsize
        )
        fitting = max(n for n in range(1, tiles.chunks + 1) if n == 1 or vmem(n) <= VMEM)
        total = -(-T // chunk)
        count = -(-total // fitting)
        return cls(T, count, -(-total // count), chunk)  # blocks of equal length, so that little is padded

    def blocks(self, q, k, v, log_decay, beta, starts):
        """Cuts the arguments of `mosaic_tpu`."""
        from maxlib.kernels.gated_delta.kernels import Blocks

        sizes = {"n": self.count, "C": self.chunk}
        rates = lambda a: einops.rearrange(self._padded(a), "B (n r C) K G -> B K G n r C", **sizes)
        starts = einops.rearrange(self._padded(starts), "B (n r C) -> B n r C", **sizes)
        return Blocks(self.by_head(q), self.by_head(k), self.by_head(v), rates(log_decay), rates(beta), starts)

    def by_head(self, a):
        """Cuts tokens into blocks, heads first: `B T heads H` to `B heads n t H`, of any number of axes of heads."""
        return einops.rearrange(self._padded(a), "B (n t) ... H -> B ... n t H", n=self.count)

    def joined(self, a):
        """Inverts `by_head`."""
        return einops.rearrange(a, "B ... n t H -> B (n t) ... H")[:, : self.tokens]

    def rates(self, a):
        """Joins rates again: `B K G n r C` to `B T K G`."""
        return einops.rearrange(a, "B K G n r C -> B (n r C) K G")[:, : self.tokens]

    def _padded(self, a):
        # Tokens without decay, step and value do not change the state.
        missing = self.count * self.chunks * self.chunk - self.tokens
        return jnp.pad(a, [(0, 0), (0, missing)] + [(0, 0)] * (a.ndim - 2))
