"""The backward kernels: one for dq, and one for dk and dv. No atomics, so results are the same in every run.

Both recompute a tile's probabilities from the log-sum-exp. With `delta`, the row sums of d_out * out minus d_lse:
d_logits = probs * (d_out v - delta), dq = scale d_logits k, dk = scale d_logits^T q, dv = probs^T d_out.

`queries` visits tiles as the forward kernel does: queries stay, keys and values stream. `keys` is its transpose: keys
and values stay, and all query heads that share them stream past, so that their gradients are summed in registers. If
that leaves processors without work, each block of threads takes a part of these heads and writes its sums in float32;
XLA adds the parts, always in the same order.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from maxlib.kernels import _compat
from maxlib.kernels.attention.logits import Logits
from maxlib.kernels.attention.mosaic_gpu import config, memory
from maxlib.kernels.attention.mosaic_gpu.config import ROWS, Tiles
from maxlib.kernels.attention.mosaic_gpu.logits import hide, probabilities, settle, spread
from maxlib.kernels.attention.tiles import causal_tiles, tiles_of, walk

BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class Operands(NamedTuple):
    """Inputs of both kernels. `lse` is in base 2, `+inf` for empty rows and padding."""

    q: Float[Array, "B T N Hk"]
    k: Float[Array, "B S K Hk"]
    v: Float[Array, "B S K Hv"]
    d_out: Float[Array, "B T N Hv"]
    lse: Float[Array, "B N P"]
    delta: Float[Array, "B N P"]
    start: Any  # B P
    end: Any

    def pairs(self, block_q: int, block_k: int) -> int:
        """Counts the pairs of a query and a key in visited tiles of this size, under a causal mask."""
        (B, _, N, _), S, P = self.q.shape, self.k.shape[1], self.lse.shape[2]
        return B * N * causal_tiles(-(-P // block_q), -(-S // block_k)) * block_q * block_k


def _accumulate(totals, *products):
    """Adds a matmul to each of `totals` (in registers); all of them are in flight together."""

    def run(refs):
        for ref, (a, b) in zip(refs, products, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(run)(tuple(plgpu.WGMMAAccumulatorRef.init(total) for total in totals))


def _zeros(width: int):
    return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)


def _launch(name: str, kernel, out_type, scratch, grid, axes, tiles: Tiles, *, pairs: int, width: int):
    """Builds a kernel that computes `pairs` pairs of a query and a key, with matmuls `width` wide in total."""
    return _compat.kernel(
        kernel,
        out_type=out_type,
        scratch_types=(scratch,),
        grid=grid,
        grid_names=axes,
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        kernel_name="attention_" + name,
        compiler_params=_compat.compiler_params(),
        flops=2 * pairs * width,
        exps=pairs,
    )


# ---------------------------------------------------------------------------------------------- dq


class QueryScratch(NamedTuple):
    """Shared memory and barriers of the kernel for dq."""

    q: Any  # W r Hk; dq leaves through it
    d_out: Any  # W r Hv
    k: memory.Stream  # stage c Hk
    v: memory.Stream  # stage c Hv
    loaded: Any


def queries(operands: Operands, *, logits: Logits, tiles: Tiles) -> Float[Array, "B T N Hk"]:
    """Computes the gradient of the queries."""
    (B, T, N, Hk), (S, _, Hv), W = operands.q.shape, operands.v.shape[1:], tiles.warpgroups
    visits = walk(*tiles_of(operands.start, operands.end, S, tiles.rows, tiles.columns))
    shared = memory.matrices(operands.q.dtype, Hk, Hv, tiles.columns)
    scratch = QueryScratch(
        q=shared(W, ROWS, Hk),
        d_out=shared(W, ROWS, Hv),
        k=memory.stream(tiles, shared(tiles.stages, tiles.columns, Hk)),
        v=memory.stream(tiles, shared(tiles.stages, tiles.columns, Hv)),
        loaded=memory.barrier(W, 2),
    )
    kernel = functools.partial(_queries_kernel, logits=logits, tiles=tiles)
    out, grid = jax.ShapeDtypeStruct((B, T, N, Hk), operands.q.dtype), (N, visits.shape[1], B)
    # Three matmuls per tile: q k and d_logits k, both Hk wide, and d_out v, Hv wide.
    cost = {"pairs": operands.pairs(tiles.rows, tiles.columns), "width": 2 * Hk + Hv}
    return _launch("dq", kernel, out, scratch, grid, ("head", "tile", "batch"), tiles, **cost)(*operands, visits)


def _queries_kernel(*refs, logits: Logits, tiles: Tiles):
    (q, k, v, d_out, lse, delta, start, end), (visits, dq, scratch) = Operands(*refs[:8]), refs[8:]
    batch, head, warpgroup = (lax.axis_index(name) for name in ("batch", "head", "warpgroup"))
    tile = visits.shape[1] - 1 - lax.axis_index("tile")
    first, visited, full_first, full = (_compat.number(visits[batch, tile, i]) for i in range(4))

    def first_key(step):
        return memory.column(step, first, full_first, full) * tiles.columns

    @pl.when(warpgroup < tiles.warpgroups)
    def _compute():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        rows = pl.ds(tile * tiles.rows + warpgroup * ROWS, ROWS)
        local = scratch._replace(q=memory.local(scratch.q, warpgroup), d_out=memory.local(scratch.d_out, warpgroup))
        memory.load(
            scratch.loaded.at[warpgroup],
            (q.at[batch, rows, head], local.q()),
            (d_out.at[batch, rows, head], local.d_out()),
        )
        ends = [lambda x=_compat.load(x.at[batch, rows], BY_ROW): x for x in (start, end)]
        stats = [lambda x=_compat.load(x.at[batch, head, rows], BY_ROW): x for x in (lse, delta)]

        def ahead(i):
            memory.ahead(local.k, i, visited, tiles.stages)

        step = functools.partial(_queries_step, local, first_key, ends, stats, ahead, logits=logits, tiles=tiles)
        ahead(jnp.int32(0))
        total = lax.fori_loop(0, full, functools.partial(step, masked=False), _zeros(q.shape[3]))
        total = lax.fori_loop(full, visited, functools.partial(step, masked=True), total)
        local.q()[...] = (total * logits.scale).astype(q.dtype)
        memory.store((local.q(), dq.at[batch, rows, head]))

    @pl.when(warpgroup == tiles.warpgroups)
    def _memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")
        kv_head = lax.div(head, jnp.int32(q.shape[2] // k.shape[2]))

        @pl.loop(0, visited)
        def _(step):
            keys = batch, pl.ds(first_key(step), tiles.columns), kv_head
            memory.feed(step, tiles.stages, [(scratch.k, (k.at[keys],)), (scratch.v, (v.at[keys],))])


def _queries_step(local, first_key, ends, stats, ahead, i, total, *, masked: bool, logits: Logits, tiles: Tiles):
    """Adds one block of keys to dq, without the factor `scale`; `ahead` waits for the keys of a step."""
    slot = lax.rem(i, jnp.int32(tiles.stages))
    (k, v), (lse, delta) = (x.buffers[0].at[slot] for x in (local.k, local.v)), stats

    def tile(scores, d_probs):
        plgpu.wgmma(scores, local.q(), _compat.transpose(k))  # the step before has waited for the keys
        plgpu.barrier_wait(local.v.ready.at[slot])
        plgpu.wgmma(d_probs, local.d_out(), _compat.transpose(v))
        bent = logits.bend(plgpu.wgmma_accumulator_load(scores, wait_n=1))
        mask = (lambda x: hide(x, ends, first_key(i), axis=1)) if masked else (lambda x: x)
        weights = logits.slope(bent, probabilities(logits, bent, mask, lse, axis=0))
        weights, d_probs = settle(weights, d_probs, lambda: ahead(i + 1))
        return weights * (d_probs - spread(delta(), d_probs))

    shape = plgpu.WGMMAAccumulatorRef((ROWS, tiles.columns), jnp.float32)
    d_products = pl.run_scoped(tile, shape, shape)
    plgpu.barrier_arrive(local.v.free.at[slot])  # v is done with; k is needed for dq += d_logits k
    (total,) = _accumulate([total], (d_products.astype(k.dtype), k))
    plgpu.barrier_arrive(local.k.free.at[slot])
    return total


# ---------------------------------------------------------------------------------------------- dk and dv


class KeyScratch(NamedTuple):
    """Shared memory and barriers of the kernels for dk and dv."""

    k: Any  # W r Hk; dk leaves through it
    v: Any  # W r Hv; dv leaves through it
    q: memory.Stream  # stage c Hk, and the log-sum-exp and interval of each query
    d_out: memory.Stream  # stage c Hv, and delta
    loaded: Any
    finished: Any
    sums: Any  # W r and a few columns of a gradient in float32; None if a block of threads sums over all heads


def keys(
    operands: Operands, wanted: tuple[str, ...], *, logits: Logits, tiles: Tiles
) -> tuple[Float[Array, "B S K _"], ...]:
    """Computes the gradients of keys and values that are `wanted`, of "dk" and "dv" in this order."""
    (B, S, K, Hk), Hv = operands.k.shape, operands.v.shape[3]
    # [B, Q, C] -> [B, C, Q]: a block of keys visits the blocks of queries that attend to it.
    tiled = tiles_of(operands.start, operands.end, S, tiles.columns, tiles.rows)
    visits = walk(*(jnp.swapaxes(x, 1, 2) for x in tiled))
    parts = config.key_gradient_parts(visits.shape[0] * visits.shape[1] * K, operands.q.shape[2] // K)
    kernel = functools.partial(_keys_kernel, wanted=wanted, parts=parts, logits=logits, tiles=tiles)
    like, dtype = {"dk": operands.k, "dv": operands.v}, operands.k.dtype if parts == 1 else jnp.float32
    # The parts of one batch row follow each other in the batch axis: the memory unit's arrays have at most five axes.
    out = tuple(jax.ShapeDtypeStruct((B * parts, *like[name].shape[1:]), dtype) for name in wanted)
    scratch = _key_scratch(operands.q.dtype, Hk, Hv, wanted, parts, tiles)
    name, grid = "_".join(wanted) + ("_parts" if parts > 1 else ""), (K * parts, visits.shape[1], B)
    widths = {"dk": Hk + Hv, "dv": Hv}  # in addition to q k
    cost = {"pairs": operands.pairs(tiles.columns, tiles.rows), "width": Hk + sum(widths[name] for name in wanted)}
    sums = _launch(name, kernel, out, scratch, grid, ("part", "tile", "batch"), tiles, **cost)(*operands, visits)
    return sums if parts == 1 else tuple(_add_parts(x, parts).astype(operands.k.dtype) for x in sums)


def _add_parts(sums: Float[Array, "BP S K H"], parts: int) -> Float[Array, "B S K H"]:
    """Adds the parts of each batch row, one after the other, so that the order is the same in every run."""
    sums = sums.reshape(-1, parts, *sums.shape[1:])
    return sum((sums[:, i] for i in range(1, parts)), sums[:, 0])


def _key_scratch(dtype, key_dim: int, value_dim: int, wanted: tuple[str, ...], parts: int, tiles: Tiles):
    """Allocates K and V; if dk is not wanted, V is not read and dv is stored over K."""
    chunk = math.gcd(32, key_dim, value_dim)
    sums = memory.matrices(jnp.float32, chunk)(tiles.warpgroups, ROWS, chunk)
    shared = memory.matrices(dtype, key_dim, value_dim, tiles.columns)
    keys, values = shared(tiles.warpgroups, ROWS, key_dim), shared(tiles.warpgroups, ROWS, value_dim)
    block = (tiles.stages, tiles.columns)
    numbers, ends = plgpu.SMEM(block, jnp.float32), [plgpu.SMEM(block, jnp.int32)] * 2
    scratch = KeyScratch(
        k=keys,
        v=values,
        q=memory.stream(tiles, shared(*block, key_dim), numbers, *ends),
        d_out=memory.stream(tiles, shared(*block, value_dim), numbers),
        loaded=memory.barrier(tiles.warpgroups, 2 if "dk" in wanted else 1),
        finished=memory.barrier(1, tiles.warpgroups),
        sums=sums if parts > 1 else None,
    )
    return scratch if "dk" in wanted else scratch._replace(k=plgpu.RefUnion(keys, values), v=None)


def _keys_kernel(*refs, wanted, parts: int, logits: Logits, tiles: Tiles):
    (q, k, v, d_out, lse, delta, start, end), (visits, *outputs, scratch) = Operands(*refs[:8]), refs[8:]
    batch, index, warpgroup, tile = (lax.axis_index(name) for name in ("batch", "part", "warpgroup", "tile"))
    kv_head, part = lax.div(index, jnp.int32(parts)), lax.rem(index, jnp.int32(parts))
    first, visited, full_first, full = (_compat.number(visits[batch, tile, i]) for i in range(4))

    def first_query(step):
        return memory.column(step, first, full_first, full) * tiles.columns

    groups = q.shape[2] // k.shape[2] // parts  # query heads of this block of threads, from `first_head` on
    first_head = index * groups
    if "dk" not in wanted:
        scratch = scratch._replace(k=scratch.k[0], v=scratch.k[1])

    @pl.when(warpgroup < tiles.warpgroups)
    def _compute():
        plgpu.set_max_registers(tiles.registers[0], action="increase")
        first_key = tile * tiles.rows + warpgroup * ROWS
        place = batch, pl.ds(first_key, ROWS), kv_head
        local = scratch._replace(k=memory.local(scratch.k, warpgroup), v=memory.local(scratch.v, warpgroup))
        read = [(k.at[place], local.k()), (v.at[place], local.v())]
        memory.load(scratch.loaded.at[warpgroup], *read[: 2 if "dk" in wanted else 1])

        def ahead(i):
            memory.ahead(local.q, i, groups * visited, tiles.stages)

        ahead(jnp.int32(0))

        # The query heads of a key head follow each other, so that dk and dv add up in registers.
        def one_head(group, totals):
            done = group * visited
            step = functools.partial(_keys_step, local, first_key, done, wanted, ahead, logits=logits, tiles=tiles)
            totals = lax.fori_loop(0, full, functools.partial(step, masked=False), totals)
            return lax.fori_loop(full, visited, functools.partial(step, masked=True), totals)

        # A constant number of heads lets the assembler join `ahead` with a loop's end, and move the wait (`settle`).
        heads = lax.optimization_barrier(jnp.int32(groups))
        totals = lax.fori_loop(0, heads, one_head, tuple(_zeros(x.shape[3]) for x in outputs))
        totals = [x * logits.scale if name == "dk" else x for name, x in zip(wanted, totals, strict=True)]
        if parts == 1:
            if "dk" not in wanted and k.shape != v.shape:  # then dv of one warpgroup overlaps the keys of another
                memory.finish_together(local.finished.at[0])
            buffers = [{"dk": local.k, "dv": local.v}[name]() for name in wanted]
            _store_gradients(totals, buffers, [x.at[place] for x in outputs])
        else:
            here = batch * parts + part, *place[1:]
            targets = [lambda columns, x=x: x.at[*here, columns] for x in outputs]
            _store_sums(totals, scratch.sums.at[warpgroup], targets)

    @pl.when(warpgroup == tiles.warpgroups)
    def _memory():
        plgpu.set_max_registers(tiles.registers[1], action="decrease")

        @pl.loop(0, groups)
        def _(group):
            @pl.loop(0, visited)
            def _(step):
                rows, head = pl.ds(first_query(step), tiles.columns), first_head + group
                with_q = q.at[batch, rows, head], lse.at[batch, head, rows], start.at[batch, rows], end.at[batch, rows]
                with_d_out = d_out.at[batch, rows, head], delta.at[batch, head, rows]
                memory.feed(group * visited + step, tiles.stages, [(scratch.q, with_q), (scratch.d_out, with_d_out)])


def _store_gradients(totals, buffers, targets):
    """Stores gradients over the keys and values that stayed in shared memory."""
    for buffer, total in zip(buffers, totals, strict=True):
        buffer[...] = total.astype(buffer.dtype)
    memory.store(*zip(buffers, targets, strict=True))


def _store_sums(totals, buffer, targets):
    """Stores float32 sums through a narrow buffer, a few columns at a time."""
    width = buffer.shape[1]
    for total, target in zip(totals, targets, strict=True):
        for left in range(0, total.shape[1], width):
            buffer[...] = lax.slice(total, (0, left), (ROWS, left + width))
            memory.store((buffer, target(pl.ds(left, width))))


def _keys_step(local, first_key, done, wanted, ahead, i, totals, *, masked: bool, logits: Logits, tiles: Tiles):
    """Adds one block of queries to dk and dv. Tiles are transposed: keys are rows and queries columns.

    `ahead` waits for the queries of a step; `done` steps belong to the heads before.
    """
    slot = lax.rem(done + i, jnp.int32(tiles.stages))
    q, d_out = local.q.buffers[0].at[slot], local.d_out.buffers[0].at[slot]
    start, end, lse, delta = (
        lambda x=x: _compat.load(x.at[slot], BY_COLUMN)
        for x in (*local.q.buffers[2:], local.q.buffers[1], local.d_out.buffers[1])
    )

    def tile(scores, *d_probs):
        plgpu.wgmma(scores, local.k(), _compat.transpose(q))  # the step before has waited for the queries
        plgpu.barrier_wait(local.d_out.ready.at[slot])
        for acc in d_probs:
            plgpu.wgmma(acc, local.v(), _compat.transpose(d_out))
        bent = logits.bend(plgpu.wgmma_accumulator_load(scores, wait_n=len(d_probs)))
        mask = (lambda x: hide(x, (start, end), first_key, axis=0)) if masked else (lambda x: x)
        probs = probabilities(logits, bent, mask, lse, axis=1)
        if "dk" not in wanted:
            ahead(done + i + 1)
            return [probs]
        weights = logits.slope(bent, probs)
        ready = probs if "dv" in wanted else weights, weights
        (probs, weights), d_probs = settle(ready, d_probs[0], lambda: ahead(done + i + 1))
        return [weights * (d_probs - spread(delta(), d_probs, axis=1)), probs][: len(wanted)]

    factors = pl.run_scoped(
        tile, *[plgpu.WGMMAAccumulatorRef((ROWS, tiles.columns), jnp.float32)] * (2 if "dk" in wanted else 1)
    )
    others = [{"dk": q, "dv": d_out}[name] for name in wanted]
    totals = _accumulate(totals, *((x.astype(q.dtype), y) for x, y in zip(factors, others, strict=True)))
    plgpu.barrier_arrive(local.q.free.at[slot])
    plgpu.barrier_arrive(local.d_out.free.at[slot])
    return totals
