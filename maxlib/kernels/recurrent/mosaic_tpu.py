"""Kernels for TPUs (Pallas, Mosaic TPU) of the gated delta rule and of state-space duality, forward and backward.

A program computes a chunk of some heads, and chunks follow each other on the last axis of the grid. States, and in the
backward pass their gradients from the last chunk to the first, stay in vector memory: in the block of the result, which
is the same for all chunks. The forward pass stores the state before each chunk; the backward pass reads it and computes
the chunk again. Through the main memory go the inputs, the outputs, their gradients and these states, and nothing else.

Whole numbers are divided by `lax.div`: `//` rounds negative ones down, and Mosaic would ask which TPU it compiles for.

Letters: B rows, T tokens, K key heads, N value heads, J programs of a row, n chunks of C tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxlib.kernels.recurrent.chunk import BLOCK, Form, chunk, keys_of
from maxlib.kernels.recurrent.tiles import MosaicTpuTiles, Shares


def recurrence(
    form: Form, q: Array, k: Array, v: Array, log_decay: Array, beta: Array, state: Array, tiles: MosaicTpuTiles
) -> tuple[Array, Array]:
    """Applies a recurrence to whole rows; differentiable once, in reverse.

    Args:
        form: What is computed.
        q: Queries, `B T K Hk`.
        k: Keys, `B T K Hk`.
        v: Values, `B T N Hv`.
        log_decay: Logarithm of the factor on the state, `B T N`, float32; `START` for the first token of a document.
        beta: Steps, `B T N`, float32.
        state: State before the first token, `B N Hv Hk`, float32.
        tiles: Sizes of a chunk and of a program.

    Returns:
        The outputs, in the dtype of the values, and the state after the last token.
    """
    (B, T, K, Hk), (N, Hv) = k.shape, v.shape[2:]
    shares = Shares.of(K, N, Hv, tiles.columns)
    assert shares is not None
    padding = -T % tiles.chunk  # does not change the state: log decays and steps are zero

    def padded(a):
        return jnp.pad(a, [(0, 0), (0, padding)] + [(0, 0)] * (a.ndim - 2)) if padding else a

    q, k, v = (padded(a).reshape(B, T + padding, -1) for a in (q, k, v))
    # [B, T, N] -> [B, J, heads, T]
    rates = (jnp.moveaxis(padded(a), 1, 2).reshape(B, shares.programs, -1, T + padding) for a in (log_decay, beta))
    run: Callable = functools.partial(_run, Spec(form, shares, tiles.chunk, Hk, Hv))
    out, state = run(q, k, v, *rates, state)
    return out[:, :T].reshape(B, T, N, Hv), state


class Spec(NamedTuple):
    """What is static of a call: the form, the heads of a program, and the sizes of a chunk, of keys and of values."""

    form: Form
    shares: Shares
    chunk: int
    key_dim: int
    value_dim: int

    @property
    def heads(self) -> int:
        """Returns the value heads of a program."""
        return self.shares.key_heads * self.shares.heads

    def units(self) -> Callable:
        """Returns a decorator that runs a function for each unit of heads, in a loop.

        The function gets the columns of the unit's key head, those of its value heads, and the first of these heads.
        """

        def run(body):
            @pl.loop(0, self.heads // self.shares.unit)
            def _(unit):
                head = unit * self.shares.unit
                key_head = jax.lax.div(head, self.shares.heads)
                body(_columns(key_head, self.key_dim), _columns(unit, self.shares.unit * self.value_dim), head)

        return run

    def heads_of(self, first) -> list[tuple[Any, slice]]:
        """Returns the heads of a unit, as rows, and the columns of each within the unit."""
        width = self.value_dim
        return [(first + i, slice(i * width, (i + 1) * width)) for i in range(self.shares.unit)]


def _columns(index, width: int):
    return pl.ds(pl.multiple_of(index * width, width), width)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(spec: Spec, q, k, v, log_decay, beta, state) -> tuple[Array, Array]:
    out, last = _forward(spec, False, q, k, v, log_decay, beta, state)
    return out, last


def _run_forward(spec: Spec, *inputs):
    out, last, states = _forward(spec, True, *inputs)
    return (out, last), (*inputs[:-1], states)


def _run_backward(spec: Spec, residuals, cotangents):
    d_q, d_k, *others = _backward(spec, *residuals, *cotangents)
    # Of a key head that several programs share, each has a part of the gradient.
    return *(jnp.sum(a, axis=0, dtype=jnp.float32).astype(residuals[0].dtype) for a in (d_q, d_k)), *others


_run.defvjp(_run_forward, _run_backward)


# ---------------------------------------------------------------------------------------------- kernels


def _forward(spec: Spec, save: bool, q, k, v, log_decay, beta, state):
    chunks = q.shape[1] // spec.chunk
    blocks = _Blocks.of(spec, chunks)
    results = [(blocks.values, v), (blocks.state, state)]
    if save:
        results.append((blocks.states, jax.ShapeDtypeStruct((len(v), chunks, *state.shape[1:]), jnp.float32)))
    inputs = [blocks.keys, blocks.keys, blocks.values, blocks.rates, blocks.rates, blocks.state]
    return _call(spec, _forward_kernel, inputs, results, [], q, k, v, log_decay, beta, state)


def _forward_kernel(spec: Spec, q_ref, k_ref, v_ref, g_ref, beta_ref, first_ref, out_ref, state_ref, *states_ref):
    @pl.when(pl.program_id(2) == 0)
    def _():
        state_ref[...] = first_ref[...]

    @spec.units()
    def _(of_key, of_values, first):
        keys = keys_of(spec.form, q_ref[:, of_key], k_ref[:, of_key])
        values_ref, outs_ref = v_ref.at[:, of_values], out_ref.at[:, of_values]
        for head, columns in spec.heads_of(first):
            state, row = state_ref[head], pl.ds(head, 1)
            for ref in states_ref:
                ref[head] = state
            out, state_ref[head] = chunk(spec.form, keys, values_ref[:, columns], g_ref[row], beta_ref[row], state)
            outs_ref[:, columns] = out.astype(out_ref.dtype)


def _backward(spec: Spec, q, k, v, log_decay, beta, states, d_out, d_last):
    blocks, splits = _Blocks.of(spec, states.shape[1], reverse=True), spec.shares.splits
    part = jax.ShapeDtypeStruct((splits, *q.shape), q.dtype if splits == 1 else jnp.float32)
    results = [(blocks.parts, part), (blocks.parts, part), (blocks.values, v)]
    results += [(blocks.rates, log_decay), (blocks.rates, beta), (blocks.state, d_last)]
    inputs = [blocks.keys, blocks.keys, blocks.values, blocks.rates, blocks.rates]
    inputs += [blocks.states, blocks.values, blocks.state]
    sums = [pltpu.VMEM((spec.chunk, spec.shares.key_heads * spec.key_dim), jnp.float32)] * 2  # of queries and keys
    return _call(spec, _backward_kernel, inputs, results, sums, q, k, v, log_decay, beta, states, d_out, d_last)


def _backward_kernel(
    spec: Spec, q_ref, k_ref, v_ref, g_ref, beta_ref, states_ref, d_out_ref, d_last_ref,
    d_q_ref, d_k_ref, d_v_ref, d_g_ref, d_beta_ref, d_state_ref, q_sum_ref, k_sum_ref,
):  # fmt: skip
    @pl.when(pl.program_id(2) == 0)  # the last chunk
    def _():
        d_state_ref[...] = d_last_ref[...]

    q_sum_ref[...], k_sum_ref[...] = jnp.zeros_like(q_sum_ref), jnp.zeros_like(k_sum_ref)

    @spec.units()
    def _(of_key, of_values, first):
        wide = (ref[:, of_key].astype(jnp.float32) for ref in (q_ref, k_ref))
        keys, pull_keys = jax.vjp(functools.partial(keys_of, spec.form), *wide)
        values_ref, d_outs_ref, d_values_ref = (ref.at[:, of_values] for ref in (v_ref, d_out_ref, d_v_ref))
        d_keys = jax.tree.map(jnp.zeros_like, keys)
        for head, columns in spec.heads_of(first):
            row, v = pl.ds(head, 1), values_ref[:, columns].astype(jnp.float32)
            run = functools.partial(chunk, spec.form)
            _, pull = jax.vjp(run, keys, v, g_ref[row], beta_ref[row], states_ref[head])
            d_out = d_outs_ref[:, columns].astype(jnp.float32)
            of_head, d_v, d_g_ref[row], d_beta_ref[row], d_state_ref[head] = pull((d_out, d_state_ref[head]))
            d_keys = jax.tree.map(jnp.add, d_keys, of_head)
            d_values_ref[:, columns] = d_v.astype(d_v_ref.dtype)
        for ref, gradient in zip((q_sum_ref, k_sum_ref), pull_keys(d_keys), strict=True):
            ref[:, of_key] += gradient

    d_q_ref[...], d_k_ref[...] = q_sum_ref[...].astype(d_q_ref.dtype), k_sum_ref[...].astype(d_k_ref.dtype)


class _Blocks(NamedTuple):
    """The blocks of a program's operands.

    Args:
        keys: Queries and keys, `B T K*Hk`.
        parts: Their gradients, `splits B T K*Hk`.
        values: Values and outputs, `B T N*Hv`.
        rates: Log decays and steps, `B J heads T`.
        state: The state before or after all chunks, `B N Hv Hk`.
        states: Those before each chunk, `B n N Hv Hk`.
    """

    keys: pl.BlockSpec
    parts: pl.BlockSpec
    values: pl.BlockSpec
    rates: pl.BlockSpec
    state: pl.BlockSpec
    states: pl.BlockSpec

    @classmethod
    def of(cls, spec: Spec, chunks: int, *, reverse: bool = False) -> "_Blocks":
        """Returns the blocks by row b, program j and step; in reverse from the last chunk to the first."""
        C, splits, state = spec.chunk, spec.shares.splits, (spec.heads, spec.value_dim, spec.key_dim)
        keys, values = spec.shares.key_heads * spec.key_dim, spec.heads * spec.value_dim

        def chunk_of(step):
            return chunks - 1 - step if reverse else step

        def key_heads(j):
            return jax.lax.div(j, splits)

        return cls(
            keys=pl.BlockSpec((None, C, keys), lambda b, j, step: (b, chunk_of(step), key_heads(j))),
            parts=pl.BlockSpec(
                (None, None, C, keys), lambda b, j, step: (jax.lax.rem(j, splits), b, chunk_of(step), key_heads(j))
            ),
            values=pl.BlockSpec((None, C, values), lambda b, j, step: (b, chunk_of(step), j)),
            rates=pl.BlockSpec((None, None, spec.heads, C), lambda b, j, step: (b, j, 0, chunk_of(step))),
            state=pl.BlockSpec((None, *state), lambda b, j, step: (b, j, 0, 0)),
            states=pl.BlockSpec((None, None, *state), lambda b, j, step: (b, chunk_of(step), j, 0, 0)),
        )


def _call(spec: Spec, kernel: Callable, inputs: list, results: list, scratch: list, *operands: Array) -> Any:
    """Runs a kernel on the grid of rows, programs and chunks, with an estimate of its cost."""
    rows, tokens = operands[0].shape[:2]
    grid = rows, spec.shares.programs, tokens // spec.chunk
    blocks, shapes = zip(*results, strict=True)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in shapes]
    moved = sum(a.size * a.dtype.itemsize for a in (*operands, *shapes))
    flops = rows * tokens * spec.shares.programs * _flops(spec, 3 if scratch else 1)
    return pl.pallas_call(
        functools.partial(kernel, spec),
        grid=grid,
        in_specs=inputs,
        out_specs=list(blocks),
        out_shape=shapes,
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=flops, transcendentals=0, bytes_accessed=moved),
        name=f"recurrence{kernel.__name__.removesuffix('_kernel')}",
    )(*operands)


def _flops(spec: Spec, passes: int) -> int:
    """Counts the FLOPs of a program's matmuls for each token, in one pass or three (backward, which repeats one)."""
    C, Hk, Hv, delta = spec.chunk, spec.key_dim, spec.value_dim, spec.form.delta
    scores = C * Hk * (2 if delta else 1)  # of a unit
    # Decays; the outputs within the chunk, what queries read, the update; what keys read, the values.
    of_head = C * C + C * Hv + 2 * Hk * Hv + (C * Hv + Hk * Hv if delta else 0)
    inverse = C * C * (C // BLOCK).bit_length() if delta else 0  # the smallest blocks, and each doubling
    return 2 * (spec.heads // spec.shares.unit * passes * scores + spec.heads * (passes * of_head + inverse))
