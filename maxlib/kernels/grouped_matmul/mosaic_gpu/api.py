"""Grouped matmul, and gate and up together: padding, and custom gradients around the kernels.

The kernels are imported when they are first called, because Mosaic GPU takes longer to import than all of maxlib.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from maxlib.kernels.grouped_matmul.rows import NAMES, only_used, owners


def mosaic_gpu(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: None = None,
) -> Num[Array, "M O"]:
    """Computes `grouped_matmul`, as `tiled` does.

    Unlike there, rows that are not finite may also spoil the gradient of the next expert's weights.
    """
    ours = lambda rows: _multiply(rows, weights, rows_per_expert, weight_order)
    return _on_whole_tiles(ours, rows, rows_per_expert)


def glu(
    rows: Num[Array, "M I"],
    gate: Num[Array, "E O I"] | Num[Array, "E I O"],
    up: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    biases: tuple[Float[Array, "E O"], ...],
    weight_order: str,
    activation: Callable[[Array, Array], Array],
) -> Num[Array, "M O"]:
    """Computes `grouped_glu` in one kernel, which reads rows once and joins both products before they are rounded.

    If a gradient is needed, the kernel writes gate and up instead, and XLA joins them: the gradient needs them, and
    both have names, so that `jax.checkpoint` can keep them or run the kernel again.
    """
    ours = lambda rows: _glu(rows, gate, up, rows_per_expert, biases, weight_order, activation)
    return _on_whole_tiles(ours, rows, rows_per_expert)


def _on_whole_tiles(multiply, rows, rows_per_expert):
    """Runs `multiply` on rows padded to a multiple of 8, with zeros beyond the last expert's rows."""
    M = rows.shape[0]
    rows = jnp.pad(rows, ((0, -M % 8), (0, 0)))  # the memory unit's tiles
    # Rows beyond the last expert's need not be finite, and the kernel does not write their results.
    return only_used(multiply(only_used(rows, rows_per_expert)), rows_per_expert)[:M]


# ---------------------------------------------------------------------------------------------- one matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _multiply(rows, weights, rows_per_expert, weight_order):
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_rows import by_rows

    matrix, turned = weights.astype(rows.dtype), weight_order == "EOI"
    return by_rows([rows], [[matrix]], rows_per_expert, turned=turned, name="forward")[0]


def _forward(rows, weights, rows_per_expert, weight_order):
    return _multiply(rows, weights, rows_per_expert, weight_order), (rows, weights, rows_per_expert)


def _backward(weight_order, residuals, d_out):
    rows, weights, rows_per_expert = residuals
    d_rows, (d_weights,) = _gradients(weight_order, rows, [weights], rows_per_expert, [d_out])
    return d_rows, d_weights, None


def _gradients(weight_order, rows, weights, rows_per_expert, d_out):
    """Computes the gradient of the rows, summed over their products, and that of each product's weights."""
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_experts import by_experts
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_rows import by_rows

    matrices, turned = [[w.astype(rows.dtype)] for w in weights], weight_order == "EIO"
    (d_rows,) = by_rows(d_out, matrices, rows_per_expert, turned=turned, name="d_rows")
    pairs = [(d, rows) if weight_order == "EOI" else (rows, d) for d in d_out]
    d_weights = [by_experts(*pair, rows_per_expert, w.dtype) for pair, w in zip(pairs, weights, strict=True)]
    return only_used(d_rows, rows_per_expert), d_weights


_multiply.defvjp(_forward, _backward)


# ---------------------------------------------------------------------------------------------- gate and up


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _glu(rows, gate, up, rows_per_expert, biases, weight_order, activation):
    return _gate_up(rows, gate, up, rows_per_expert, biases, weight_order, activation=activation, name="glu")[0]


def _gate_up(rows, gate, up, rows_per_expert, biases, weight_order, **how):
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_rows import by_rows

    matrices = [w.astype(rows.dtype) for w in (gate, up)]
    return by_rows([rows], [matrices], rows_per_expert, turned=weight_order == "EOI", biases=biases, **how)


def _glu_forward(rows, gate, up, rows_per_expert, biases, weight_order, activation):
    found = _gate_up(rows, gate, up, rows_per_expert, biases, weight_order, name="gate_up")
    found = [checkpoint_name(x, name) for x, name in zip(found, NAMES, strict=True)]
    return _joined(activation, rows.dtype)(*found), (rows, gate, up, rows_per_expert, biases, *found)


def _joined(activation, dtype):
    """Returns a function that joins the products in float32, as the kernel does, and rounds the result to `dtype`."""
    return lambda *products: activation(*(x.astype(jnp.float32) for x in products)).astype(dtype)


def _glu_backward(weight_order, activation, residuals, d_out):
    rows, gate, up, rows_per_expert, biases, *found = residuals
    d_found = jax.vjp(_joined(activation, rows.dtype), *found)[1](d_out)
    d_found = [only_used(d, rows_per_expert) for d in d_found]
    d_rows, d_weights = _gradients(weight_order, rows, (gate, up), rows_per_expert, d_found)
    # The gradient of a bias sums over its expert's rows: [M, E]^T [M, O] -> [E, O].
    share = jax.nn.one_hot(owners(rows_per_expert, len(rows)), len(rows_per_expert), dtype=rows.dtype)
    total = lambda d, b: jnp.einsum("ME,MO->EO", share, d, preferred_element_type=jnp.float32).astype(b.dtype)
    return d_rows, *d_weights, None, tuple(map(total, d_found, biases))


_glu.defvjp(_glu_forward, _glu_backward)
