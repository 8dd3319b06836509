"""One chunk of the gated delta rule, as a function of values on the chip. The backward kernel takes its `jax.vjp`.

Of C tokens, G is the running sum of log decays, and `D[i, j] = exp(G[i] - G[j])` for j <= i in the same document, else
0. The values that a chunk writes into the state solve one unit triangular system:

    (I + strict_lower(beta k k^T D)) V = beta (v - exp(G) k S)
    o = exp(G) q S + (q k^T D) V,  S <- exp(G[C]) S + (exp(G[C] - G) k)^T V
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

EPS = 1e-6  # added to the squared norm of a query or key
TILE = 8  # rows of a vector register


class Spec(NamedTuple):
    """Static parameters.

    Args:
      scale: factor on the queries.
      l2_norm: divide each query and key by its length.
      parts: matrices in bfloat16 that each operand of a matmul becomes.
    """

    scale: float
    l2_norm: bool
    parts: tuple[int, int]


class Chunk(NamedTuple):
    """The inputs of C tokens for one value head: q and k `C Hk`, v `C Hv`, rates `1 C`."""

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
      x: inputs of the tokens, in any dtype.
      starts: `1 C`, 1.0 for first tokens of documents, else 0.0.
      inverse: inverse of the chunk's system, `C C`; a constant for gradients, because `_solve` has its own rule.
      spec: static parameters.
    """
    dot = functools.partial(_dot, parts=spec.parts)
    (q, k), decays = _units(x, spec), _decays(x.log_decay, starts)
    wanted = x.beta.T * (x.v.astype(jnp.float32) - decays.into * dot(k, state))
    values = cast(Array, _solve(_lower(k, x.beta, decays, spec), wanted, inverse, spec.parts))
    scores = dot(q, k, axes=(1, 1)) * decays.between
    out = decays.into * dot(q, state) + dot(scores, values)
    return out, decays.kept * state + dot(decays.out_of * k, values, axes=(0, 0))


def inverted(x: Chunk, starts: Array, spec: Spec) -> Array:
    """Inverts the system of a chunk, `C C`, in the highest precision: blocks on the diagonal grow by doubling."""
    lower = _lower(_units(x, spec)[1], x.beta, _decays(x.log_decay, starts), spec)
    (i, j), dot = _indices(len(lower)), functools.partial(_dot, parts=(3, 3))
    inverse, size = _inverted_tiles(lower), TILE
    while size < len(lower):
        # Of each block of twice the size, the lower left quarter. Only rows of the lower half change.
        corner = jnp.where((i ^ j >= size) & (i ^ j < 2 * size), lower, 0.0)
        halves = [inverse[at : at + size] for at in range(0, len(lower), size)]
        below = jnp.concatenate(halves[1::2])
        below = below - dot(dot(below, corner), inverse)
        halves[1::2] = [below[at : at + size] for at in range(0, len(below), size)]
        inverse, size = jnp.concatenate(halves), 2 * size
    return inverse


def _inverted_tiles(lower: Array) -> Array:
    """Inverts all blocks of 8 on the diagonal at once, row by row, without the matmul unit."""
    (i, j), size = _indices(len(lower)), len(lower)
    inverse = jnp.where(i == j, 1.0, 0.0)
    for row in range(TILE - 1):
        column = jnp.sum(jnp.where(j == (i & -TILE) + row, lower, 0.0), axis=1, keepdims=True)  # of its block, [C, 1]
        done = inverse.reshape(-1, TILE, size)[:, row : row + 1]
        inverse = inverse - column * jnp.broadcast_to(done, (size // TILE, TILE, size)).reshape(size, size)
    return inverse


def _units(x: Chunk, spec: Spec) -> tuple[Array, Array]:
    """Returns scaled queries and keys in float32, normalized to length one if the spec says so."""
    unit = lambda a: a * lax.rsqrt(jnp.sum(a * a, axis=1, keepdims=True) + EPS)
    q, k = (unit(a) if spec.l2_norm else a for a in (x.q.astype(jnp.float32), x.k.astype(jnp.float32)))
    return q * spec.scale, k


def _lower(k: Array, beta: Array, decays: _Decays, spec: Spec) -> Array:
    """Returns the strictly lower triangle of the system."""
    i, j = _indices(len(k))
    return jnp.where(i > j, beta.T * _dot(k, k, axes=(1, 1), parts=spec.parts) * decays.between, 0.0)


def _decays(log_decay: Array, starts: Array) -> _Decays:
    i, j = _indices(log_decay.shape[1])
    until = lambda row: jnp.sum(jnp.where(j <= i, row, 0.0), axis=1, keepdims=True)  # [1, C] -> [C, 1]
    after = jnp.sum(jnp.where(j > i, log_decay, 0.0), axis=1, keepdims=True)
    document, last, end = until(starts), *(jnp.sum(row, axis=1, keepdims=True) for row in (starts, log_decay))
    # The sum over tokens t with j < t <= i: summed directly, because a difference of two running sums has large
    # rounding errors if the decay is fast.
    between = _dot(jnp.where(j <= i, 1.0, 0.0), jnp.where(i > j, log_decay.T, 0.0), (1, 3))
    exp_where = lambda keep, exponent: jnp.exp(jnp.where(keep, exponent, -jnp.inf))
    return _Decays(
        between=exp_where((j <= i) & (document == document.T), between),
        into=exp_where(document == 0, until(log_decay)),
        out_of=exp_where(document == last, after),
        kept=exp_where(last == 0, end),
    )


def _indices(size: int) -> tuple[Array, Array]:
    """Returns the row and the column of each element of a square."""
    return lax.broadcasted_iota(jnp.int32, (size, size), 0), lax.broadcasted_iota(jnp.int32, (size, size), 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _solve(lower: Array, wanted: Array, inverse: Array, parts: tuple[int, int]) -> Array:
    """Solves `(I + lower) x = wanted`, given the inverse."""
    return _dot(inverse, wanted, parts=parts)


def _solve_forward(lower, wanted, inverse, parts):
    solution = _dot(inverse, wanted, parts=parts)
    return solution, (inverse, solution)


def _solve_backward(parts, kept, gradient):
    inverse, solution = kept
    d_wanted = _dot(inverse, gradient, axes=(0, 0), parts=parts)
    return -_dot(d_wanted, solution, axes=(1, 1), parts=parts), d_wanted, None


_solve.defvjp(_solve_forward, _solve_backward)


# ---------------------------------------------------------------------------------------------- matmuls


def _dot(a: Array, b: Array, parts: tuple[int, int], axes: tuple[int, int] = (1, 0)) -> Array:
    """Multiplies two float32 matrices over an axis of each, as sums of so many `parts` in bfloat16.

    The matmul unit takes these in half the time of float32. Two parts of each make three products, as `Precision.HIGH`
    in XLA, three make six, as `Precision.HIGHEST`. One is enough for numbers that are exact in bfloat16.
    """
    return cast(Array, _multiply(a, b, parts, axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _multiply(a: Array, b: Array, parts: tuple[int, int], axes: tuple[int, int]) -> Array:
    numbers = (((axes[0],), (axes[1],)), ((), ()))
    product = functools.partial(lax.dot_general, dimension_numbers=numbers, preferred_element_type=jnp.float32)
    of_a, of_b = map(_split, (a, b), parts)
    # The smallest products first; those of two small parts are beyond the precision.
    pairs = [(i, order - i) for order in reversed(range(max(parts))) for i in range(order + 1)]
    return functools.reduce(jnp.add, [product(of_a[i], of_b[j]) for i, j in pairs if i < len(of_a) and j < len(of_b)])


def _split(a: Array, parts: int) -> list[Array]:
    """Splits a matrix into bfloat16 parts: each is the rounded rest of the previous ones."""
    found = []
    for _ in range(parts):
        found.append(a.astype(jnp.bfloat16))
        a = a - found[-1].astype(jnp.float32)
    return found


def _multiply_forward(a, b, parts, axes):
    return _multiply(a, b, parts, axes), (a, b)


def _multiply_backward(parts, axes, kept, gradient):
    (a, b), (i, j), most = kept, axes, max(parts)
    given, back = (lambda n: (most, n)), (lambda n: (n, most))
    # Each gradient has the summed axis where its matrix has it.
    d_a = (gradient, b, given(parts[1]), (1, 1 - j)) if i == 1 else (b, gradient, back(parts[1]), (1 - j, 1))
    d_b = (a, gradient, back(parts[0]), (1 - i, 0)) if j == 0 else (gradient, a, given(parts[0]), (0, 1 - i))
    return _dot(*d_a), _dot(*d_b)


_multiply.defvjp(_multiply_forward, _multiply_backward)
