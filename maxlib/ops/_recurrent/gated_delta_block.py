"""One block of chunks of the gated delta rule, forward and backward.

Within a chunk of C tokens, G is the running sum of log decays, and `D[i, j] = exp(G[i] - G[j])` for j <= i in the same
document, else 0. The values V that a chunk writes into the state S solve one unit triangular system:

- `T = (I + strict_lower(beta k k^T D))^-1`, and `V = T beta (v - exp(G) k S)`
- `o = exp(G) q S + (q k^T D) V`, and `S <- exp(G[C]) S + k^T (exp(G[C] - G) V)`

Only S depends on the previous chunk. The gradient uses that of an inverse, `dT = -T dL T`: with the gradient dV of the
values and `X = T^T dV`, that of L is `-X V^T`, and no gradient of T is needed.

Shapes: B rows, n chunks of a block, C tokens of a chunk, K key heads, G value heads of each, Hk and Hv wide.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from maxlib._xla_workarounds import inner
from maxlib.ops._recurrent.chunks import decays, for_each_head, sum_heads
from maxlib.ops._recurrent.delta_inputs import DeltaInputs
from maxlib.ops._recurrent.inverse import unit_lower_inverse


class _Chunks(NamedTuple):
    """Properties of the chunks of a block that do not depend on the state.

    Args:
        rows: K above q, `n B K G 2C Hk`.
        products: `k k^T` above `q k^T`, `n B K G 2C C`.
        decay: D, `n B K G C C`.
        into: Exp(G), the factor from the state before a chunk to each token, `n B K G C`.
        out_of: Exp(G[C] - G), the factor from each token to the state after it, `n B K G C`.
        across: Exp(G[C]), `n B K G`.
        inverse: T, `n B K G C C`.
        scores: `q k^T D`, `n B K G C C`.
    """

    rows: Array
    products: Array
    decay: Array
    into: Array
    out_of: Array
    across: Array
    inverse: Array
    scores: Array

    @property
    def k(self) -> Array:
        return self.rows[..., : self.decay.shape[-1], :]


def _prepare(x: DeltaInputs, dot: Callable) -> _Chunks:
    decay, into, out_of, across = decays(x.log_decay, x.is_start)
    rows = _two(x.k, x.q)
    products = for_each_head(dot("nbkid,nbkjd->nbkij", rows, x.k), x.v.shape[3])
    of_k, of_q = jnp.split(products, 2, axis=-2)
    inverse = unit_lower_inverse(jnp.tril(_times(x.beta, of_k) * decay, -1))
    return _Chunks(for_each_head(rows, x.v.shape[3]), products, decay, into, out_of, across, inverse, of_q * decay)


def forward(state: Array, x: DeltaInputs, dot: Callable) -> tuple[Array, Array]:
    """Computes the state after a block and its outputs.

    Args:
        state: State before the block, `B K G Hk Hv`.
        x: Inputs in float32 or wider, q and k `n B K C Hk`, v `n B K G C Hv`, rates `n B K G C`; `is_start` is the
            number of starts in the chunk up to each token, `n B C`, or None.
        dot: Einsum in the chosen precision.

    Returns:
        The state, and the outputs, `n B K G C Hv`.
    """
    c = _prepare(x, dot)

    def step(state, chunk):
        x, c = chunk
        # [2C, Hk] [Hk, Hv]: what keys and queries read.
        read = dot("bkgid,bkgdv->bkgiv", c.rows, state)
        by_keys, by_queries = jnp.split(read, 2, axis=-2)
        _, values, state = _update(state, x, c, by_keys, dot)
        return state, (values, _times(c.into, by_queries))

    state, (values, out) = jax.lax.scan(step, state, (x, c))
    return state, out + dot("nbkgij,nbkgjv->nbkgiv", c.scores, values)


def _update(state: Array, x: DeltaInputs, c: _Chunks, read: Array, dot: Callable) -> tuple[Array, Array, Array]:
    """Returns `v - exp(G) k S`, the values V, and the state after one chunk."""
    missing = x.v - _times(c.into, read)
    values = dot("bkgij,bkgjv->bkgiv", c.inverse, _times(x.beta, missing))
    written = dot("bkgid,bkgiv->bkgdv", c.k, _times(c.out_of, values))
    return missing, values, c.across[..., None, None] * state + written


class _Saved(NamedTuple):
    """Values of the chunks from which the gradients of their inputs follow.

    Args:
        states: States before the chunks, `n B K G Hk Hv`.
        d_states: Gradients of the states after them.
        missing: V - exp(G) k S, `n B K G C Hv`.
        values: V.
        solved: X.
        d_out: Gradients of the outputs.
    """

    states: Array
    d_states: Array
    missing: Array
    values: Array
    solved: Array
    d_out: Array


def backward(state: Array, x: DeltaInputs, d_out: Array, d_state: Array, dot: Callable) -> tuple[DeltaInputs, Array]:
    """Computes the gradients of a block's inputs (none of `is_start`) and of the state before it.

    Args:
        state: State before the block.
        x: Inputs, as in `forward`.
        d_out: Gradient of the outputs, `n B K G C Hv`.
        d_state: Gradient of the state after the block, `B K G Hk Hv`.
        dot: Einsum in the chosen precision.
    """
    c = _prepare(x, dot)

    def again(state, chunk):
        x, c = chunk
        missing, values, after = _update(state, x, c, dot("bkgid,bkgdv->bkgiv", c.k, state), dot)
        return after, (state, missing, values)

    def step(d_state, chunk):
        x, c, d_out, from_out = chunk
        d_values = from_out + _times(c.out_of, dot("bkgid,bkgdv->bkgiv", c.k, d_state))
        solved = dot("bkgij,bkgiv->bkgjv", c.inverse, d_values)
        d_read = _two(_times(-x.beta * c.into, solved), _times(c.into, d_out))
        before = c.across[..., None, None] * d_state + dot("bkgid,bkgiv->bkgdv", c.rows, d_read)
        return before, (d_state, solved)

    _, (states, missing, values) = jax.lax.scan(again, state, (x, c))
    from_out = dot("nbkgij,nbkgiv->nbkgjv", c.scores, d_out)
    d_first, (d_states, solved) = jax.lax.scan(step, d_state, (x, c, d_out, from_out), reverse=True)
    return _of_inputs(x, c, _Saved(states, d_states, missing, values, solved, d_out), dot), d_first


def _of_inputs(x: DeltaInputs, c: _Chunks, s: _Saved, dot: Callable) -> DeltaInputs:
    """Returns the gradients of the inputs of all chunks."""
    d_products, d_decay, d_beta = _within(x, c, s, dot)
    d_rows, d_k, *d_factors = _through_states(x, c, s, dot)
    # Products are `rows k^T`.
    rows = _two(x.k, x.q)
    d_rows = d_rows + dot("nbkij,nbkjd->nbkid", d_products, x.k)
    d_k = d_k + dot("nbkij,nbkid->nbkjd", d_products, rows)
    of_k, d_q = jnp.split(d_rows, 2, axis=-2)
    (d_log_decay,) = jax.vjp(lambda g: decays(g, x.is_start), x.log_decay)[1]((d_decay, *d_factors))
    starts: Any = None if x.is_start is None else np.zeros(x.is_start.shape, jax.dtypes.float0)
    return DeltaInputs(d_q, d_k + of_k, _times(x.beta, s.solved), d_log_decay, d_beta, starts)


def _within(x: DeltaInputs, c: _Chunks, s: _Saved, dot: Callable) -> tuple[Array, Array, Array]:
    """Returns the gradients of the products, `n B K 2C C`, of D and of beta: through L, the scores and V."""
    of_k, of_q = jnp.split(c.products, 2, axis=-2)
    d_lower, d_scores = jnp.split(dot("nbkgiv,nbkgjv->nbkgij", _two(-s.solved, s.d_out), s.values), 2, axis=-2)
    d_lower = jnp.tril(d_lower, -1)
    d_beta = inner(d_lower * of_k, c.decay) + inner(s.solved, s.missing)
    d_lower = _times(x.beta, d_lower)
    return sum_heads(_two(d_lower * c.decay, d_scores * c.decay)), d_lower * of_k + d_scores * of_q, d_beta


def _through_states(x: DeltaInputs, c: _Chunks, s: _Saved, dot: Callable) -> tuple[Array, ...]:
    """Returns the gradients of the rows and of k, `n B K 2C Hk` and `n B K C Hk`, and of `into`, `out_of` and `across`.

    Rows read a state with the factor `into`; keys write into it with `out_of`.
    """
    d_read = dot("nbkgiv,nbkgdv->nbkgid", _two(_times(-x.beta, s.solved), s.d_out), s.states)
    d_written = dot("nbkgiv,nbkgdv->nbkgid", s.values, s.d_states)
    d_rows = sum_heads(_times(jnp.concatenate([c.into, c.into], axis=-1), d_read))
    by_keys, by_queries = jnp.split(inner(d_read, c.rows), 2, axis=-1)
    states, d_states = (x.reshape(*c.across.shape, -1) for x in (s.states, s.d_states))
    d_across = inner(states, d_states)
    return d_rows, sum_heads(_times(c.out_of, d_written)), by_keys + by_queries, inner(d_written, c.k), d_across


def _times(weight: Array, a: Array) -> Array:
    return weight[..., None] * a


def _two(above: Array, below: Array) -> Array:
    return jnp.concatenate([above, below], axis=-2)
