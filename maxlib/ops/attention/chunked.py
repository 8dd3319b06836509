"""Blockwise attention in plain XLA: every feature, any backend, memory linear in the sequence length.

A tile is one block of queries against one block of keys. Queries are scanned block by block; each block visits only
the key blocks between its rows' smallest `k_start` and largest `k_end`, so masked tiles cost nothing. The backward pass
sweeps the same tiles in the same order and computes all gradients of a tile together, recomputing its
probabilities from the log-sum-exp. Hence neither pass needs the intervals' ends to be monotone.

Letters inside this file: Q query blocks, R the rows of one block (the G query heads of a key head, times t
queries: grouped heads share a matmul and keys are never repeated), c the keys of one block.
"""

from typing import NamedTuple

import einops
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib.ops.attention.sinks import merge_sinks


class Spec(NamedTuple):
    """What is known when tracing: the maths, and how the work is cut. `rows` batch rows share a tile."""

    scale: float
    softcap: float | None
    block_q: int
    block_k: int
    rows: int


class Rows(NamedTuple):
    """Everything about queries, in blocks: leading axis Q, then `B K R ...`; bounds are `Q B 1 R`."""

    q: Array
    start: Array
    end: Array
    bias: Array | None  # Q #B #K R S


def chunked(
    q: Float[Array, "B T N Hk"],
    k: Float[Array, "B S K Hk"],
    v: Float[Array, "B S K Hv"],
    *,
    k_start: Int[Array, "B T"],
    k_end: Int[Array, "B T"],
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, " N"] | None = None,
    bias: Float[Array, "#B #N T S"] | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"]]:
    """Returns the output and the log-sum-exp of each row's logits, as `reference` does.

    Blocks are chosen from the shapes unless given. Differentiable once (reverse mode) in q, k, v, sinks and bias.
    """
    spec = choose_blocks(q, k, scale, softcap, block_q, block_k, whole_batch=bias is not None)
    bias = None if bias is None else _fold_bias(bias, q.shape[2], k.shape[2], spec.block_q)
    # Under shard_map all operands vary alike from here on; the transpose of this sums the gradients of replicated ones.
    arrays = _vary_alike((q, k, v, bias, k_start.astype(jnp.int32), k_end.astype(jnp.int32)))
    out, lse = _attend(spec, *arrays)
    return (out, lse) if sinks is None else merge_sinks(out, lse, sinks)


def choose_blocks(q, k, scale, softcap=None, block_q=None, block_k=None, *, whole_batch=False) -> Spec:
    """Tiles of about 2 MiB stay in a CPU's cache, which measured fastest; few queries take longer blocks of keys."""
    (B, T, N, _), S = q.shape, k.shape[1]
    block_q = _even(T, 128, 1) if block_q is None else min(block_q, T)
    block_k = _even(S, 128 if T > 32 else 256, 16) if block_k is None else min(block_k, S)
    fitting = max(1, 2**19 // (N * block_q * block_k))
    rows = B if whole_batch else max(r for r in range(1, B + 1) if B % r == 0 and r <= fitting)
    return Spec(scale, softcap, block_q, block_k, rows)


def _even(length: int, block: int, multiple: int) -> int:
    """The smallest block that cuts `length` in as many pieces as `block` would, so that little is padded."""
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


def _attend_bwd(spec: Spec, residuals, cotangents):
    args, out, lse = residuals
    d_out, d_lse = cotangents
    delta = jnp.sum(d_out.astype(lse.dtype) * out.astype(lse.dtype), axis=-1) - d_lse
    delta = jnp.where(jnp.isfinite(lse), delta, 0.0)
    dq, dk, dv, d_bias = _by_rows(spec, _backward, *args, jnp.where(jnp.isfinite(lse), lse, 0.0), delta, d_out)
    return dq, dk, dv, d_bias, None, None


_attend = jax.custom_vjp(_attend, nondiff_argnums=(0,))
_attend.defvjp(_attend_fwd, _attend_bwd)


def _by_rows(spec: Spec, fn, *args):
    """Runs `fn` on `spec.rows` batch rows at a time: each group skips by its own intervals and fits in cache."""
    if spec.rows == args[0].shape[0]:
        return fn(spec, *args)
    split = jax.tree.map(lambda x: x.reshape(-1, spec.rows, *x.shape[1:]), args)
    joined = lax.map(lambda group: fn(spec, *group), split)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), joined)


# ---------------------------------------------------------------------------------------------- the two passes


def _forward(spec: Spec, q, k, v, bias, k_start, k_end):
    (B, T, N, _), (S, K), compute = q.shape, k.shape[1:3], _compute_dtype(q)
    rows = _fold_rows(spec, q, bias, k_start, k_end, K)
    keys, values = _KeyBlocks(k, spec, rows), _KeyBlocks(v, spec, rows)
    stat = _vary_alike((jnp.zeros(rows.q.shape[1:-1], compute), q))[0]

    def block(_, row: Rows):
        def tile(j, carry):
            peak, total, acc = carry
            logits, _ = _logits(spec, row, keys[j], j, S, compute)
            new_peak = jnp.maximum(peak, jnp.max(logits, axis=-1))
            # The barrier keeps XLA from computing the exponentials twice, once for their sum.
            probs = lax.optimization_barrier(jnp.exp(logits - new_peak[..., None]))
            shrink = jnp.exp(peak - new_peak)
            acc = acc * shrink[..., None] + _dot("BKRc,BKcH->BKRH", probs.astype(v.dtype), values[j], compute)
            return new_peak, total * shrink + jnp.sum(probs, axis=-1), acc

        # The smallest finite number, not -inf, so that rows which have seen nothing yet stay free of NaN.
        init = stat + jnp.finfo(compute).min, stat, jnp.repeat(stat[..., None], v.shape[-1], axis=-1)
        peak, total, acc = lax.fori_loop(*_visited(row, S, spec.block_k), tile, init)
        safe = jnp.where(total > 0, total, 1.0)
        lse = jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
        return None, ((acc / safe[..., None]).astype(q.dtype), lse)

    _, (out, lse) = lax.scan(block, None, rows)
    return _unfold(out, T, N), _unfold(lse[..., None], T, N)[..., 0]


def _backward(spec: Spec, q, k, v, bias, k_start, k_end, lse, delta, d_out):
    (B, T, N, _), (S, K), compute = q.shape, k.shape[1:3], _compute_dtype(q)
    rows = _fold_rows(spec, q, bias, k_start, k_end, K)
    keys, values = _KeyBlocks(k, spec, rows), _KeyBlocks(v, spec, rows)
    lse, delta = (_fold(x[..., None], K, spec.block_q)[..., 0] for x in (lse, delta))
    d_out = _fold(d_out, K, spec.block_q)

    def block(d_keys, xs):
        row, lse, delta, d_out = xs

        def tile(j, carry):
            dq, dk, dv, d_bias = carry
            logits, slope = _logits(spec, row, keys[j], j, S, compute)
            probs = jnp.exp(logits - lse[..., None])
            d_probs = _dot("BKRH,BKcH->BKRc", d_out, values[j], compute)
            d_logits = probs * (d_probs - delta[..., None])
            d_bias = None if d_bias is None else _put_bias(d_bias, d_logits, j, spec, S)
            d_scores = (d_logits * slope).astype(q.dtype)
            dv = keys.add(dv, j, _dot("BKRc,BKRH->BKcH", probs.astype(d_out.dtype), d_out, compute))
            dk = keys.add(dk, j, _dot("BKRc,BKRH->BKcH", d_scores, row.q, compute))
            return dq + _dot("BKRc,BKcH->BKRH", d_scores, keys[j], compute), dk, dv, d_bias

        init = (_like(row.q, compute), *d_keys, None if row.bias is None else _like(row.bias, compute))
        dq, *d_keys, d_bias = lax.fori_loop(*_visited(row, S, spec.block_k), tile, init)
        return tuple(d_keys), (dq.astype(q.dtype), None if bias is None else d_bias.astype(bias.dtype))

    init = keys.zeros(compute, like=rows.q), values.zeros(compute, like=rows.q)
    (dk, dv), (dq, d_bias) = lax.scan(block, init, (rows, lse, delta, d_out))
    return _unfold(dq, T, N), keys.back(dk, k.dtype), values.back(dv, v.dtype), d_bias


# ---------------------------------------------------------------------------------------------- one tile


def _visited(row: Rows, num_keys: int, block_k: int) -> tuple[Array, Array]:
    """The key blocks `[first, last)` that any row of this query block can see; none when all rows are empty."""
    seen = row.start < row.end
    first = jnp.min(jnp.where(seen, row.start, num_keys))
    last = jnp.max(jnp.where(seen, row.end, 0))
    return first // block_k, (jnp.minimum(last, num_keys) + block_k - 1) // block_k


def _logits(spec: Spec, row: Rows, keys, j, num_keys: int, compute) -> tuple[Array, Array | float]:
    """The tile's logits, `-inf` where masked, and their derivative with respect to the bare dot products."""
    logits, slope = _dot("BKRH,BKcH->BKRc", row.q, keys, compute) * spec.scale, spec.scale
    if spec.softcap is not None:
        bent = jnp.tanh(logits / spec.softcap)
        logits, slope = spec.softcap * bent, spec.scale * (1.0 - bent * bent)
    first = _first_key(j, spec.block_k, num_keys)
    if row.bias is not None:
        logits = logits + lax.dynamic_slice_in_dim(row.bias, first, spec.block_k, axis=-1).astype(compute)
    index = (first + jnp.arange(spec.block_k, dtype=jnp.int32))[None, None, None]
    # The last block may reach back over keys of the one before (see `_first_key`): those were counted there.
    visible = (index >= jnp.maximum(row.start, j * spec.block_k)[..., None]) & (index < row.end[..., None])
    return jnp.where(visible, logits, -jnp.inf), slope


def _put_bias(d_bias, d_logits, j, spec: Spec, num_keys: int):
    """Adds one tile to the bias gradient `#B #K R S`, summed over the axes that the bias is broadcast along."""
    axes = [a for a in (0, 1) if d_bias.shape[a] == 1 and d_logits.shape[a] != 1]
    return _add_slice(d_bias, jnp.sum(d_logits, axis=axes, keepdims=True), _first_key(j, spec.block_k, num_keys), -1)


def _first_key(j, block_k: int, num_keys: int):
    """Where key block `j` starts. The last block is moved back to end with the array, so keys are never padded."""
    return jnp.minimum(j * block_k, num_keys - block_k)


def _add_slice(x, update, start, axis: int):
    old = lax.dynamic_slice_in_dim(x, start, update.shape[axis], axis)
    return lax.dynamic_update_slice_in_dim(x, old + update, start, axis)


def _dot(spec: str, x, y, compute):
    return jnp.einsum(spec, x, y, preferred_element_type=compute)


# ---------------------------------------------------------------------------------------------- layouts


class _KeyBlocks:
    """Keys or values, `B S K H`, read as blocks `B K c H`.

    The whole array is laid out heads-first once, unless there is a single query block (decoding): then each
    block is turned as it is read, and a long cache is neither copied nor read beyond what is visible.
    """

    def __init__(self, x, spec: Spec, rows: Rows):
        self.once, self.block = rows.q.shape[0] > 1, spec.block_k
        self.x = _turn(x) if self.once else x
        self.shape = _turn(x).shape

    def __getitem__(self, j):
        first = _first_key(j, self.block, self.shape[2])
        if self.once:
            return lax.dynamic_slice_in_dim(self.x, first, self.block, axis=2)
        return _turn(lax.dynamic_slice_in_dim(self.x, first, self.block, axis=1))

    def zeros(self, compute, like):
        return _vary_alike((jnp.zeros(self.shape, compute), like))[0]

    def add(self, total, j, update):
        return _add_slice(total, update, _first_key(j, self.block, self.shape[2]), axis=2)

    def back(self, total, dtype):
        return _turn(total).astype(dtype)


def _turn(x):
    return jnp.swapaxes(x, 1, 2)


def _fold_rows(spec: Spec, q, bias, k_start, k_end, num_kv_heads: int) -> Rows:
    groups = q.shape[2] // num_kv_heads
    ends = (jnp.broadcast_to(e[:, :, None, None], (*e.shape, groups, 1)) for e in (k_start, k_end))
    start, end = (_fold(e, 1, spec.block_q)[..., 0] for e in ends)
    return Rows(_fold(q, num_kv_heads, spec.block_q), start, end, bias)


def _fold(x, num_kv_heads: int, block_q: int):
    """`B T N H` to `Q B K (G t) H`; what is padded at the end has empty intervals and no gradient."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block_q), (0, 0), (0, 0)))
    return einops.rearrange(x, "B (Q t) (K G) H -> Q B K (G t) H", t=block_q, K=num_kv_heads)


def _unfold(x, num_queries: int, num_heads: int):
    groups = num_heads // x.shape[2]
    return einops.rearrange(x, "Q B K (G t) H -> B (Q t) (K G) H", G=groups)[:, :num_queries]


def _fold_bias(bias, num_heads: int, num_kv_heads: int, block_q: int):
    """`#B #N T S` to `Q #B #K (G t) S`; autodiff undoes it."""
    groups = num_heads // num_kv_heads
    if bias.shape[1] == 1:
        bias = jnp.broadcast_to(bias, (bias.shape[0], groups, *bias.shape[2:]))
    return _fold(jnp.swapaxes(bias, 1, 2), bias.shape[1] // groups, block_q)


def _compute_dtype(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _like(x, dtype):
    return _vary_alike((jnp.zeros(x.shape, dtype), x))[0]


def _vary_alike(arrays):
    """Makes arrays vary over the same mesh axes, which loops inside `shard_map` insist on; elsewhere does nothing."""
    varying = lambda x: jax.typeof(x).manual_axis_type.varying
    axes = frozenset().union(*(varying(x) for x in jax.tree.leaves(arrays)))
    missing = lambda x: tuple(sorted(axes - varying(x)))
    return jax.tree.map(lambda x: lax.pcast(x, missing(x), to="varying") if missing(x) else x, arrays)
