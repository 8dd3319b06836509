"""Blockwise attention in plain XLA: every feature, any backend, memory linear in the sequence length.

A tile is one block of queries against one block of keys. Queries are scanned block by block; each block visits only
the key blocks between its rows' smallest `k_start` and largest `k_end`, so masked tiles cost nothing. The backward pass
visits the same tiles in the same order and computes all gradients of a tile together. It recomputes the probabilities
from the log-sum-exp (FlashAttention-2, https://arxiv.org/abs/2307.08691). Neither pass needs monotone intervals.

Letters inside this file: Q query blocks, R the rows of one block (the G query heads of a key head, times t
queries: grouped heads share a matmul and keys are never repeated), c the keys of one block.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from maxlib._utils.loops import scan
from maxlib._utils.varying import vary_alike
from maxlib._xla_workarounds import inner
from maxlib.hardware import current_device
from maxlib.kernels.attention.merge import merge_sinks
from maxlib.kernels.tile_sizes import TileSizes
from maxlib.ops._attention.reference import AttentionInputs, Results


class Spec(NamedTuple):
    """Static parameters: the maths and the block sizes. `rows` is the number of batch rows in one tile."""

    scale: float
    softcap: float | None
    block_q: int
    block_k: int
    rows: int


class Rows(NamedTuple):
    """Queries with their per-row values in blocks: leading axis Q, then `B K R ...`; bounds are `Q B 1 R`."""

    q: Array
    start: Array
    end: Array
    bias: Array | None  # Q #B #K R S


def chunked(x: AttentionInputs, tiles: "ChunkedTiles | None" = None) -> Results:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    Differentiable once (reverse mode) in q, k, v, sinks and bias.

    Args:
        x: The arguments.
        tiles: Sizes of a block; default: `chunked_tiles`.
    """
    q, k, bias = x.q, x.k, x.bias
    tiles = tiles or chunked_tiles(q.shape[1], q.shape[2], k.shape[1], current_device()[0])
    spec = tiles.spec(q.shape, k.shape[1], x.scale, x.softcap, whole_batch=bias is not None)
    bias = None if bias is None else _fold_bias(bias, q.shape[2], k.shape[2], spec.block_q)
    # Under shard_map, make all operands vary over the same axes; the transpose sums the gradients of replicated ones.
    arrays = vary_alike((q, k, x.v, bias, x.start.astype(jnp.int32), x.end.astype(jnp.int32)))
    out, lse = _attend(spec, *arrays)
    return (out, lse) if x.sinks is None else merge_sinks(out, lse, x.sinks)


def chunked_gradients(x: AttentionInputs, cotangents: Any) -> tuple[Array, Array, Array]:
    """Returns the gradients of q, k and v, for kernels of few queries, which rarely need one."""
    _, vjp = jax.vjp(lambda q, k, v: chunked(x._replace(q=q, k=k, v=v)), x.q, x.k, x.v)
    return vjp(cotangents)


class _Device(NamedTuple):
    """Block sizes of a kind of device: for long sequences, for short ones, and the maximum number of logits
    in a tile.
    """

    long: int
    short: int
    logits: int


# CPUs: measured. 2^19 float32 logits are 2 MiB, which fit in cache; smaller tiles do not keep the cores busy.
# GPUs and TPUs: not measured. An iteration must take much longer than a kernel launch; the logits of a tile go through
# memory, and 2^25 of them take 128 MiB.
_FEW_ROWS = 8  # with one matrix product, one query of three heads takes 1.4 times as long
_DEVICES = {"cpu": _Device(256, 128, 2**19), "gpu": _Device(512, 512, 2**25), "tpu": _Device(512, 512, 2**25)}


@dataclasses.dataclass(frozen=True)
class ChunkedTiles(TileSizes):
    """Blocks of `chunked`.

    Args:
        queries: Queries of a block; at most all.
        keys: Keys of a block; at most all.
        logits: Most numbers of a tile, of all heads and as many rows of the batch as fit, at least one.
    """

    queries: int
    keys: int
    logits: int = 2**19

    kernel: ClassVar[str] = "attention/chunked"

    def __post_init__(self):
        self.require()

    def spec(self, q_shape, S: int, scale: float, softcap: float | None = None, *, whole_batch: bool = False) -> Spec:
        """Returns the static parameters of a call with queries `B T N H` and S keys."""
        B, T, N, _ = q_shape
        queries, keys = min(self.queries, T), min(self.keys, S)
        # Rows of the batch share a tile as far as its logits, B N T S numbers, fit; as many at a time as divide B.
        fitting = max(1, self.logits // (N * queries * keys))
        rows = B if whole_batch else max(r for r in range(1, B + 1) if B % r == 0 and r <= fitting)
        return Spec(scale, softcap, queries, keys, rows)


def chunked_tiles(T: int, N: int, S: int, platform: str = "cpu") -> ChunkedTiles:
    """Chooses blocks from the shapes, T queries of N heads and S keys, and the kind of device."""
    device = _DEVICES.get(platform, _DEVICES["cpu"])
    if T <= 32:  # longer blocks of keys, and all rows: each block and each group of rows is copied
        return ChunkedTiles(T, _even(S, 512, 16), max(device.logits, 2**22))
    block = device.long if T >= 2048 and device.logits >= N * device.long**2 else device.short
    return ChunkedTiles(_even(T, block, 1), _even(S, block, 16), device.logits)


def _even(length: int, block: int, multiple: int) -> int:
    """Returns the smallest block that splits `length` into as many pieces as `block` does, to minimize padding.

    The result is rounded up to a multiple of `multiple`.
    """
    pieces = -(-length // block)
    even = -(-length // pieces)
    return min(length, -(-even // multiple) * multiple)


# ---------------------------------------------------------------------------------------------- the custom VJP


def _attend(spec: Spec, q, k, v, bias, k_start, k_end):
    return _by_rows(spec, _forward, q, k, v, bias, k_start, k_end)


def _attend_fwd(spec: Spec, *args):
    out, lse = _attend(spec, *args)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (args, out, lse)


def attend_backward(spec: Spec, args, out, lse, d_out, d_lse):
    """Returns the gradients of q, k, v and the bias, from the results of any forward pass.

    Args:
        spec: The maths and the blocks.
        args: `(q, k, v, bias, k_start, k_end)`.
        out: The output.
        lse: The log-sum-exp of each row's logits, a sink's included.
        d_out: Gradient of the output.
        d_lse: Gradient of the log-sum-exp.
    """
    # d_logits = probs * (d_out v - delta) with delta = sum(d_out * out) - d_lse. This one number per row replaces the
    # sum over all keys in the softmax's gradient, so tiles are independent of each other.
    delta = inner(d_out.astype(lse.dtype), out.astype(lse.dtype)) - d_lse
    delta = jnp.where(jnp.isfinite(lse), delta, 0.0)
    return _by_rows(spec, _backward, *args, jnp.where(jnp.isfinite(lse), lse, 0.0), delta, d_out)


def _attend_bwd(spec: Spec, residuals, cotangents):
    return *attend_backward(spec, *residuals, *cotangents), None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_attend_fwd, _attend_bwd)


def _by_rows(spec: Spec, fn, *args):
    """Runs `fn` on `spec.rows` batch rows at a time, so that each group fits in cache and skips tiles by its
    intervals.
    """
    if spec.rows == args[0].shape[0]:
        return fn(spec, *args)
    # [B, ...] -> [B / rows, rows, ...], and back
    split = jax.tree.map(lambda x: x.reshape(-1, spec.rows, *x.shape[1:]), args)
    joined = lax.map(lambda group: fn(spec, *group), split)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joined)


# ---------------------------------------------------------------------------------------------- forward


def _forward(spec: Spec, q, k, v, bias, k_start, k_end):
    rows, keys, values = _cut(spec, q, k, v, bias, k_start, k_end)
    _, (out, lse) = scan(lambda _, row: (None, _forward_block(spec, row, keys, values)), None, rows)
    return _unfold(out, *q.shape[1:3]), _unfold(lse[..., None], *q.shape[1:3])[..., 0]


def _forward_block(spec: Spec, row: Rows, keys, values):
    """Attends from one block of queries to all keys visible to it, by the online softmax."""
    peak, total, acc = _forward_sums(spec, row, keys, values)
    # Divide once, after the last block: the sums are exp(x - peak), so lse = peak + log(total).
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    return (acc / safe[..., None]).astype(row.q.dtype), jnp.where(seen, peak + jnp.log(safe), -jnp.inf)


def _forward_sums(spec: Spec, row: Rows, keys, values) -> tuple[Array, Array, Array]:
    """Returns each row's largest logit, and relative to it the sums of exponentials and of the values times these."""
    compute, width = _compute_dtype(row.q), values.x.shape[-1]
    # The smallest finite number instead of -inf: rows without a visible key so far would give -inf - -inf = NaN.
    floor = jnp.finfo(compute).min
    if keys.block == keys.length:
        return _tile_sums(spec, row, keys, values, 0, floor)
    zeros = _zeros(row.q.shape[:-1], compute, row.q)  # [B, K, R]
    init = zeros + floor, zeros, _zeros((*row.q.shape[:-1], width), compute, row.q)

    def step(j, carry):
        return _forward_tile(spec, row, keys, values, j, *carry)

    return lax.fori_loop(*_visited(row, keys), step, init)


def _forward_tile(spec: Spec, row: Rows, keys, values, j, peak, total, acc):
    # The sums so far are relative to the old maximum m: rescale them by exp(m - m') before adding the new block.
    new_peak, new_total, new_acc = _tile_sums(spec, row, keys, values, j, peak)
    shrink = jnp.exp(peak - new_peak)
    return new_peak, total * shrink + new_total, acc * shrink[..., None] + new_acc


def _tile_sums(spec: Spec, row: Rows, keys, values, j, floor):
    """Returns the sums of `_forward_sums` over one block of keys, relative to a maximum that is at least `floor`."""
    logits, _ = _logits(spec, row, keys, j)  # [B, K, R, c]
    peak = jnp.maximum(floor, jnp.max(logits, axis=-1))
    probs = jnp.exp(logits - peak[..., None])
    return peak, jnp.sum(probs, axis=-1), _dot("BKRc,BKcH->BKRH", probs, values[j])


# ---------------------------------------------------------------------------------------------- backward


def _backward(spec: Spec, q, k, v, bias, k_start, k_end, lse, delta, d_out):
    rows, keys, values = _cut(spec, q, k, v, bias, k_start, k_end)
    lse, delta = (_fold(x[..., None], k.shape[2], spec.block_q)[..., 0] for x in (lse, delta))
    d_out = _fold(d_out, k.shape[2], spec.block_q)

    def block(totals, xs):
        return _backward_block(spec, keys, values, totals, *xs)

    totals = keys.zeros(rows.q), values.zeros(rows.q)
    (dk, dv), (dq, d_bias) = scan(block, totals, (rows, lse, delta, d_out))
    return _unfold(dq, *q.shape[1:3]), _turn(dk).astype(k.dtype), _turn(dv).astype(v.dtype), d_bias


def _backward_block(spec: Spec, keys, values, totals, row: Rows, lse, delta, d_out):
    """Computes dq and d_bias of one block of queries, and adds its share to the totals of dk and dv."""
    dtype = _compute_dtype(row.q)
    d_bias = None if row.bias is None else _zeros(row.bias.shape, dtype, row.q)
    init = *totals, _zeros(row.q.shape, dtype, row.q), d_bias

    def step(j, carry):
        return _backward_tile(spec, row, keys, values, lse, delta, d_out, j, *carry)

    dk, dv, dq, d_bias = _over_visible(row, keys, step, init)
    return (dk, dv), (dq.astype(row.q.dtype), jax.tree.map(lambda d, bias: d.astype(bias.dtype), d_bias, row.bias))


def _backward_tile(spec: Spec, row: Rows, keys, values, lse, delta, d_out, j, dk, dv, dq, d_bias):
    logits, slope = _logits(spec, row, keys, j)
    # Recompute the probabilities, softmax(x) = exp(x - lse), without a second pass over the keys.
    probs = jnp.exp(logits - lse[..., None])
    d_logits = probs * (_dot("BKRH,BKcH->BKRc", d_out, values[j]) - delta[..., None])
    d_scores = d_logits * slope  # chain rule through the scale and the soft-cap
    # [B, K, R, c] times the block's keys, queries and output gradients; dk and dv are summed over blocks of queries.
    dq = dq + _dot("BKRc,BKcH->BKRH", d_scores, keys[j])
    dk = keys.add(dk, j, _dot("BKRc,BKRH->BKcH", d_scores, row.q))
    dv = values.add(dv, j, _dot("BKRc,BKRH->BKcH", probs, d_out))
    if d_bias is not None:
        axes = [a for a in (0, 1) if d_bias.shape[a] == 1]  # summed where the bias was broadcast
        d_bias = _add_slice(d_bias, jnp.sum(d_logits, axis=axes, keepdims=True), keys.first(j), axis=-1)
    return dk, dv, dq, d_bias


# ---------------------------------------------------------------------------------------------- one tile


def _over_visible(row: Rows, keys, step, init):
    """Runs `step(j, carry)` on each block of keys that is visible to any row."""
    if keys.block == keys.length:
        return step(0, init)
    return lax.fori_loop(*_visited(row, keys), step, init)


def _visited(row: Rows, keys) -> tuple[Array, Array]:
    """Returns the range `[first, last)` of key blocks visible to any row of this block; empty if all rows are."""
    seen = row.start < row.end
    first = jnp.min(jnp.where(seen, row.start, keys.length))
    last = jnp.max(jnp.where(seen, jnp.minimum(row.end, keys.length), 0))
    return jnp.maximum(first, 0) // keys.block, (last + keys.block - 1) // keys.block


def _logits(spec: Spec, row: Rows, keys, j) -> tuple[Array, Array | float]:
    """Returns the tile's logits, `-inf` where masked, and their derivative with respect to the dot products."""
    logits, slope = _products(row.q, keys[j]) * spec.scale, spec.scale
    if spec.softcap is not None:
        bent = jnp.tanh(logits / spec.softcap)
        logits, slope = spec.softcap * bent, spec.scale * (1.0 - bent * bent)  # tanh' = 1 - tanh^2
    if row.bias is not None:
        logits = logits + lax.dynamic_slice_in_dim(row.bias, keys.first(j), keys.block, axis=-1).astype(logits.dtype)
    index = (keys.first(j) + jnp.arange(keys.block, dtype=jnp.int32))[None, None, None]
    # The last block is shifted back to end with the array; mask the keys that it shares with the previous block.
    visible = (index >= jnp.maximum(row.start, j * keys.block)[..., None]) & (index < row.end[..., None])
    return jnp.where(visible, logits, -jnp.inf), slope


def _products(q, keys):
    """Multiplies `B K R H` by `B K c H` to `B K R c`."""
    if q.shape[2] > _FEW_ROWS or q.dtype != jnp.float32 or current_device()[0] != "cpu":
        return _dot("BKRH,BKcH->BKRc", q, keys)
    # Row by row: for a vector XLA reads the keys as they are, for a matrix it rearranges them first (bfloat16: both).
    return jnp.stack([_dot("BKcH,BKH->BKc", keys, q[:, :, row]) for row in range(q.shape[2])], axis=2)


def _dot(spec: str, x, y):
    """Multiplies in y's precision and accumulates in at least float32."""
    return jnp.einsum(spec, x.astype(y.dtype), y, preferred_element_type=_compute_dtype(y))


def _add_slice(x, update, start, axis: int):
    old = lax.dynamic_slice_in_dim(x, start, update.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, old + update, start, axis)


# ---------------------------------------------------------------------------------------------- layouts


def _cut(spec: Spec, q, k, v, bias, k_start, k_end):
    """Splits the queries into blocks, and prepares keys and values to be read in blocks."""
    K, groups = k.shape[2], q.shape[2] // k.shape[2]
    ends = (jnp.broadcast_to(e[:, :, None, None], (*e.shape, groups, 1)) for e in (k_start, k_end))
    start, end = (_fold(e, 1, spec.block_q)[..., 0] for e in ends)
    rows = Rows(_fold(q, K, spec.block_q), start, end, bias)
    keys, values = (_KeyBlocks(x, spec.block_k, q.dtype) for x in (k, v))
    return rows, keys, values


class _KeyBlocks:
    """Keys or values, `B S K H`, read as blocks `B K c H` in the queries' dtype.

    The whole array is transposed to heads-first once. Caches are stored so, and XLA drops their transposition: a long
    one is neither copied nor read beyond its visible part.
    """

    def __init__(self, x, block: int, dtype):
        self.x, self.block, self.dtype, self.length = _turn(x), block, dtype, x.shape[1]

    def first(self, j):
        """Returns the first key of block `j`. The last block ends with the array, so keys are never padded."""
        return jnp.minimum(j * self.block, self.length - self.block)

    def __getitem__(self, j):
        return lax.dynamic_slice_in_dim(self.x, self.first(j), self.block, axis=2).astype(self.dtype)

    def zeros(self, like):
        return _zeros(self.x.shape, _compute_dtype(like), like)

    def add(self, total, j, update):
        return _add_slice(total, update, self.first(j), axis=2)


def _turn(x):
    """Swaps the sequence and head axes: `B S K H` to `B K S H`, and back."""
    return jnp.swapaxes(x, 1, 2)


def _fold(x, num_kv_heads: int, block_q: int):
    """Folds `B T N H` into `Q B K (G t) H`; queries padded at the end have empty intervals and no gradient."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_q), (0, 0), (0, 0)))
    return einops.rearrange(x, "B (Q t) (K G) H -> Q B K (G t) H", t=block_q, K=num_kv_heads)


def _unfold(x, num_queries: int, num_heads: int):
    """Inverts `_fold`: `Q B K (G t) H` to `B T N H`, without the padding."""
    groups = num_heads // x.shape[2]
    return einops.rearrange(x, "Q B K (G t) H -> B (Q t) (K G) H", G=groups)[:, :num_queries]


def _fold_bias(bias, num_heads: int, num_kv_heads: int, block_q: int):
    """Folds `#B #N T S` into `Q #B #K (G t) S`; autodiff inverts it for the gradient."""
    groups = num_heads // num_kv_heads
    if bias.shape[1] == 1:
        bias = jnp.broadcast_to(bias, (bias.shape[0], groups, *bias.shape[2:]))
    return _fold(jnp.swapaxes(bias, 1, 2), bias.shape[1] // groups, block_q)


def _compute_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _zeros(shape, dtype, like):
    return vary_alike((jnp.zeros(shape, dtype), like))[0]
