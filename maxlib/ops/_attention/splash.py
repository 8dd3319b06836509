"""JAX's splash attention for TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`), forward and backward.

The kernels mask keys by a function of the query's and the key's index, and by segments. Each query gets the index
`k_end - 1`, so that one comparison with the key's index ends its interval: in whole rows, with a cache, and in a part
of a ring. Blocks to which no row of the batch attends are skipped; the table of blocks is computed from the
intervals.

The kernels are imported when they are first called: importing Pallas takes longer than importing maxlib.

Letters: N heads, T queries and S keys padded to whole blocks, Q blocks of queries, C blocks of keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Int

from maxlib._xla_workarounds import together
from maxlib.hardware import current_device
from maxlib.kernels.attention.merge import merge_sinks
from maxlib.kernels.attention.tiles import tiles_of
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.kernels.vector_memory import DEFAULT_VMEM, vmem_of
from maxlib.ops._attention.masks import StaticMask
from maxlib.ops._attention.reference import AttentionInputs, Results

LANES = 128  # lanes of a vector register; blocks are multiples of it
NARROW = 256  # keys of a window that is smaller than the usual blocks
MOST_PARTS = 8  # partial gradients of the queries, which are summed after the kernel
MOST_BLOCKS = 2**16  # entries in a table of blocks: two int32 tables take half of a core's scalar memory


@dataclasses.dataclass(frozen=True)
class SplashBlock(TileSizes):
    """Sizes of a block: `queries` times `keys`, computed `compute` keys at a time (by the kernels that can)."""

    queries: int
    keys: int
    compute: int = 512

    def __post_init__(self):
        self.require(LANES)

    def fit(self, T: int, S: int) -> "SplashBlock":
        """Shrinks the block to minimize padding while T queries and S keys are split into as many pieces."""
        keys = _even(S, self.keys)
        fitting = (size for size in range(LANES, min(self.compute, keys) + 1, LANES) if keys % size == 0)
        return SplashBlock(_even(T, self.queries), keys, max(fitting))

    def count(self, T: int, S: int) -> int:
        """Returns the number of blocks of T queries and S keys."""
        return -(-T // self.queries) * -(-S // self.keys)


def _even(length: int, block: int) -> int:
    # 1300 tokens in blocks of up to 1024: two blocks of 768, rather than one of 1024 and one that is mostly padding.
    pieces = -(-length // block)
    return -(-length // (pieces * LANES)) * LANES


@dataclasses.dataclass(frozen=True)
class SplashTiles(TileSizes):
    """Blocks of the kernels. Without `dq`, one backward kernel computes all gradients, with partial sums of dq."""

    forward: SplashBlock
    dq: SplashBlock | None
    dkv: SplashBlock

    kernel: ClassVar[str] = "attention/splash"

    def fit(self, T: int, S: int) -> "SplashTiles":
        """Shrinks all blocks to T queries and S keys."""
        return SplashTiles(self.forward.fit(T, S), self.dq and self.dq.fit(T, S), self.dkv.fit(T, S))


def splash_tiles(
    T: int, S: int, key_dim: int, value_dim: int, window: int | None = None, *, vmem: int = DEFAULT_VMEM
) -> SplashTiles:
    """Chooses blocks that fit in 16 MiB of vector memory, as every TPU since v4 has; the choice has not been timed.

    For up to eight blocks of keys and heads of at most 128 (up to 8192 tokens) the backward pass is one kernel with
    five matmuls. Its partial dq then take at most eight times the memory of the queries, about as much as a layer's
    MLP. Beyond that, two kernels compute the logits twice, in seven matmuls, and store only the gradients.

    Args:
        T: Queries.
        S: Keys.
        key_dim: Width of a key head.
        value_dim: Width of a value head.
        window: Number of keys of a sliding window, or None.
        vmem: Bytes of vector memory that the chip gives a kernel that asks (`vmem_of`).
    """
    # A block of keys is read once per block of queries. With 512 queries, 4 bytes of keys and values give 4 FLOPs per
    # query: 512 FLOPs per byte, about a TPU's ratio of compute to bandwidth. Wide heads use half of 1024.
    wide = max(key_dim, value_dim) > LANES
    # A causal mask visits (n + 1) / 2n of n x n blocks: 9/16 for n = 8, 10/16 for n = 4. The chip with more vector
    # memory, v6e, has twice as many FLOPs per byte as the others: there, half the bytes outweigh the larger blocks.
    size = 1024 if S > 8 * 512 or (vmem > DEFAULT_VMEM and window is None and not wide) else 512
    if window is not None and window <= NARROW and key_dim + value_dim >= 4 * NARROW:
        # A query of a block of n visits 2n keys. Heads of 512 compute a block of 256 for as long as a step of the grid
        # takes (0.3 us); narrower heads would wait for the steps of so small blocks.
        block = SplashBlock(NARROW, NARROW, NARROW).fit(T, S)
        return SplashTiles(block, block, block)
    # The backward pass holds a block's logits, probabilities and their gradients; the forward pass holds the first two.
    forward = SplashBlock(512 if wide else size, size).fit(T, S)
    backward = SplashBlock(512, 512 if wide else size).fit(T, S)
    fused = not wide and backward.count(backward.queries, S) <= MOST_PARTS
    return SplashTiles(forward, None if fused else backward, backward)


class Spec(NamedTuple):
    """Static parameters: the soft-cap, the static mask, the blocks, and whether to interpret the kernels."""

    softcap: float | None
    mask: StaticMask
    tiles: SplashTiles
    interpret: bool


def splash(x: AttentionInputs, tiles: SplashTiles | None = None, *, interpret: bool = False) -> Results:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    Differentiable once (reverse mode) in q, k, v and sinks.

    Args:
        x: The arguments, with segments in the hint if it is segmented.
        tiles: Block sizes, shrunk to the lengths; default: `splash_tiles`.
        interpret: True runs the kernels in Pallas's interpreter, on any device.
    """
    assert x.mask_hint is not None
    q, mask_hint = x.q, x.mask_hint
    # [B, T, N, Hk], [B, S, K, Hv]
    (_, T, _, Hk), (_, S, _, Hv) = q.shape, x.v.shape
    vmem = vmem_of(current_device()[1])
    tiles = (tiles or splash_tiles(T, S, Hk, Hv, mask_hint.static.window, vmem=vmem)).fit(T, S)
    spec = Spec(x.softcap, mask_hint.static, tiles, interpret)
    ids = mask_hint.segment_ids if mask_hint.static.segmented else None
    # The kernels have no scale: multiply the queries by it, which rounds them once more.
    q = (q.astype(jnp.float32) * x.scale).astype(q.dtype)
    k, v = x.k.astype(q.dtype), x.v.astype(q.dtype)
    out, lse = _attend(spec, q, k, v, x.start.astype(jnp.int32), x.end.astype(jnp.int32), ids)
    return (out, lse) if x.sinks is None else merge_sinks(out, lse, x.sinks)


# ---------------------------------------------------------------------------------------------- the custom VJP


def _attend(spec: Spec, q, k, v, k_start, k_end, ids):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    call = _Call.of(spec, spec.tiles.forward, q, k, v, k_start, k_end, ids)
    block = call.block
    sizes = kernels.BlockSizes(block_q=block.queries, block_kv=block.keys, block_kv_compute=block.compute)

    def run(q, k, v, index, q_ids, k_ids):  # of one row: N T Hk, K S Hk, K S Hv, T, T, S
        options = {"mask_value": kernels.DEFAULT_MASK_VALUE, "is_mqa": False, "block_sizes": sizes}
        out, (lse,) = kernels._splash_attention_forward(
            call.info(index), q, k, v, call.segments(q_ids, k_ids), None, residual_checkpoint_name=None,
            save_residuals=True, **options, **call.options,
        )  # fmt: skip
        return out, lse

    with jax.named_scope(call.name):
        # The kernel returns each log-sum-exp 128 times. Without this the copies live until the backward pass.
        out, lse = together(*call.over_rows(run))
    T, seen = q.shape[1], (jnp.maximum(k_start, 0) < jnp.minimum(k_end, k.shape[1]))[:, :, None]  # [B, T, 1]
    out, lse = jnp.swapaxes(out, 1, 2)[:, :T], jnp.swapaxes(lse, 1, 2)[:, :T]  # [B, N, T, H] -> [B, T, N, H]
    # For a row that attends to nothing, the kernel averages masked values or divides zero by zero.
    return jnp.where(seen[..., None], out, 0), jnp.where(seen, lse, -jnp.inf)


def _forward(spec: Spec, *args):
    out, lse = _attend(spec, *args)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (args, out, lse)


def _backward(spec: Spec, residuals, cotangents):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels

    (q, k, v, *rest), out, lse = residuals
    d_out, d_lse = cotangents
    seen = jnp.isfinite(lse)
    # delta = sum(d_out * out) - d_lse is the row's term in the softmax's gradient: d_logits = probs * (d_probs -
    # delta).
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1) - d_lse
    # For rows that attend to nothing, lse = +inf makes the probabilities exp(-inf) = 0.
    rows = (
        jnp.where(seen[..., None], d_out, 0).astype(q.dtype),
        jnp.where(seen, lse, jnp.inf),
        jnp.where(seen, delta, 0.0),
    )

    def gradients(block: SplashBlock, kernel: Callable, *, by_keys: bool, every_block: bool = False, **extra: Any):
        call = _Call.of(spec, block, q, k, v, *rest, by_keys=by_keys, every_block=every_block)
        fill = (0.0, jnp.inf, 0.0)
        row_arrays = [_by_head(x, call.T, value) for x, value in zip(rows, fill, strict=True)]

        def run(q, k, v, index, q_ids, k_ids, d_out, lse, delta):
            layout = kernels.QKVLayout.HEAD_DIM_MINOR
            return kernel(
                q, k, v, call.segments(q_ids, k_ids), None, lse, d_out, delta, bq=block.queries, bkv=block.keys,
                is_mqa=False, mask_info=call.info(index), mask_value=kernels.DEFAULT_MASK_VALUE, q_layout=layout,
                k_layout=layout, v_layout=layout, **extra, **call.options,
            )  # fmt: skip

        with jax.named_scope(call.name):
            return call.over_rows(run, *row_arrays)

    tiles, dkv = spec.tiles, kernels._splash_attention_bwd_dkv
    fused = tiles.dq is None
    options = {"bkv_compute": tiles.dkv.compute, "use_fused_bwd_kernel": fused}
    dq, dk, dv = gradients(tiles.dkv, dkv, by_keys=True, every_block=fused, **options)
    if tiles.dq is not None:
        # Two kernels sum over keys and over queries in vector memory, so there are no partial sums in main memory.
        dq = gradients(tiles.dq, kernels._splash_attention_bwd_dq, by_keys=False)
    # [B, N, T, H] -> [B, T, N, H], without the padding
    dq, dk, dv = (jnp.swapaxes(d, 1, 2)[:, : x.shape[1]] for d, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, None, None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_forward, _backward)


# ---------------------------------------------------------------------------------------------- one call


@dataclasses.dataclass(frozen=True)
class _Call:
    """Operands of one kernel, heads first and padded to whole blocks, and the table of visited blocks."""

    spec: Spec
    block: SplashBlock
    operands: tuple[Any, ...]  # q `B N T Hk`, k and v `B K S H`, the index of each query, segments of queries and keys
    data_next: Int[Array, "1 _ _"]
    block_mask: Int[Array, "1 _ _"]
    T: int
    S: int
    keys: int  # without the padding

    @classmethod
    def of(
        cls,
        spec: Spec,
        block: SplashBlock,
        q,
        k,
        v,
        k_start,
        k_end,
        ids,
        *,
        by_keys: bool = False,
        every_block: bool = False,
    ) -> "_Call":
        """Prepares a call that iterates over keys or queries; `every_block` visits all of them."""
        T, S = -(-q.shape[1] // block.queries) * block.queries, -(-k.shape[1] // block.keys) * block.keys
        visited = _visited(block, k_start, k_end, k.shape[1], T, S)
        width = None if every_block else _window_width(spec.mask, block, by_keys)
        data_next, block_mask = _listed(visited, axis=0 if by_keys else 1, width=width)
        # Under a causal mask over whole rows, all rows have the same indices: one copy for the batch.
        shared = spec.mask.aligned and spec.mask.kind == "causal"
        index = jnp.arange(T, dtype=jnp.int32) if shared else _padded(k_end - 1, T, -1)
        # Padded keys and padded queries get different segments, so they match nothing.
        segments = (None, None) if ids is None else (_padded(ids[0], T, -1), _padded(ids[1], S, -2))
        # q [B, T, N, Hk], k [B, S, K, Hk], v [B, S, K, Hv]: heads first
        heads = (_by_head(x, size, 0.0) for x, size in ((q, T), (k, S), (v, S)))
        return cls(spec, block, (*heads, index, *segments), data_next, block_mask, T, S, keys=k.shape[1])

    @property
    def name(self) -> str:
        """Returns a kernel name that encodes its mask, from which plans count its FLOPs."""
        mask = self.spec.mask
        return f"splash_{mask.kind}" + ("" if mask.window is None else f"_{mask.window}")

    @property
    def options(self) -> dict[str, Any]:
        hidden = functools.partial(
            _visible, window=self.spec.mask.window, keys=self.keys if self.keys < self.S else None
        )
        function = None if self.without_index else hidden
        return {"mask_function": function, "attn_logits_soft_cap": self.spec.softcap, "interpret": self.spec.interpret}

    @property
    def without_index(self) -> bool:
        """Returns True if masking needs no indices, only segments if there are any."""
        return self.spec.mask.kind == "full" and self.spec.mask.aligned and self.keys == self.S

    def info(self, index):
        """Returns the description of the mask that the kernels take."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as masks

        index = None if self.without_index else index
        return masks.MaskInfo(self.data_next, None, self.block_mask, None, q_sequence=index)

    def segments(self, q_ids, k_ids):
        from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

        return None if q_ids is None else SegmentIds(q=q_ids, kv=k_ids)

    def over_rows(self, run: Callable, *arrays):
        """Runs the kernel for every row of the batch; arrays that all rows share are not repeated."""
        axes = [None if x is not None and x.ndim == 1 else 0 for x in self.operands]
        return jax.vmap(run, in_axes=(*axes, *[0] * len(arrays)))(*self.operands, *arrays)


def _padded(x, length: int, fill: int):
    """Pads `B T` to `length` tokens."""
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1])), constant_values=fill)


def _by_head(x, length: int, fill: float):
    """Pads `B T N ...` to `length` tokens and puts heads first: `B N T ...`."""
    # [B, T, N, ...] -> [B, length, N, ...] -> [B, N, length, ...]
    pads = ((0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2))
    return jnp.swapaxes(jnp.pad(x, pads, constant_values=fill), 1, 2)


def _visible(index, key, *, window: int | None, keys: int | None):
    """Returns True if the query whose interval ends at `index` attends to `key`, of `keys` if some are padding."""
    seen = index >= key
    seen = seen if window is None else seen & (index - key < window)
    return seen if keys is None else seen & (key < keys)


def _visited(block: SplashBlock, k_start, k_end, num_keys: int, T: int, S: int) -> Bool[Array, "Q C"]:
    """Finds the blocks to which some query of the batch attends."""
    start, end = (
        jnp.pad(jnp.clip(x, 0, num_keys), ((0, 0), (0, T - x.shape[1])), mode="edge") for x in (k_start, k_end)
    )
    # [B, Q, C] -> [Q, C]: one table for all rows; the mask function masks the keys of a single row.
    visited, _ = tiles_of(start, end, S, block.queries, block.keys)
    return visited.any(axis=0)


def _window_width(mask: StaticMask, block: SplashBlock, by_keys: bool) -> int | None:
    """Returns the maximum number of visited blocks in a row (or column) of blocks under a window; None if unknown."""
    if mask.window is None or not mask.aligned:
        return None
    stays, passes = (block.keys, block.queries) if by_keys else (block.queries, block.keys)
    # A block of n queries attends to window + n - 1 consecutive keys, and as many queries attend to a block of n keys.
    # They may start anywhere within a block, unless one end is aligned with a block.
    run = mask.window + stays - 1
    return -(-run // passes) if stays % passes == 0 else -(-(run - 1) // passes) + 1


def _listed(visited: Bool[Array, "Q C"], axis: int, width: int | None):
    """Returns the kernel's two tables: the block to fetch in each step along `axis`, and whether to compute with it.

    A step without work keeps the current block, or prefetches the next one.
    """
    steps = jnp.moveaxis(visited, axis, -1)  # [rows, steps]
    first = jnp.argmax(steps, axis=-1, keepdims=True).astype(jnp.int32)
    column = jnp.arange(steps.shape[-1], dtype=jnp.int32)[None]
    if width is not None and width < steps.shape[-1]:
        # Iterate only over the visited blocks: step w is block first + w.
        block = first + jnp.arange(width, dtype=jnp.int32)[None]  # [rows, width]
        inside = block < steps.shape[-1]
        block = jnp.minimum(block, steps.shape[-1] - 1)
        run = jnp.take_along_axis(steps, block, axis=-1) & inside
    else:
        block = jnp.maximum(jax.lax.cummax(jnp.where(steps, column, -1), axis=1), first)
        run = steps
    tables = (jnp.moveaxis(x.astype(jnp.int32), -1, axis)[None] for x in (block, run))
    return tuple(tables)
