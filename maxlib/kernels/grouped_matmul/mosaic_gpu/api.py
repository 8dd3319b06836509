"""Grouped matmul, and gate and up together: padding, and custom gradients around the kernels.

The kernels are imported when they are first called, because Mosaic GPU takes longer to import than all of maxlib.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, Num

from maxlib._utils.varying import vary_alike
from maxlib.kernels.grouped_matmul.mosaic_gpu.config import HopperGroupedTiles, grouped_tiles
from maxlib.kernels.grouped_matmul.rows import NAMES, bounds, only_used


def mosaic_gpu(
    rows: Num[Array, "M I"],
    weights: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    weight_order: str = "EOI",
    out_dtype: None = None,
    tiles: HopperGroupedTiles | None = None,
) -> Num[Array, "M O"]:
    """Computes `grouped_matmul`, as `tiled` does, by default with `grouped_tiles`."""
    tiles = tiles or _tiles(weights, weight_order)
    rows, weights, rows_per_expert = vary_alike((rows, weights, rows_per_expert))
    return _on_whole_tiles(lambda rows: _multiply(rows, weights, rows_per_expert, weight_order, tiles), rows)


def _tiles(weights, weight_order: str) -> HopperGroupedTiles:
    return grouped_tiles(*(weights.shape[weight_order.index(axis)] for axis in "IO"))


def glu(
    rows: Num[Array, "M I"],
    gate: Num[Array, "E O I"] | Num[Array, "E I O"],
    up: Num[Array, "E O I"] | Num[Array, "E I O"],
    rows_per_expert: Int[Array, " E"],
    biases: tuple[Float[Array, "E O"], ...],
    weight_order: str,
    activation: Callable[[Array, Array], Array],
    tiles: HopperGroupedTiles | None = None,
) -> Num[Array, "M O"]:
    """Computes `grouped_glu` in one kernel, which reads rows once and joins both products before they are rounded.

    If a gradient is needed, the kernel writes gate and up instead, and XLA joins them: the gradient needs them, and
    both have names, so that `jax.checkpoint` can keep them or run the kernel again.
    """
    tiles = tiles or _tiles(gate, weight_order)
    rows, gate, up, rows_per_expert, biases = vary_alike((rows, gate, up, rows_per_expert, biases))
    return _on_whole_tiles(
        lambda rows: _glu(rows, gate, up, rows_per_expert, biases, weight_order, activation, tiles), rows
    )


def _on_whole_tiles(multiply, rows):
    """Runs `multiply` on rows padded to a multiple of 8, the memory unit's tiles.

    Rows beyond the last expert's need not be finite: their result and gradient are zeros, which the kernels write.
    """
    M = rows.shape[0]
    return multiply(jnp.pad(rows, ((0, -M % 8), (0, 0))))[:M]


# ---------------------------------------------------------------------------------------------- one matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(rows, weights, rows_per_expert, weight_order, tiles):
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_rows import by_rows

    matrix, turned = weights.astype(rows.dtype), weight_order == "EOI"
    return by_rows([rows], [[matrix]], rows_per_expert, turned=turned, name="forward", sizes=tiles.forward)[0]


def _forward(rows, weights, rows_per_expert, weight_order, tiles):
    return _multiply(rows, weights, rows_per_expert, weight_order, tiles), (rows, weights, rows_per_expert)


def _backward(weight_order, tiles, residuals, d_out):
    rows, weights, rows_per_expert = residuals
    d_rows, (d_weights,) = _gradients(weight_order, tiles, rows, [weights], rows_per_expert, [d_out])
    return d_rows, d_weights, None


def _gradients(weight_order, tiles, rows, weights, rows_per_expert, d_out):
    """Computes the gradient of the rows, summed over their products, and that of each product's weights."""
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_experts import by_experts
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_rows import by_rows

    matrices, turned = [[w.astype(rows.dtype)] for w in weights], weight_order == "EIO"
    (d_rows,) = by_rows(d_out, matrices, rows_per_expert, turned=turned, name="d_rows", sizes=tiles.d_rows)
    pairs = [(d, rows) if weight_order == "EOI" else (rows, d) for d in d_out]
    d_weights = [
        by_experts(left, right, rows_per_expert, w.dtype, tiles.d_weights)
        for (left, right), w in zip(pairs, weights, strict=True)
    ]
    return d_rows, d_weights


_multiply.defvjp(_forward, _backward)


# ---------------------------------------------------------------------------------------------- gate and up


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _glu(rows, gate, up, rows_per_expert, biases, weight_order, activation, tiles):
    return _gate_up(rows, gate, up, rows_per_expert, biases, weight_order, tiles, "glu", activation)[0]


def _gate_up(rows, gate, up, rows_per_expert, biases, weight_order, tiles, name, activation=None):
    from maxlib.kernels.grouped_matmul.mosaic_gpu.by_rows import by_rows

    matrices = [w.astype(rows.dtype) for w in (gate, up)]
    return by_rows(
        [rows],
        [matrices],
        rows_per_expert,
        turned=weight_order == "EOI",
        biases=biases,
        activation=activation,
        name=name,
        sizes=tiles.glu,
    )


def _glu_forward(rows, gate, up, rows_per_expert, biases, weight_order, activation, tiles):
    products = _gate_up(rows, gate, up, rows_per_expert, biases, weight_order, tiles, "gate_up")
    products = [checkpoint_name(x, name) for x, name in zip(products, NAMES, strict=True)]
    return _joined(activation, rows.dtype)(*products), (rows, gate, up, rows_per_expert, biases, *products)


def _joined(activation, dtype):
    """Returns a function that joins the products in float32, as the kernel does, and rounds the result to `dtype`."""
    return lambda *products: activation(*(x.astype(jnp.float32) for x in products)).astype(dtype)


def _glu_backward(weight_order, activation, tiles, residuals, d_out):
    rows, gate, up, rows_per_expert, biases, *products = residuals
    d_products = jax.vjp(_joined(activation, rows.dtype), *products)[1](d_out)
    d_rows, d_weights = _gradients(weight_order, tiles, rows, (gate, up), rows_per_expert, d_products)
    return (
        d_rows,
        *d_weights,
        None,
        tuple(_bias_gradient(*pair, rows_per_expert) for pair in zip(d_products, biases, strict=False)),
    )


def _bias_gradient(d_products, bias, rows_per_expert):
    """Sums over each expert's rows: [M, E]^T [M, O] -> [E, O]; rows of no expert need not be finite."""
    first, last = bounds(rows_per_expert).T[:, None]
    row = jnp.arange(len(d_products))[:, None]
    share = ((first <= row) & (row < last)).astype(d_products.dtype)
    d_products = only_used(d_products, rows_per_expert)
    return jnp.einsum("ME,MO->EO", share, d_products, preferred_element_type=jnp.float32).astype(bias.dtype)


_glu.defvjp(_glu_forward, _glu_backward)
