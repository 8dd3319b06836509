"""tokamax's attention in Triton, for NVIDIA GPUs since Ampere (`maxlib[cuda]`, on Python 3.12 or later).

The forward kernel takes an interval of keys for each query and skips tiles outside of it. The backward kernel takes a
boolean mask, a byte for each query and key, and skips tiles of a causal mask only; it has no soft-cap. Where the mask
would be too large, and for a soft-cap, `chunked` computes the gradients from the same log-sum-exp. Both kernels are
imported when they are first called.
"""

import dataclasses
import functools
import importlib.util
import re
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from maxlib._utils.varying import vary_alike
from maxlib.hardware import is_blackwell, is_hopper
from maxlib.kernels.attention.merge import merge_sinks, sinks_gradient
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._attention.chunked import attend_backward, chunked_tiles
from maxlib.ops._attention.masks import StaticMask
from maxlib.ops._attention.reference import AttentionInputs, Results
from maxlib.ops._attention.tokamax_gpu import intervals, is_installed, named, padded, parse_no_flags, whole_tiles

NEEDED = (0, 0, 17)  # the oldest version of tokamax that was tried
MOST_PAIRS = 2**30  # of a query and a key in one row of the batch: a mask of 1 GiB
PAIRS_AT_ONCE = 2**28  # of several rows of the batch


WIDEST = 256  # of the widths of heads whose kernels fit into registers and shared memory in both passes


@dataclasses.dataclass(frozen=True)
class TritonAttentionTile(TileSizes):
    """A tile of one pass: a block of threads keeps one side and passes over the other.

    Args:
        stays: Queries of a block forward; backward, keys for their gradient, and queries for theirs.
        streams: Keys of a step forward; backward, queries of a step, and keys.
        warps: Warps of a block.
        stages: Steps whose operands are in shared memory at once.
    """

    stays: int = 64
    streams: int = 64
    warps: int = 4
    stages: int = 2

    def __post_init__(self):
        self.require(16, "stays", "streams")
        self.require(1, "warps", "stages")
        if odd := [x for x in (self.stays, self.streams, self.warps) if x & (x - 1)]:
            raise ValueError(f"TritonAttentionTile: stays, streams and warps must be powers of two, got {odd[0]}")


@dataclasses.dataclass(frozen=True)
class TritonAttentionTiles(TileSizes):
    """Tiles of tokamax's attention in Triton, one for each pass.

    Args:
        forward: Tile of the forward pass.
        backward: Tile of the backward pass. Near a causal mask's diagonal a step is half as long, and at least 16.
    """

    forward: TritonAttentionTile = TritonAttentionTile(128, 64, 8)
    backward: TritonAttentionTile = TritonAttentionTile(64, 32, 8)

    kernel: ClassVar[str] = "attention/tokamax_triton"

    def __post_init__(self):
        self.backward.require(32, "streams")


def triton_tiles(key_dim: int, value_dim: int, device_kind: str) -> TritonAttentionTiles:
    """Chooses tiles by the width of heads, which the kernels pad to a power of two, and the device's shared memory."""
    width = max(key_dim, value_dim)
    if width <= 64:
        return TritonAttentionTiles(TritonAttentionTile(128, 64, 8, 3), TritonAttentionTile(128, 32, 8))
    if width <= 128:
        return TritonAttentionTiles()
    forward = TritonAttentionTile(64, 64 if _has_large_shared_memory(device_kind) else 32, 8)
    return TritonAttentionTiles(forward, TritonAttentionTile(32, 32, 8))


def _has_large_shared_memory(device_kind: str) -> bool:
    """Returns True for the GPUs of data centers with 163 KiB and more per block of threads; others have 99."""
    return (
        is_hopper(device_kind) or is_blackwell(device_kind) or re.search(r"\bA(30|100|800)\b", device_kind) is not None
    )


class Static(NamedTuple):
    """Static parameters: the maths, the named mask and the tiles."""

    scale: float
    softcap: float | None
    mask: StaticMask | None
    tiles: TritonAttentionTiles


@functools.cache
def has_triton_attention() -> bool:
    """Returns True if tokamax's kernels and JAX's compiler of them can be imported, without importing tokamax."""
    return is_installed(NEEDED) and importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def tokamax_triton(x: AttentionInputs, tiles: TritonAttentionTiles | None = None) -> Results:
    """Returns the output, differentiable in q, k, v and sinks, and None for the log-sum-exp."""
    T, S = x.q.shape[1], x.k.shape[1]
    start, end, visible = intervals(x.start, x.end, S)
    static = Static(x.scale, x.softcap, whole_tiles(T, S, x.mask_hint), tiles or TritonAttentionTiles())
    q, k, v = (padded(a.astype(x.q.dtype), 0) for a in (x.q, x.k, x.v))
    out: Array = _attend(static, *vary_alike((q, k, v, x.sinks, padded(start, 0), padded(end, 1))))
    return jnp.where(visible[..., None, None], out[:, :T], 0), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: Static, q, k, v, sinks, start, end):
    return _forward(static, q, k, v, sinks, start, end)[0]


def _forward(static: Static, q, k, v, sinks, start, end):
    with jax.named_scope("attention_forward"):
        out, lse = _forward_kernel(static, q, k, v, start, end)
    out, lse = (out, lse) if sinks is None else merge_sinks(out, lse, sinks)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return out, (q, k, v, sinks, start, end, out, lse)


def _backward(static: Static, residuals, d_out):
    q, k, v, sinks, start, end, out, lse = residuals
    masks = named(start, end, static.mask)
    pairs = q.shape[1] * k.shape[1] if masks.keys() & {"k_start", "k_end"} else 0
    run = _by_kernel if static.softcap is None and pairs <= MOST_PAIRS else _by_blocks
    with jax.named_scope("attention_backward"):
        dq, dk, dv = run(static, q, k, v, start, end, out, lse, d_out)
    return dq, dk, dv, None if sinks is None else sinks_gradient(sinks, out, lse, d_out), None, None


_attend.defvjp(_forward, _backward)


def _forward_kernel(static: Static, q, k, v, start, end):
    """Returns the output and the log-sum-exp `B T N`."""
    parse_no_flags()
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_triton import Config, PallasTritonFlashAttention

    tile = static.tiles.forward
    config = Config(block_q=tile.stays, block_k=tile.streams, num_warps=tile.warps, num_stages=tile.stages)
    # The check asks the default device, which need not be the one that a program is compiled for. The softmax is
    # relative to each row's maximum, as the log-sum-exp of large logits needs.
    run = PallasTritonFlashAttention(config=config, bypass_device_check=True, use_stable_softmax=True)
    with jax.numpy_rank_promotion("allow"):
        out, (peak, total) = run(
            q,
            k,
            v,
            mask=Mask(**named(start, end, static.mask)),
            logits_scale=static.scale,
            logits_soft_cap=static.softcap,
            return_residuals=True,
        )
    return out, jnp.swapaxes(peak + jnp.log(total), 1, 2)


def _by_kernel(static: Static, q, k, v, start, end, out, lse, d_out):
    """Returns the gradients of q, k and v by the kernel, of as many rows of the batch at once as the masks allow."""
    parse_no_flags()
    from tokamax._src.ops.attention.base import Mask
    from tokamax._src.ops.attention.pallas_triton_vjp import Config, PallasTritonFlashAttentionVjp

    tile = static.tiles.backward
    sides = {"block_m1": tile.streams, "block_n1": tile.stays, "block_m2": tile.stays, "block_n2": tile.streams}
    config = Config(**sides, num_warps=tile.warps, num_stages=tile.stages)
    run = PallasTritonFlashAttentionVjp(config=config, bypass_device_check=True)

    unused = ("bias", "logits_soft_cap", "dropout_mask", "paging_info", "q_indices", "k_indices")

    def rows(q, k, v, start, end, out, lse, d_out):
        # The kernel weighs by exp(logit - peak) / total, and a log-sum-exp is a peak whose total is 1.
        peak = jnp.swapaxes(lse, 1, 2)
        gradients = run(
            (peak, jnp.ones_like(peak)),
            out,
            d_out,
            q,
            k,
            v,
            mask=Mask(**named(start, end, static.mask)),
            logits_scale=static.scale,
            logits_dtype=jnp.dtype(jnp.float32),
            precision=(jax.lax.DotAlgorithmPreset.DEFAULT,) * 2,
            normalize_output=True,
            dropout_rate=0.0,
            **dict.fromkeys(unused),
        )
        return gradients["q"], gradients["k"], gradients["v"]

    with jax.numpy_rank_promotion("allow"):
        return _in_groups(rows, q, k, v, start, end, out, lse, d_out)


def _in_groups(run: Callable, q, k, *rest):
    """Runs a function of all rows of the batch, or of one after the other where all masks would be too large."""
    if q.shape[0] * q.shape[1] * k.shape[1] <= PAIRS_AT_ONCE:
        return run(q, k, *rest)
    split = jax.tree.map(lambda x: x[:, None], (q, k, *rest))
    return jax.tree.map(lambda x: x[:, 0], lax.map(lambda row: run(*row), split))


def _by_blocks(static: Static, q, k, v, start, end, out, lse, d_out):
    """Returns the gradients of q, k and v in plain XLA, block by block."""
    (_, T, N, _), S = q.shape, k.shape[1]
    spec = chunked_tiles(T, N, S, "gpu").spec(q.shape, S, static.scale, static.softcap)
    return attend_backward(spec, (q, k, v, None, start, end), out, lse, d_out, jnp.zeros_like(lse))[:3]
