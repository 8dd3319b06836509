"""The forward and the backward kernel of the gated delta rule for TPUs.

The grid is rows, key heads, blocks of chunks, value heads of the key head. The last two run in order: the states of a
key head's value heads stay in vector memory from the first block to the last one, and queries and keys stay while their
value heads are processed. Within a block the inverses of all chunks come first, as they do not wait for the state.

Shapes: B rows, K key heads, G value heads of each, n blocks, r chunks of a block, C tokens of a chunk.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from maxlib.kernels.gated_delta.chunk import TILE, Chunk, Spec, advance, inverted


class Blocks(NamedTuple):
    """Inputs of the tokens, cut into blocks: `B K n (r C) Hk` q and k, `B K G n (r C) Hv` v, `B K G n r C` rates,
    `B n r C` starts, 1.0 for first tokens of documents.
    """

    q: Any
    k: Any
    v: Any
    log_decay: Any
    beta: Any
    starts: Any

    def chunk(self, i) -> tuple[Chunk, Array]:
        """Reads chunk `i` of a block, and its starts."""
        row, size = pl.ds(i, 1), self.starts.shape[1]
        tokens = pl.ds(pl.multiple_of(i * size, size), size)
        rates = (ref[row, :] for ref in (self.log_decay, self.beta))
        return Chunk(*(ref[tokens, :] for ref in (self.q, self.k, self.v)), *rates), self.starts[row, :]


class _Part(NamedTuple):
    """An array, the axes of the grid that choose its block (B K n G), and the number of its axes that they index."""

    array: Any
    axes: str

    def spec(self, turn: Callable) -> pl.BlockSpec:
        whole = self.array.shape[len(self.axes) :]
        place = lambda b, k, n, g: {"B": b, "K": k, "n": turn(n), "G": g}
        index = lambda *at: (*(place(*at)[axis] for axis in self.axes), *(0 for _ in whole))
        return pl.BlockSpec((*(None for _ in self.axes), *whole), index)


class _Products(NamedTuple):
    """Numbers of a chunk's matmuls: sums of decays, `C C` with `C C`; `C C` with `C Hk` and with `C Hv`; a state with
    tokens. Its inverse is computed once.
    """

    sums: int
    keys: int
    values: int
    states: int

    def flops(self, C: int, Hk: int, Hv: int) -> int:
        doublings = (C // TILE).bit_length() - 1
        inverse = doublings * C**3  # two products each, of half of the rows
        return 2 * (inverse + C * C * (self.sums * C + self.keys * Hk + self.values * Hv) + self.states * C * Hk * Hv)


def forward(
    x: Blocks, state: Float[Array, "B K G Hk Hv"], *, spec: Spec, keep: bool
) -> tuple[Float[Array, "B K G n t Hv"], Float[Array, "B K G Hk Hv"], Float[Array, "B K G n Hk Hv"] | None]:
    """Computes the outputs, the state after the last token and, with `keep`, the state before each block."""
    (*_, r, C), (Hk, Hv) = x.log_decay.shape, state.shape[3:]
    results = [_Part(jax.ShapeDtypeStruct(x.v.shape, x.v.dtype), "BKGn"), _Part(_like(state), "BK")]
    if keep:
        results.append(_Part(jax.ShapeDtypeStruct((*x.v.shape[:4], Hk, Hv), jnp.float32), "BKGn"))
    out, last, *before = _launch(
        "forward",
        functools.partial(_forward_kernel, spec=spec),
        x,
        given=[_Part(state, "BK")],
        results=results,
        scratch=[(r, C, C)],
        products=_Products(sums=2, keys=2, values=2, states=3),
        exps=1,
    )
    return out, last, before[0] if keep else None


def _forward_kernel(*refs, spec: Spec):
    x, (first, out, states, *before, inverses) = Blocks(*refs[:6]), refs[6:]
    g = pl.program_id(3)

    @pl.when(pl.program_id(2) == 0)
    def _():
        states[g] = first[g]

    for ref in before:
        ref[...] = states[g]
    _invert(x, inverses, spec)

    def step(i, state):
        tokens, starts = x.chunk(i)
        found, state = advance(state, tokens, starts, inverses[i], spec)
        out[_tokens(i, x), :] = found.astype(out.dtype)
        return state

    states[g] = jax.lax.fori_loop(0, inverses.shape[0], step, states[g])


def backward(
    x: Blocks,
    before: Float[Array, "B K G n Hk Hv"],
    d_out: Float[Array, "B K G n t Hv"],
    d_last: Float[Array, "B K G Hk Hv"],
    *,
    spec: Spec,
) -> tuple[Blocks, Float[Array, "B K G Hk Hv"]]:
    """Computes the gradients of the tokens' inputs (None for starts) and of the first state.

    It walks the blocks from the last to the first. In each block it recomputes the states before all chunks, then
    processes the chunks in reverse.
    """
    (*_, r, C), (Hk, Hv) = x.log_decay.shape, before.shape[4:]
    like = [_Part(_like(a), axes) for a, axes in zip(x[:5], _AXES, strict=False)]
    *found, d_state = _launch(
        "backward",
        functools.partial(_backward_kernel, spec=spec),
        x,
        given=[_Part(before, "BKGn"), _Part(d_out, "BKGn"), _Part(d_last, "BK")],
        results=[*like, _Part(_like(d_last), "BK")],
        scratch=[(r, C, C), (r, Hk, Hv), (r * C, Hk), (r * C, Hk)],
        # The inverse and the state; the chunk again, without its output and state; and its gradient.
        products=_Products(sums=1 + 1 + 1 + 1, keys=1 + 2 + 4, values=1 + 1 + 4, states=2 + 2 + 6),
        exps=2,
        reverse=True,
    )
    return Blocks(*found, starts=None), d_state


def _backward_kernel(*refs, spec: Spec):
    x, refs = Blocks(*refs[:6]), refs[6:]
    before, d_out, d_last, *grads, d_states, inverses, states, d_q, d_k = refs
    g, count = pl.program_id(3), inverses.shape[0]

    @pl.when(pl.program_id(2) == 0)
    def _():
        d_states[g] = d_last[g]

    @pl.when(g == 0)
    def _():
        for ref in (d_q, d_k):
            ref[...] = jnp.zeros_like(ref)

    _invert(x, inverses, spec)

    def again(i, state):
        states[i] = state
        return advance(state, *x.chunk(i), inverses[i], spec)[1]

    jax.lax.fori_loop(0, count, again, before[...])

    def step(turn, d_state):
        i = count - 1 - turn
        tokens, starts = x.chunk(i)
        run = lambda state, tokens: advance(state, tokens, starts, inverses[i], spec)
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), tokens)
        found = d_out[_tokens(i, x), :].astype(jnp.float32)
        d_state, d = jax.vjp(run, states[i], wide)[1]((found, d_state))
        # Value heads that share queries and keys add to their gradients.
        d_q[_tokens(i, x), :] += d.q
        d_k[_tokens(i, x), :] += d.k
        _write(grads, i, x, d)
        return d_state

    d_states[g] = jax.lax.fori_loop(0, count, step, d_states[g])

    @pl.when(g == pl.num_programs(3) - 1)
    def _():
        for ref, total in zip(grads, (d_q, d_k), strict=False):
            ref[...] = total[...].astype(ref.dtype)


def _write(grads: Sequence[Any], i, x: Blocks, d: Chunk) -> None:
    """Writes the gradients of one chunk that belong to one value head."""
    _, _, v, log_decay, beta = grads
    v[_tokens(i, x), :] = d.v.astype(v.dtype)
    log_decay[pl.ds(i, 1), :] = d.log_decay
    beta[pl.ds(i, 1), :] = d.beta


def _invert(x: Blocks, inverses, spec: Spec) -> None:
    """Inverts the systems of all chunks of a block."""

    def one(i, _):
        inverses[i] = inverted(*x.chunk(i), spec)

    jax.lax.fori_loop(0, inverses.shape[0], one, None)


def _tokens(i, x: Blocks):
    """Returns the place of chunk `i` among the tokens of a block."""
    size = x.starts.shape[1]
    return pl.ds(pl.multiple_of(i * size, size), size)


# ---------------------------------------------------------------------------------------------- launch

_AXES = ("BKn", "BKn", "BKGn", "BKGn", "BKGn", "Bn")  # of `Blocks`


def _launch(
    name: str,
    kernel: Callable,
    x: Blocks,
    *,
    given: Sequence[_Part],
    results: Sequence[_Part],
    scratch: Sequence[tuple[int, ...]],
    products: _Products,
    exps: int,
    reverse: bool = False,
) -> Sequence[Array]:
    """Runs `kernel(*x, *given, *results, *scratch)` for every block of every head.

    Args:
      name: name of the kernel, for profiles.
      kernel: the function that computes one block of one value head.
      x: inputs of the tokens.
      given: further inputs.
      results: shapes of the results.
      scratch: shapes of float32 buffers.
      products: matmuls of a chunk, for the compiler's estimate of time.
      exps: how often the decays of a chunk are computed, for the same estimate.
      reverse: walk from the last block to the first.
    """
    B, K, G, n, r, C = x.log_decay.shape
    turn = (lambda i: n - 1 - i) if reverse else (lambda i: i)
    inputs = [*(_Part(a, axes) for a, axes in zip(x, _AXES, strict=True)), *given]
    moved = sum(math.prod(part.array.shape) * part.array.dtype.itemsize for part in (*inputs, *results))
    chunks, flops = B * K * G * n * r, products.flops(C, x.k.shape[-1], x.v.shape[-1])
    return pl.pallas_call(
        kernel,
        grid=(B, K, n, G),
        in_specs=[part.spec(turn) for part in inputs],
        out_specs=[part.spec(turn) for part in results],
        out_shape=[part.array for part in results],
        scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(chunks * flops, chunks * exps * C * (C + 2), moved),
        name="gated_delta_" + name,
    )(*(part.array for part in inputs))


def _like(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, a.dtype)
