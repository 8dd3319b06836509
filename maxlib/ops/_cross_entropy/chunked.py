"""Cross-entropy and log-probabilities, chunk by chunk.

`chunked` computes the gradients of the weighted sum in the forward pass, while the logits exist. `chunked_per_token`
only knows its cotangents in the backward pass, so it recomputes the logits there.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float, Int

from maxlib._utils.loops import each, scan
from maxlib._utils.varying import vary, varying
from maxlib.hardware import current_device
from maxlib.kernels.vector_memory import DEFAULT_VMEM, vmem_of
from maxlib.ops._cross_entropy.terms import (
    AxisName,
    Cotangents,
    Options,
    Sums,
    Terms,
    add_block,
    columns_of,
    logits_gradient,
    logits_of,
    terms_of,
    terms_of_blocks,
    vocab_size,
)

# Tokens. On an H100 a step of four layers of Llama 3.1 8B took 269.4 ms with 4096 and 280.1 with 1024, at equal peak
# memory.
DEFAULT_CHUNK, GPU_CHUNK = 1024, 4096
FEWEST_LOGITS = 2**20  # of a chunk, 4 MiB: with a small vocabulary more tokens are taken at once
# A TPU with a large vector memory keeps so many logits there, 32 MiB, in blocks of so many columns.
KEPT_LOGITS, COLUMNS = 2**23, 2048
# Logits are computed again where that takes less time than to write and read them: where tokens are narrower than this.
NARROW = 2048


def chunked(
    rows: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    weights: Float[Array, " M"],
    chunk: int | None,
    options: Options,
) -> tuple[Array, Terms]:
    """Computes the weighted sum of the losses and the per-token terms."""
    M, count = rows.shape[0], _chunks(rows, weight, chunk)
    if (kept := _kept_logits(rows, options)) is not None:
        count = max(1 if chunk is None else count, -(-M * min(weight.shape[0], COLUMNS) // kept))
    rows, weight, targets, weights = _vary_alike(rows, weight, targets, weights, options.axis_name)
    out = _chunked(_split(rows, count), weight, _split(targets, count), _split(weights, count), options)
    loss, terms = cast(tuple[Array, Terms], out)
    return loss, _merged(terms, M)


def chunked_per_token(
    rows: Float[Array, "M D"],
    weight: Float[Array, "V D"],
    targets: Int[Array, " M"],
    chunk: int | None,
    options: Options,
) -> Terms:
    """Computes the per-token terms only: one matmul forward, three backward."""
    M, count = rows.shape[0], _chunks(rows, weight, chunk)
    rows, weight, targets, _ = _vary_alike(rows, weight, targets, targets, options.axis_name)
    return _merged(cast(Terms, _per_token(_split(rows, count), weight, _split(targets, count), options)), M)


def _chunks(rows: Array, weight: Array, chunk: int | None) -> int:
    """Returns the number of chunks."""
    default = GPU_CHUNK if current_device()[0] == "gpu" else DEFAULT_CHUNK
    chunk = chunk or max(default, FEWEST_LOGITS // weight.shape[0])
    return max(1, -(-rows.shape[0] // chunk))


def _kept_logits(rows: Array, options: Options) -> int | None:
    """Returns how many logits stay in vector memory; None if all pass through the main memory."""
    platform, kind = current_device()
    large = platform == "tpu" and vmem_of(kind) > DEFAULT_VMEM
    return KEPT_LOGITS if large and rows.shape[-1] < NARROW and not options.entropy else None


def _split(x: Array, count: int) -> Array:
    """Splits `M ...` into `count` chunks, `count size ...`; chunk i takes every `count`-th row, starting with row i."""
    # Strided rather than contiguous, so that rows sharded over devices stay evenly sharded in every chunk.
    size = -(-x.shape[0] // count)
    x = jnp.pad(x, [(0, size * count - x.shape[0])] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(size, count, *x.shape[1:]).swapaxes(0, 1)  # [M, ...] -> [size, count, ...] -> [count, size, ...]


def _merged(terms: Terms, M: int) -> Terms:
    """Restores the order of rows from all chunks, without the padding."""
    return jax.tree.map(lambda x: x.T.reshape(-1)[:M], terms)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(rows, weight, targets, weights, options: Options):
    terms = _terms(rows, weight, targets, options)
    return jnp.sum(weights * terms.token_loss), terms


def _terms(rows, weight, targets, options: Options) -> Terms:
    """Computes the per-token terms of all chunks, one after the other."""
    if _in_blocks(rows, weight, options):
        blocks, V = _blocks(weight, rows.dtype), weight.shape[0]
        return each(lambda x: _terms_by_block(x[0], x[1], blocks, V, options), (rows, targets))
    w = weight.astype(rows.dtype)
    return each(lambda x: terms_of(logits_of(x[0], w, options), x[1], options), (rows, targets))


def _in_blocks(rows, weight, options: Options) -> bool:
    """Returns True if a chunk takes a block of the vocabulary at a time."""
    return weight.shape[0] > COLUMNS and _kept_logits(rows, options) is not None


def _blocks(weight: Float[Array, "V D"], dtype: Any) -> tuple[Array, Array]:
    """Returns the blocks of a weight, `blocks COLUMNS D`, of which the last is padded, and the first column of each."""
    V, D = weight.shape
    count = -(-V // COLUMNS)
    w = jnp.pad(weight.astype(dtype), ((0, count * COLUMNS - V), (0, 0)))
    return w.reshape(count, COLUMNS, D), COLUMNS * jnp.arange(count)


def _terms_by_block(h, y, blocks: tuple[Array, Array], V: int, options: Options) -> Terms:
    """Computes the per-token terms of one chunk from the blocks of a weight of V rows."""
    columns = columns_of(y, V, options.axis_name)

    def add(sums, block):
        w, first = block
        return add_block(sums, logits_of(h, w, options), columns - first, V - first, options), None

    none = jnp.zeros_like(h[:, 0], dtype=jnp.promote_types(h.dtype, jnp.float32))
    sums = Sums(none - jnp.inf, none, none, none if options.label_smoothing else None)
    sums, _ = scan(add, sums, blocks)
    return terms_of_blocks(sums, y, vocab_size(V, options.axis_name), options)


def _forward(rows, weight, targets, weights, options: Options):
    rows, weight, targets, weights = (x.value for x in (rows, weight, targets, weights))
    # loss = sum(weights * token_loss), so d loss / d token_loss is already known: compute the gradients of rows and
    # weight while the logits exist, and save those. The backward pass only multiplies them by d_loss.
    zero = jnp.zeros_like(weights)
    grads = Cotangents(token_loss=weights, log_prob=zero, lse=zero)
    terms, d_rows, d_weight = _gradients(rows, weight, targets, grads, options)
    residuals = (rows, weight, targets, weights, terms.token_loss, d_rows, d_weight)
    return (jnp.sum(weights * terms.token_loss), terms), residuals


def _backward(options: Options, residuals, cotangents):
    rows, weight, targets, weights, token_loss, d_rows, d_weight = residuals
    d_loss, d_terms = cotangents
    d_loss, *d_terms = (_or_none(d) for d in (d_loss, d_terms.token_loss, d_terms.log_prob, d_terms.lse))
    d_loss = jnp.zeros_like(token_loss, shape=()) if d_loss is None else d_loss
    factor = _full_cotangent(d_loss, options.axis_name)
    if all(d is None for d in d_terms):  # only `.loss` is differentiated: the gradients of the forward pass suffice
        return _scaled(d_rows, factor), _scaled(d_weight, factor), None, d_loss * token_loss
    d_terms = [jnp.zeros_like(weights) if d is None else _full_cotangent(d, options.axis_name) for d in d_terms]
    grads = Cotangents(d_terms[0] + factor * weights, *d_terms[1:])
    _, d_rows, d_weight = _gradients(rows, weight, targets, grads, options)
    return d_rows, d_weight, None, d_loss * token_loss


def _scaled(x: Array, factor: Array) -> Array:
    return (x * factor).astype(x.dtype)


def _or_none(cotangent: Any) -> Array | None:
    return None if isinstance(cotangent, SymbolicZero) else cotangent


_chunked.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _per_token(rows, weight, targets, options: Options):
    return _terms(rows, weight, targets, options)


def _per_token_backward(options: Options, residuals, d_terms: Terms):
    rows, weight, targets = residuals
    grads = Cotangents(d_terms.token_loss, d_terms.log_prob, d_terms.lse, d_terms.entropy)
    grads = jax.tree.map(lambda d: _full_cotangent(d, options.axis_name), grads)
    _, d_rows, d_weight = _gradients(rows, weight, targets, grads, options)
    return d_rows, d_weight, None


_per_token.defvjp(lambda *args: (_per_token(*args), args[:3]), _per_token_backward)


def _gradients(rows, weight, targets, grads: Cotangents, options: Options):
    """Computes the per-token terms and, from their cotangents `grads`, the gradients of `rows` and `weight`."""
    if _in_blocks(rows, weight, options):
        return _gradients_by_block(rows, weight, targets, grads, options)
    w, (V, _) = weight.astype(rows.dtype), weight.shape
    vocab = vocab_size(V, options.axis_name)

    def step(d_weight, chunk):
        h, y, grad = chunk
        logits = logits_of(h, w, options)
        terms = terms_of(logits, y, options)
        columns = columns_of(y, V, options.axis_name)
        d_logits = logits_gradient(logits, columns, vocab, terms, grad, options).astype(h.dtype)
        # d_weight += d_logits^T h: [m, V]^T [m, D] -> [V, D], summed over chunks in float32
        d_weight = d_weight + jax.lax.dot_general(
            d_logits, h, (((0,), (0,)), ((), ())), preferred_element_type=d_weight.dtype
        )
        return d_weight, (terms, d_logits @ w)  # d_rows: [m, V] [V, D] -> [m, D]

    start = jnp.zeros_like(weight, dtype=jnp.promote_types(rows.dtype, jnp.float32))
    d_weight, (terms, d_rows) = scan(step, start, (rows, targets, grads))
    return terms, d_rows, d_weight.astype(weight.dtype)


def _gradients_by_block(rows, weight, targets, grads: Cotangents, options: Options):
    """Does what `_gradients` does, a block of the vocabulary at a time, with all logits computed twice.

    The first pass gives the terms, the second the gradients.
    """
    V, D = weight.shape
    vocab, wide = vocab_size(V, options.axis_name), jnp.promote_types(rows.dtype, jnp.float32)
    w, first = _blocks(weight, rows.dtype)

    def step(d_weight, chunk):
        h, y, grad = chunk
        columns, terms = columns_of(y, V, options.axis_name), _terms_by_block(h, y, (w, first), V, options)

        def add_gradients(d, block):
            (d_h, d_weight), (number, w, first) = d, block
            logits = logits_of(h, w, options)
            d_logits = logits_gradient(logits, columns - first, vocab, terms, grad, options).astype(h.dtype)
            d_h = d_h + jnp.matmul(d_logits, w, preferred_element_type=wide)
            # [m, v]^T [m, D] -> [v, D]
            d_w = jax.lax.dot_general(d_logits, h, (((0,), (0,)), ((), ())), preferred_element_type=wide)
            return (d_h, d_weight.at[number].add(d_w)), None

        (d_h, d_weight), _ = scan(
            add_gradients, (jnp.zeros_like(h, dtype=wide), d_weight), (jnp.arange(len(w)), w, first)
        )
        return d_weight, (terms, d_h.astype(h.dtype))

    d_weight, (terms, d_rows) = scan(step, jnp.zeros_like(w, dtype=wide), (rows, targets, grads))
    return terms, d_rows, d_weight.reshape(-1, D)[:V].astype(weight.dtype)


def _vary_alike(rows, weight, targets, weights, axis_name: AxisName | None):
    """Marks operands as varying over the mesh axes that any of them varies over, so that JAX sums their gradients."""
    axes = [varying(x) for x in (rows, weight, targets, weights)]
    split = _axes(axis_name)
    if _is_checked(split) and not split <= axes[1]:
        raise ValueError(
            f"axis_name={axis_name!r} must name the axes over which weight is split; it varies over {sorted(axes[1])}"
        )
    # Targets and weights must not vary over the vocabulary's axis: every device scores the same tokens.
    everywhere = frozenset().union(*axes)
    along = everywhere - split
    return vary(rows, everywhere), vary(weight, everywhere), vary(targets, along), vary(weights, along)


def _full_cotangent(cotangent: Array, axis_name: AxisName | None) -> Array:
    """Returns the full cotangent of a result that is replicated over `axis_name`.

    With `check_vma=False` each device holds only a share of it, by the convention of `psum`.
    """
    return cotangent if _is_checked(_axes(axis_name)) else jax.lax.psum(cotangent, axis_name)


def _is_checked(axes: frozenset[str]) -> bool:
    """Returns True if JAX tracks varying axes (`check_vma`); then the device's index on an axis is marked as
    varying.
    """
    return all(axis in varying(jax.lax.axis_index(axis)) for axis in axes)


def _axes(name: AxisName | None) -> frozenset[str]:
    return frozenset(() if name is None else (name,) if isinstance(name, str) else name)
