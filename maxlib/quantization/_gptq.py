"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounds weights so that the outputs of a layer change least.

Each column is rounded in turn, and its error is moved to the columns that are not rounded yet, by the covariance of the
inputs. Inputs of large variance are rounded first, and each group gets the best of several scales of both signs. The
inputs are those of the model in full precision.
"""

import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn
from maxlib.nn import sites
from maxlib.nn.sites import Where
from maxlib.quantization._apply import rules_that_divide, store
from maxlib.quantization._formats import INFERENCE, Format, Rules, as_rules
from maxlib.quantization._streaming import Inputs, Stream, arranged, formats_of, matrices, with_layers

Model = TypeVar("Model")
_MAXIMA = {"int4": 7, "int8": 127}
# Scales that are tried, relative to one by which the largest number of a group becomes 7 or 127.
_FACTORS = {"int4": np.array([*range(20, 33), *range(-32, -19)], np.float32) / 32, "int8": np.ones(1, np.float32)}


def gptq(
    model: Model,
    tokens: Sequence[Int[Any, "B T"]],
    rules: Rules = "int4",
    *,
    damping: float = 0.01,
    dtype: Any = jnp.float32,
) -> Model:
    """Returns a model as `for_inference` does, with weights that GPTQ rounds; experts are calibrated on their own rows.

    Covariances of one layer are in memory at a time.

        small = quantization.gptq(model, [tokens], "int8")

    Args:
        model: An `nn.Decoder` in full precision.
        tokens: Batches of text, without padding; a few thousand tokens in all, like those that the model will read.
        rules: As for `for_inference`, with weights in int4 or int8. Matrices outside of the layers, and those whose
            groups run along their outputs, are rounded to nearest.
        damping: Share of the mean variance of inputs that is added to each variance.
        dtype: Dtype of the computation.

    Raises:
        ValueError: as for `for_inference`, for weights in another format, and when a covariance cannot be inverted.
    """
    formats = [rule.format for rule in as_rules(rules, INFERENCE) if rule.format is not None]
    if wrong := [format for format in formats if format.weights not in _MAXIMA]:
        raise ValueError(f"GPTQ rounds to {' or '.join(_MAXIMA)}, got {wrong[0]}; for_inference rounds to every format")
    rules = rules_that_divide(model, rules) if isinstance(rules, str) else as_rules(rules, INFERENCE)
    decide = sites.Decisions(rules, lambda rule: rule.format)
    stream, layers = Stream(model, tokens, dtype), []
    for i, layer in stream:
        records, outputs = stream.record(i, layer)
        layers.append(_quantized(layer, formats_of(layer, decide, i, stream.count), records, damping))
        stream.put(outputs)

    def outside(where: Where) -> Any:
        return None if where.path.startswith("layers.") else decide(where)

    def nearest(site: Any, format: Any, path: str, _: Any) -> Any:
        return nn.stack.map_layers(lambda layer: store(layer, format, path), site)

    new = sites.change_sites(model, outside, nearest)
    decide.check()
    return with_layers(new, layers)


def _quantized(layer: Any, formats: dict[str, Format | None], records: dict[str, Inputs], damping: float) -> Any:
    """Returns a layer with its weights in the formats."""

    def stored(path: str, site: Any) -> Any:
        format = formats[path]
        if format is None:
            return site
        new, is_finite = _stored(site, format, path, records.get(path), damping)
        if not is_finite:
            raise ValueError(
                f"the covariance of what layers.{path} reads must be finite, and with damping={damping} invertible: use a "
                "larger damping, more tokens, or dtype=jnp.float32"
            )
        return new

    return sites.map_sites(layer, stored)


@functools.partial(jax.jit, static_argnames=("format", "path", "damping"))
def _stored(
    site: Any, format: Format, path: str, read: Inputs | None, damping: float
) -> tuple[Any, Bool[Array, ""] | bool]:
    """Returns a layer with its weight in `format`, rounded by what it reads, and whether the values are finite; without
    `read` to nearest.
    """
    stored = store(site, format, f"layers.{path}")
    if read is None or -1 not in sites.dimensions(site)[2]:
        return stored, True
    w = matrices(site)
    values, scale, zeros = _rounded(w, read.covariance, format, damping)
    is_finite = jnp.isfinite(values).all()
    values = arranged(values, site, stored.w.quantized().qvalue)
    stored.w.values = stored.w.values.replace(nn.quantized.pack(values) if format.weights == "int4" else values)
    stored.w.scale = stored.w.scale.replace(arranged(scale, site, stored.w.scale.get_value()))
    if stored.w.zeros is not None:
        stored.w.zeros = stored.w.zeros.replace(arranged(zeros, site, stored.w.zeros.get_value()))
    return stored, is_finite


def _damped(covariance: Float[Array, "I I"], damping: float) -> Float[Array, "I I"]:
    """Returns a covariance that can be inverted."""
    variance = jnp.diagonal(covariance)
    return covariance + jnp.diag(damping * jnp.mean(variance) + jnp.where(variance == 0, 1.0, 0.0))


@functools.partial(jax.jit, static_argnames=("format", "damping"))
def _rounded(
    matrices: Float[Array, "E O I"], covariances: Float[Array, "E I I"], format: Format, damping: float
) -> tuple[Float[Array, "E O I"], Float[Array, "E O G"], Float[Array, "E O G"]]:
    """Returns the values, the scales and the zero points of matrices."""
    return jax.lax.map(lambda pair: _round(pair[0], pair[1], format, damping), (matrices, covariances))


def _round(w: Array, covariance: Array, format: Format, damping: float) -> tuple[Array, Array, Array]:
    (O, I), largest = w.shape, _MAXIMA[format.weights]
    group = format.group or I
    order = _order(jnp.diagonal(covariance), group)
    w, covariance = w[:, order], covariance[order][:, order]
    # U with inverse(H) = U^T U: row i has the weights by which the error of column i moves to the columns after it.
    # With the order of inputs reversed, H = L L^T, and the inverse of L reversed back is U.
    lower = jnp.linalg.cholesky(_damped(covariance, damping)[::-1, ::-1])
    upper = jax.lax.linalg.triangular_solve(lower, jnp.eye(I), left_side=True, lower=True)[::-1, ::-1]

    def round_group(columns: Array, n: Array) -> tuple[Array, tuple[Array, Array, Array]]:
        start = n * group
        block = jax.lax.dynamic_slice(columns, (start, 0), (group, O))
        rows = jax.lax.dynamic_slice(upper, (start, 0), (group, I))
        inner = jax.lax.dynamic_slice(rows, (0, start), (group, group))

        def rounded(grid: tuple[Array, Array]) -> tuple[Array, Array]:
            scale, zero = grid

            def round_column(errors: Array, j: Array) -> tuple[Array, Array]:
                column = block[j] - inner[:, j] @ errors  # those of later columns are still 0
                value = jnp.clip(jnp.round(column / scale) + zero, -largest - 1, largest)
                error = (column - (value - zero) * scale) / inner[j, j]
                return errors.at[j].set(error), value

            errors, values = jax.lax.scan(round_column, jnp.zeros_like(block), jnp.arange(group))
            return values, errors

        # Of several grids, the one whose errors cost least after later columns have made up for them.
        grids = _grids(block, format)
        costs = jax.lax.map(lambda grid: jnp.sum(rounded(grid)[1] ** 2, axis=0), grids)  # [C, O]
        best = jnp.argmin(costs, axis=0)[None]
        scale, zero = (jnp.take_along_axis(of_grids, best, axis=0)[0] for of_grids in grids)
        values, errors = rounded((scale, zero))
        later = jnp.where((jnp.arange(I) >= start + group)[None, :], rows, 0.0)
        return columns - later.T @ errors, (values, scale, zero)

    # Columns are rows here, [I, O], so that each lies together.
    _, (values, scale, zero) = jax.lax.scan(round_group, w.T, jnp.arange(I // group))
    # [G, g, O] -> [O, I] and [G, O] -> [O, G]
    of_groups = jnp.argsort(order[::group] // group)
    return values.reshape(I, O).T[:, jnp.argsort(order)], scale.T[:, of_groups], zero.T[:, of_groups]


def _order(variance: Float[Array, " I"], group: int) -> Int[Array, " I"]:
    """Returns the inputs in the order of rounding: those of large variance first, groups together.

    The last ones take most of the errors.
    """
    groups = variance.reshape(-1, group)
    inputs = jnp.argsort(-groups, axis=1) + group * jnp.arange(len(groups))[:, None]
    return inputs[jnp.argsort(-groups.max(axis=1))].reshape(-1)


def _grids(block: Float[Array, "g O"], format: Format) -> tuple[Float[Array, "C O"], Float[Array, "C O"]]:
    """Returns scales to try for each output, and their zero points.

    Symmetric scales may have both signs: with a negative one, the largest number may be -8 instead of 7.
    """
    factors, most = _FACTORS[format.weights][:, None], _MAXIMA[format.weights]
    if format.symmetric:
        largest = jnp.take_along_axis(block, jnp.argmax(jnp.abs(block), axis=0)[None], axis=0)  # [1, O]
        scales = _as_stored(factors * largest / most)
        return scales, jnp.zeros_like(scales)
    factors = factors[factors[:, 0] > 0]
    low, high = jnp.minimum(block.min(axis=0), 0)[None], jnp.maximum(block.max(axis=0), 0)[None]  # [1, O]
    scales = _as_stored(factors * (high - low) / (2 * most + 1))
    return scales, jnp.round(-most - 1 - factors * low / scales)


def _as_stored(scales: Array) -> Array:
    """Returns scales in float32 as bfloat16 has them; 1 for those that are 0."""
    scales = scales.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(scales != 0, scales, 1.0)
