"""One chunk of the gated delta rule, as a function of values on the chip. The backward kernel takes its `jax.vjp`.

Of C tokens, G is the running sum of log decays, and `D[i, j] = exp(G[i] - G[j])` for j <= i in the same document, else
0. The values that a chunk writes into the state solve one unit triangular system:

    (I + strict_lower(beta k k^T D)) V = beta (v - exp(G) k S)
    o = exp(G) q S + (q k^T D) V,  S <- exp(G[C]) S + (exp(G[C] - G) k)^T V
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

EPS = 1e-6  # added to the squared norm of a query or key


class Spec(NamedTuple):
    """Static parameters.

    Args:
      scale: factor on the queries.
      l2_norm: divide each query and key by its length.
      narrow: multiply by three passes of the matmul unit, as bfloat16 inputs deserve, and not by six.
    """

    scale: float
    l2_norm: bool
    narrow: bool


class Chunk(NamedTuple):
    """What C tokens bring to one value head: q and k `C Hk`, v `C Hv`, rates `1 C`."""

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array


class _Decays(NamedTuple):
    """Factors between the tokens, `C C`, on the incoming state as each sees it, on what each leaves in the outgoing
    one, both `C 1`, and on the state itself, `1 1`.
    """

    between: Array
    into: Array
    out_of: Array
    kept: Array


def advance(state: Array, x: Chunk, starts: Array, inverse: Array, spec: Spec) -> tuple[Array, Array]:
    """Computes the outputs of a chunk, `C Hv`, and the state after it.

    Args:
      state: state before the chunk, `Hk Hv`, float32.
      x: what the tokens bring, in any dtype.
      starts: `1 C`, 1.0 for first tokens of documents, else 0.0.
      inverse: inverse of the chunk's system, `C C`. Gradients take it as given: `_solve` knows them.
      spec: static parameters.
    """
    dot = functools.partial(_dot, narrow=spec.narrow)
    (q, k), decays = _units(x, spec), _decays(x.log_decay, starts)
    wanted = x.beta.T * (x.v.astype(jnp.float32) - decays.into * dot(k, state))
    values = _solve(_lower(k, x.beta, decays, spec), wanted, inverse, spec.narrow)
    scores = dot(q, k, axes=(1, 1)) * decays.between
    out = decays.into * dot(q, state) + dot(scores, values)
    return out, decays.kept * state + dot(decays.out_of * k, values, axes=(0, 0))


def inverted(x: Chunk, starts: Array, spec: Spec) -> Array:
    """Inverts the system of a chunk, `C C`, in the highest precision: blocks on the diagonal grow by doubling."""
    lower = _lower(_units(x, spec)[1], x.beta, _decays(x.log_decay, starts), spec)
    i, j = _indices(len(lower))
    apart, dot = i ^ j, functools.partial(_dot, narrow=False)
    inverse, block = jnp.where(i == j, 1.0, jnp.where(apart == 1, -lower, 0.0)), 2  # blocks of two need no matmul
    while block < len(lower):
        # Of each block of twice the size, the lower left quarter.
        corner = jnp.where((apart >= block) & (apart < 2 * block), lower, 0.0)
        inverse = inverse - dot(dot(inverse, corner), inverse)
        block *= 2
    return inverse


def _units(x: Chunk, spec: Spec) -> tuple[Array, Array]:
    """Returns scaled queries and keys in float32, of length one if they are to be."""
    unit = lambda a: a * lax.rsqrt(jnp.sum(a * a, axis=1, keepdims=True) + EPS)
    q, k = (unit(a) if spec.l2_norm else a for a in (x.q.astype(jnp.float32), x.k.astype(jnp.float32)))
    return q * spec.scale, k


def _lower(k: Array, beta: Array, decays: _Decays, spec: Spec) -> Array:
    """Returns the strictly lower triangle of the system."""
    i, j = _indices(len(k))
    return jnp.where(i > j, beta.T * _dot(k, k, axes=(1, 1), narrow=spec.narrow) * decays.between, 0.0)


def _decays(log_decay: Array, starts: Array) -> _Decays:
    i, j = _indices(log_decay.shape[1])
    until = lambda row: jnp.sum(jnp.where(j <= i, row, 0.0), axis=1, keepdims=True)  # running sums, [1, C] -> [C, 1]
    total, document = until(log_decay), until(starts)
    end, last = (jnp.sum(row, axis=1, keepdims=True) for row in (log_decay, starts))  # [1, 1]
    # Masked before the exponential: above the diagonal differences are positive and would overflow.
    exp_where = lambda keep, exponent: jnp.exp(jnp.where(keep, exponent, -jnp.inf))
    between = exp_where((j <= i) & (document == document.T), total - total.T)
    return _Decays(
        between,
        into=exp_where(document == 0, total),
        out_of=exp_where(document == last, end - total),
        kept=exp_where(last == 0, end),
    )


def _indices(size: int) -> tuple[Array, Array]:
    """Returns the row and the column of each element of a square."""
    return lax.broadcasted_iota(jnp.int32, (size, size), 0), lax.broadcasted_iota(jnp.int32, (size, size), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _solve(lower: Array, wanted: Array, inverse: Array, narrow: bool) -> Array:
    """Solves `(I + lower) x = wanted`, given the inverse."""
    return _dot(inverse, wanted, narrow=narrow)


def _solve_forward(lower, wanted, inverse, narrow):
    solution = _dot(inverse, wanted, narrow=narrow)
    return solution, (inverse, solution)


def _solve_backward(narrow, kept, gradient):
    inverse, solution = kept
    d_wanted = _dot(inverse, gradient, axes=(0, 0), narrow=narrow)
    return -_dot(d_wanted, solution, axes=(1, 1), narrow=narrow), d_wanted, None


_solve.defvjp(_solve_forward, _solve_backward)


# ---------------------------------------------------------------------------------------------- matmuls


def _dot(a: Array, b: Array, *, axes: tuple[int, int] = (1, 0), narrow: bool) -> Array:
    """Multiplies two float32 matrices over an axis of each."""
    return (_three_passes if narrow else _six_passes)(a, b, axes)


def _six_passes(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    return _product(a, b, axes, lax.Precision.HIGHEST)


def _product(a: Array, b: Array, axes: tuple[int, int], precision: lax.Precision | None) -> Array:
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, numbers, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _three_passes(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Multiplies as XLA does in `Precision.HIGH`, which Pallas lacks: in bfloat16, with what rounding has left over."""
    (high, low), (high_b, low_b) = map(_split, (a, b))
    product = functools.partial(_product, axes=axes, precision=None)
    return product(high, low_b) + product(low, high_b) + product(high, high_b)


def _split(a: Array) -> tuple[Array, Array]:
    high = a.astype(jnp.bfloat16)
    return high, (a - high.astype(jnp.float32)).astype(jnp.bfloat16)


def _three_passes_backward(axes, kept, gradient):
    (a, b), (i, j) = kept, axes
    # Each gradient has the summed axis where its matrix has it.
    d_a = (gradient, b, (1, 1 - j)) if i == 1 else (b, gradient, (1 - j, 1))
    d_b = (a, gradient, (1 - i, 0)) if j == 0 else (gradient, a, (0, 1 - i))
    return _three_passes(*d_a), _three_passes(*d_b)


_three_passes.defvjp(lambda a, b, axes: (_three_passes(a, b, axes), (a, b)), _three_passes_backward)
