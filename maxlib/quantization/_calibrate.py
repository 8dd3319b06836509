"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): rounds weights so that the outputs of a layer change least.

Each column is rounded in turn, and its error is moved to the columns that are not rounded yet, by the covariance of the
inputs. Layers are calibrated one after the other on the outputs of the quantized layers before them.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.nn import sites
from maxlib.nn.sites import Where
from maxlib.quantization._apply import store
from maxlib.quantization._formats import INFERENCE, Rules, as_rules

Model = TypeVar("Model")
_MAXIMA = {"int4": 7, "int8": 127}
_SHRINKS = np.linspace(0.6, 1.0, 17, dtype=np.float32)  # of a group's largest value, that are tried for its scale
_covariances: dict[str, Any] = {}  # of the layer that is being calibrated, by path


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
        ValueError: as for `for_inference`, and for weights in another format.
    """
    rules = as_rules(rules, INFERENCE)
    if wrong := [rule.format for rule in rules if rule.format is not None and rule.format.weights not in _MAXIMA]:
        raise ValueError(f"GPTQ rounds to {' or '.join(_MAXIMA)}, got {wrong[0]}; for_inference rounds to every format")
    decide = sites.Decisions(rules, lambda rule: rule.format)
    plain: Any = nn.unstack(model)
    stack, count = plain.layers, len(plain.layers)
    states = []
    for batch in tokens:
        x, arguments = plain.embed_inputs(jnp.asarray(batch), dtype=dtype)
        x, ctx = plain.enter(x, **arguments)
        inputs = plain.layer_inputs(x.x if isinstance(x, nn.stack.Carry) else x, ctx)
        states.append((x, dataclasses.replace(ctx, features=None), inputs))
    layers = []
    for i in range(count):
        layers.append(_calibrated(stack[i], i, count, states, decide, damping))
        states = [(_run(layers[-1], x, ctx, _row(inputs, i)), ctx, inputs) for x, ctx, inputs in states]

    def change(path: str, site: Any) -> Any:
        where, _, inner = path.partition(".")
        if where == "layers":
            i = next(i for i in range(count) if inner.startswith(f"{stack.where(i)[0]}."))
            return dict(sites.find(layers[i], sites.SITES))[inner.removeprefix(f"{stack.where(i)[0]}.")]
        format = decide(Where(path, sites.kind_of(site)))
        return site if format is None else store(site, format, path)

    new = sites.map_sites(plain, change)
    decide.check()
    new.layers = new.layers.restacked()
    return new


def _calibrated(layer: Any, i: int, count: int, states: Any, decide: sites.Decisions, damping: float) -> Any:
    """Returns a layer with rounded weights."""
    formats = {p: decide(Where(f"layers.{p}", sites.kind_of(s), i, count)) for p, s in sites.find(layer, sites.SITES)}
    recording = sites.map_sites(
        layer, lambda path, site: site if formats[path] is None else sites.replace(site, matmul=_Recorder(path))
    )
    _covariances.clear()
    for x, ctx, inputs in states:
        jax.block_until_ready(_run(recording, x, ctx, _row(inputs, i)))
    jax.effects_barrier()

    def round_weight(path: str, site: Any) -> Any:
        format = formats[path]
        if format is None:
            return site
        stored = store(site, format, f"layers.{path}")
        experts, outputs, inputs = sites.dimensions(site)
        if -1 not in inputs or path not in _covariances:
            return stored
        w = site.w[...]
        order = [d % w.ndim for d in (*experts, *outputs, *inputs)]
        columns = math.prod(w.shape[d] for d in inputs)
        rows = math.prod(w.shape[d] for d in outputs)
        # [.., outputs.., inputs..] -> [E, O, I]
        matrices = w.transpose(order).reshape(-1, rows, columns).astype(jnp.float32)
        covariances = jnp.asarray(_covariances[path]).reshape(-1, columns, columns)
        group = format.group or columns
        values, scale = _rounded(matrices, covariances, format.weights, group, damping)
        back, shape = np.argsort(order), [w.shape[d] for d in order]
        values = values.reshape(shape).transpose(back).astype(stored.w.quantized().qvalue.dtype)
        # A scale for each group of the last dimension, or one for all inputs of an output.
        of_scale = [*shape[:-1], shape[-1] // group] if format.group else [*shape[: -len(inputs)], *[1] * len(inputs)]
        new = stored.w
        new.values = new.values.replace(nn.quantized.pack(values) if format.weights == "int4" else values)
        new.scale = new.scale.replace(scale.reshape(of_scale).transpose(back).astype(new.scale.get_value().dtype))
        return stored

    return sites.map_sites(layer, round_weight)


@jax.jit
def _run(layer: Any, x: Any, ctx: Any, inputs: Any) -> Any:
    return (layer(x, ctx, None) if inputs is None else layer(x, ctx, None, inputs))[0]


def _row(inputs: Any, i: int) -> Any:
    """Returns the inputs of layer `i`; None if it has none."""
    return None if inputs is None or i >= len(jax.tree.leaves(inputs)[0]) else jax.tree.map(lambda a: a[i], inputs)


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """A plain matmul (`nn.matmul.Matmul`) that adds the covariance of its inputs to `_covariances`."""

    path: str

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        of_x, of_w, of_y = spec.replace("->", ",").split(",")
        summed = [letter for letter in of_w if letter not in of_y]
        # [..., inputs] -> [M, I], inputs in the order of the weight
        dims = [of_x.replace("...", "").index(letter) - len(of_x.replace("...", "")) for letter in summed]
        rows = jnp.moveaxis(x, dims, range(-len(dims), 0))
        rows = rows.reshape(-1, math.prod(rows.shape[-len(dims) :])).astype(jnp.float32)
        self._add(rows.T @ rows)
        return nn.matmul.PlainMatmul().einsum(spec, x, w)

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        used = jnp.arange(len(rows)) < rows_per_expert.sum()
        known = jnp.where(used[:, None], rows, 0).astype(jnp.float32)
        self._add(ops.grouped_outer(known, known, rows_per_expert))
        return nn.matmul.PlainMatmul().grouped(rows, w, rows_per_expert, weight_order)

    def _add(self, covariance: Array) -> None:
        io_callback(functools.partial(_add, self.path), None, covariance)


def _add(path: str, covariance: Any) -> None:
    _covariances[path] = _covariances.get(path, 0) + np.asarray(covariance)


@functools.partial(jax.jit, static_argnames=("qtype", "group", "damping"))
def _rounded(
    matrices: Float[Array, "E O I"], covariances: Float[Array, "E I I"], qtype: str, group: int, damping: float
) -> tuple[Float[Array, "E O I"], Float[Array, "E O G"]]:
    """Returns the values and the scales of matrices with groups of `group` inputs."""
    return jax.lax.map(lambda pair: _round(pair[0], pair[1], _MAXIMA[qtype], group, damping), (matrices, covariances))


def _round(w: Array, covariance: Array, largest: int, group: int, damping: float) -> tuple[Array, Array]:
    O, I = w.shape
    variance = jnp.diagonal(covariance)
    dead = variance == 0
    damped = covariance + jnp.diag(damping * jnp.mean(variance) + jnp.where(dead, 1.0, 0.0))
    # U with inverse(H) = U^T U: row i has the weights by which the error of column i moves to the columns after it.
    inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(damped), True), jnp.eye(I))
    upper = jnp.linalg.cholesky((inverse + inverse.T) / 2, upper=True)

    def round_group(w: Array, n: Array) -> tuple[Array, tuple[Array, Array]]:
        start = n * group
        block = jax.lax.dynamic_slice(w, (0, start), (O, group))
        rows = jax.lax.dynamic_slice(upper, (start, 0), (group, I))
        inner = jax.lax.dynamic_slice(rows, (0, start), (group, group))
        # An error of column j costs (error / U_jj)^2 after the columns behind it have made up for it.
        scale = _scale(block, 1 / jnp.diagonal(inner) ** 2, largest)

        def round_column(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            block, values, errors = state
            column = block[:, j]
            value = jnp.clip(jnp.round(column / scale), -largest - 1, largest)
            error = (column - value * scale) / inner[j, j]
            after = jnp.where(jnp.arange(group) > j, inner[j], 0.0)
            return block - jnp.outer(error, after), values.at[:, j].set(value), errors.at[:, j].set(error)

        zeros = jnp.zeros((O, group))
        _, values, errors = jax.lax.fori_loop(0, group, round_column, (block, zeros, zeros))
        later = jnp.where((jnp.arange(I) >= start + group)[None, :], rows, 0.0)
        return w - errors @ later, (values, scale)

    _, (values, scale) = jax.lax.scan(round_group, w, jnp.arange(I // group))
    # [G, O, g] -> [O, I] and [G, O] -> [O, G]
    return values.transpose(1, 0, 2).reshape(O, I), scale.T


def _scale(block: Array, cost: Array, largest: int) -> Array:
    """Returns the scale of each row with the least squared error, where `cost` is the factor of each column."""
    most = jnp.max(jnp.abs(block), axis=1)

    def error(shrink: Array) -> tuple[Array, Array]:
        scale = (shrink * most / largest).astype(jnp.bfloat16).astype(jnp.float32)  # as it is stored
        scale = jnp.where(scale > 0, scale, 1.0)
        rounded = jnp.clip(jnp.round(block / scale[:, None]), -largest - 1, largest) * scale[:, None]
        return jnp.sum((block - rounded) ** 2 * cost[None, :], axis=1), scale

    errors, scales = jax.lax.map(error, jnp.asarray(_SHRINKS))
    return jnp.take_along_axis(scales, jnp.argmin(errors, axis=0)[None], axis=0)[0]
