"""A chunk of a recurrence for one head, in matmuls: what a kernel computes with everything in vector memory.

The gated delta rule (Yang et al. 2024, arXiv:2412.06464) and state-space duality (Dao & Gu 2024, arXiv:2405.21060)
have one form. Within a chunk of C tokens, G is the running sum of log decays, and `D[i, j] = exp(G[i] - G[j])` for
j <= i, else 0. The state S is stored transposed, `Hv Hk`:

- of the delta rule, `V = T beta (v - exp(G) k S^T)` with `T = (I + strict_lower(beta k k^T D))^-1`;
- of state-space duality, `V = beta v`, where q is c, k is b, v is x and beta is dt;
- of both, `o = exp(G) q S^T + (q k^T D) V` and `S <- exp(G[C]) S + V^T (exp(G[C] - G) k)`.

A document that begins inside a chunk needs no mask: the log decay of its first token is `START`, so every factor across
it is zero.

A matmul unit multiplies bfloat16. A float32 operand is the sum of two of these, with 16 digits, so a product of two
wide operands takes three passes, of a wide and a narrow one two. Gates need them: their gradients nearly cancel.

Gradients are those of `jax.vjp` of these functions, traced within the kernel.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import Array

START = -1e9  # the log decay of a document's first token: the state before it is gone
BLOCK = 8  # rows of a vector register; triangles of this size are solved row by row
EPS = 1e-6  # added to the squared norm of a query or key
WIDE = 2  # parts of a float32 operand


class Form(NamedTuple):
    """What is computed; static.

    Args:
        delta: True for the delta rule, False for state-space duality.
        unit: True if queries and keys are scaled to unit norm.
        scale: Factor on the queries.
        exact: True if matmuls have all digits of float32, for inputs in it; False for inputs in bfloat16.
    """

    delta: bool
    unit: bool
    scale: float
    exact: bool

    @property
    def of_key(self) -> int:
        """Returns the parts of a query or key."""
        return WIDE if self.unit else 1

    def dot(self, a: Array, b: Array, axes: tuple[int, int], parts: tuple[int, int] = (WIDE, WIDE)) -> Array:
        """Multiplies two matrices, summed over an axis of each, that have so many parts."""
        return _dot(a, b, axes, None if self.exact else parts)


class Keys(NamedTuple):
    """Queries and keys of a chunk, float32, `C Hk`, and products with the keys, `C C`; k k^T of the delta rule."""

    q: Array
    k: Array
    qk: Array
    kk: Array | None


def keys_of(form: Form, q: Array, k: Array) -> Keys:
    """Returns what all heads of a key head share."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    if form.unit:
        q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=1, keepdims=True) + EPS) for x in (q, k))
    parts = form.of_key, form.of_key
    kk = form.dot(k, k, (1, 1), parts) if form.delta else None
    qk = form.dot(q, k, (1, 1), parts)
    return Keys(q, k, form.scale * qk, kk)


def chunk(form: Form, keys: Keys, v: Array, log_decay: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """Applies a chunk of the recurrence.

    Args:
        form: What is computed.
        keys: Queries and keys.
        v: Values, `C Hv`.
        log_decay: Logarithm of the factor on the state before each token, `1 C`, float32.
        beta: Step of each token, `1 C`, float32.
        state: State before the chunk, `Hv Hk`, float32.

    Returns:
        The outputs, `C Hv`, float32, and the state after the chunk.
    """
    v, (row, column) = v.astype(jnp.float32), _indices(v.shape[0])
    after = (row > column).astype(jnp.float32)
    summed = jnp.where(column <= row, log_decay, 0.0)  # [i, l]: the log decays up to token i
    # Of the tokens up to i, those after j. A difference of running sums would lose digits of slow decays after fast
    # ones. Above the diagonal the sum is empty.
    decay = jnp.where(column <= row, jnp.exp(form.dot(summed, after, (1, 0), (WIDE, 1))), 0.0)
    into = jnp.exp(jnp.sum(summed, axis=1, keepdims=True))  # C 1
    out_of = jnp.exp(jnp.sum(jnp.where(column > row, log_decay, 0.0), axis=1, keepdims=True))
    across = jnp.exp(jnp.sum(log_decay, axis=1, keepdims=True))  # 1 1
    beta = jnp.sum(jnp.where(row == column, beta, 0.0), axis=1, keepdims=True)  # [1, C] -> [C, 1]
    if keys.kk is None:
        values = beta * v
    else:
        missing = v - into * form.dot(keys.k, state, (1, 1), (form.of_key, WIDE))
        lower = jnp.where(column < row, beta * keys.kk * decay, 0.0)
        values = cast(Array, solved(form, lower, beta * missing))
    read = form.scale * into * form.dot(keys.q, state, (1, 1), (form.of_key, WIDE))
    out = read + form.dot(keys.qk * decay, values, (1, 0))
    written = form.dot(out_of * values, keys.k, (0, 0), (WIDE, form.of_key))
    return out, across * state + written


def _indices(size: int) -> tuple[Array, Array]:
    """Returns the row and the column of each element of a square matrix."""
    row = jax.lax.broadcasted_iota(jnp.int32, (size, size), 0)
    return row, jax.lax.broadcasted_iota(jnp.int32, (size, size), 1)


# ---------------------------------------------------------------------------------------------- products


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _dot(a: Array, b: Array, axes: tuple[int, int], parts: tuple[int, int] | None) -> Array:
    """Multiplies float32 matrices, summed over an axis of each, in so many parts of each; None: in all digits."""
    dims = (axes[:1], axes[1:]), ((), ())
    if parts is None:
        return jax.lax.dot_general(a, b, dims, precision="highest", preferred_element_type=jnp.float32)
    # Not the product of both rests, which is smaller than the rounding of the others.
    pairs = [(x, y) for i, x in enumerate(_split(a, parts[0])) for y in _split(b, parts[1])[: WIDE - i]]
    first, *others = (jax.lax.dot_general(x, y, dims, preferred_element_type=jnp.float32) for x, y in pairs)
    return sum(others, start=first)


def _split(x: Array, parts: int) -> list[Array]:
    """Returns bfloat16 matrices whose sum is `x`, but for its last digits."""
    first = x.astype(jnp.bfloat16)
    return [first] if parts == 1 else [first, (x - first.astype(jnp.float32)).astype(jnp.bfloat16)]


def _dot_forward(a, b, axes, parts):
    return _dot(a, b, axes, parts), (a, b)


def _dot_backward(axes, parts, operands, gradient):
    (a, b), (i, j) = operands, axes

    def dot(x, y, axes, narrow):
        return _dot(x, y, axes, narrow and tuple(of or WIDE for of in narrow))

    # The summed axis of an operand comes from the other operand, its other axis from the gradient, which is wide.
    of_a, of_b = (None, None) if parts is None else ((0, parts[1]), (parts[0], 0))
    d_a = dot(gradient, b, (1, 1 - j), of_a) if i == 1 else dot(b, gradient, (1 - j, 1), of_a and of_a[::-1])
    d_b = dot(a, gradient, (1 - i, 0), of_b) if j == 0 else dot(gradient, a, (0, 1 - i), of_b and of_b[::-1])
    return d_a, d_b


_dot.defvjp(_dot_forward, _dot_backward)


# ---------------------------------------------------------------------------------------------- triangles


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def solved(form: Form, lower: Array, right: Array) -> Array:
    """Returns `(I + lower)^-1 right` of a strictly lower triangular matrix, `C C`, C a power of two from 8 on."""
    return form.dot(inverse(form, lower), right, (1, 0))


def _solved_forward(form, lower, right):
    inverted = inverse(form, lower)
    values = form.dot(inverted, right, (1, 0))
    return values, (inverted, values)


def _solved_backward(form, residuals, gradient):
    inverted, values = residuals
    d_right = form.dot(inverted, gradient, (0, 0))
    row, column = _indices(len(inverted))
    return jnp.where(column < row, -form.dot(d_right, values, (1, 1)), 0.0), d_right


solved.defvjp(_solved_forward, _solved_backward)


def inverse(form: Form, lower: Array) -> Array:
    """Returns `(I + lower)^-1`: blocks of eight rows on the diagonal by substitution, then twice as large ones."""
    size = len(lower)
    row, column = _indices(size)
    apart = row ^ column  # less than a power of two within a block of that size
    diagonal = apart < BLOCK
    small = _small_inverses(form, jnp.where(diagonal, lower, 0.0).reshape(-1, BLOCK, size).sum(0))
    inverted = jnp.broadcast_to(small[None], (size // BLOCK, BLOCK, size)).reshape(size, size)
    inverted, block = jnp.where(diagonal, inverted, 0.0), BLOCK
    while block < size:
        # [[A, 0], [B, C]]^-1 = [[A^-1, 0], [-C^-1 B A^-1, C^-1]]: only the lower rows of each pair change.
        pairs = inverted.reshape(-1, 2, block, size)
        upper, below = pairs[:, 0], pairs[:, 1].reshape(size // 2, size)
        corner = jnp.where((apart >= block) & (apart < 2 * block), lower, 0.0)
        below = below - form.dot(form.dot(below, corner, (1, 0)), inverted, (1, 0))
        inverted = jnp.stack([upper, below.reshape(upper.shape)], axis=1).reshape(size, size)
        block *= 2
    return inverted


def _small_inverses(form: Form, lower: Array) -> Array:
    """Inverts all blocks of the diagonal, `8 C` beside each other, row by row."""
    size = lower.shape[1]
    row, column = (jax.lax.broadcasted_iota(jnp.int32, lower.shape, axis) for axis in (0, 1))
    across, along = _indices(size)
    block = (across ^ along < BLOCK).astype(jnp.float32)
    # Column l of each block, in all columns of the block, for every l.
    columns = jnp.concatenate([jnp.where(column & BLOCK - 1 == l, lower, 0.0) for l in range(BLOCK - 1)])
    columns = form.dot(columns, block, (1, 0), (WIDE, 1))
    inverted = (row == column & BLOCK - 1).astype(jnp.float32)
    for l in range(BLOCK - 1):
        inverted = inverted - columns[l * BLOCK :][:BLOCK] * inverted[l : l + 1]
    return inverted
