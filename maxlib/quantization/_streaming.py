"""Runs a decoder layer by layer, and records what its matmuls read: the data for calibration.

Only the records of one layer are in memory, and a new layer replaces the old one before the next is read.
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.nn import sites

Model = TypeVar("Model")


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of one matmul; E is 1 for a matmul that is not one of experts.

    Attributes:
        covariance: Sum of `x x^T` over tokens, not centered.
        largest: Largest absolute value of each input.
    """

    covariance: Float[Any, "E I I"]
    largest: Float[Any, "E I"]


_records: dict[str, Inputs] = {}  # of the layer that runs, by path
_lock = threading.Lock()  # callbacks may run in several threads


class Stream:
    """The layers of a decoder, and the activations that reach the next of them.

    Args:
        model: An `nn.Decoder`.
        tokens: Batches of text, without padding.
        dtype: Dtype of the computation.

    Raises:
        ValueError: If there is no text.
    """

    def __init__(self, model: Any, tokens: Sequence[Int[Any, "B T"]], dtype: Any):
        if not len(tokens):
            raise ValueError("tokens must have a batch of ids, `B T`, or several; got none")
        self.model, self.count = model, len(model.layers)
        self._states = []
        for batch in tokens:
            x, arguments = model.embed_inputs(jnp.asarray(batch), dtype=dtype)
            x, ctx = model.enter(x, **arguments)
            inputs = model.layer_inputs(x.x if isinstance(x, nn.stack.Carry) else x, ctx)
            self._states.append((x, dataclasses.replace(ctx, features=None), inputs))

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        """Yields the number and a copy of each layer; `advance` must be called before the next one."""
        return ((i, jax.tree.map(jnp.asarray, self.model.layers[i])) for i in range(self.count))

    def record(self, i: int, layer: Any, *, batches: int | None = None) -> tuple[dict[str, Inputs], list[Any]]:
        """Runs layer `i`, as `layer` now is.

        Args:
            i: Its number.
            layer: The layer.
            batches: How many batches to run; None for all.

        Returns:
            What each matmul read, by path, and the layer's outputs for each batch.
        """

        def recording(path: str, site: Any) -> Any:
            return site if isinstance(site, nn.Embed) else sites.replace(site, matmul=_Recorder(path))

        _records.clear()
        outputs = self._run(i, sites.map_sites(layer, recording), batches)
        jax.effects_barrier()
        records = dict(_records)
        _records.clear()
        return records, outputs

    def advance(self, i: int, layer: Any) -> None:
        """Makes the outputs of layer `i`, as `layer` now is, the inputs of the next one."""
        outputs = self._run(i, layer, None)
        self._states = [(x, ctx, inputs) for x, (_, ctx, inputs) in zip(outputs, self._states, strict=True)]

    def _run(self, i: int, layer: Any, batches: int | None) -> list[Any]:
        states = self._states[:batches]
        return [jax.block_until_ready(_call(layer, x, ctx, _row(inputs, i))) for x, ctx, inputs in states]


def with_layers(model: Model, layers: Sequence[Any]) -> Model:
    """Returns a model with other layers; equal ones are scanned."""
    new: Any = jax.tree.map(lambda a: a, model)
    stack = jax.eval_shape(lambda stack: stack.unstacked(), new.layers)
    for slots in stack.groups:  # one, with all layers; none without layers
        for i, layer in enumerate(layers):
            slots[i] = layer
    new.layers = stack.restacked()
    return new


@jax.jit
def _call(layer: Any, x: Any, ctx: Any, inputs: Any) -> Any:
    return (layer(x, ctx, None) if inputs is None else layer(x, ctx, None, inputs))[0]


def _row(inputs: Any, i: int) -> Any:
    """Returns the inputs of layer `i`; None if it has none."""
    return None if inputs is None or i >= len(jax.tree.leaves(inputs)[0]) else jax.tree.map(lambda a: a[i], inputs)


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """A plain matmul (`nn.matmul.Matmul`) that adds what it reads to `_records`."""

    path: str

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        of_x, of_w, of_y = spec.replace("->", ",").split(",")
        summed = [letter for letter in of_w if letter not in of_y]
        # [..., inputs] -> [M, I], inputs in the order of the weight
        dims = [of_x.replace("...", "").index(letter) - len(of_x.replace("...", "")) for letter in summed]
        rows = jnp.moveaxis(x, dims, range(-len(dims), 0))
        rows = rows.reshape(-1, math.prod(rows.shape[-len(dims) :])).astype(jnp.float32)
        self._add((rows.T @ rows)[None], jnp.abs(rows).max(axis=0)[None])
        return nn.matmul.PlainMatmul().einsum(spec, x, w)

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        # Rows are sorted by expert; those behind the last one belong to none.
        expert = jnp.searchsorted(jnp.cumsum(rows_per_expert), jnp.arange(len(rows)), side="right")
        used = expert < len(rows_per_expert)
        known = jnp.where(used[:, None], rows, 0).astype(jnp.float32)
        largest = jax.ops.segment_max(jnp.abs(known), expert, len(rows_per_expert))
        self._add(ops.grouped_outer(known, known, rows_per_expert), jnp.maximum(largest, 0))  # -inf without rows
        return nn.matmul.PlainMatmul().grouped(rows, w, rows_per_expert, weight_order)

    def _add(self, covariance: Array, largest: Array) -> None:
        io_callback(functools.partial(_add, self.path), None, covariance, largest)


def _add(path: str, covariance: Any, largest: Any) -> None:
    covariance, largest = np.asarray(covariance), np.asarray(largest)
    with _lock:
        if path in _records:
            covariance = covariance + _records[path].covariance
            largest = np.maximum(largest, _records[path].largest)
        _records[path] = Inputs(covariance, largest)


def matrices(site: Any) -> Float[Array, "E O I"]:
    """Returns the matrices of a layer's plain weight in float32: one, or one for each expert."""
    w = site.w[...]
    experts, outputs, inputs = ([d % w.ndim for d in dims] for dims in sites.dimensions(site))
    sizes = [math.prod(w.shape[d] for d in dims) for dims in (experts, outputs, inputs)]
    # [.., outputs.., inputs..] in any order -> [E, O, I]
    return w.transpose([*experts, *outputs, *inputs]).reshape(sizes).astype(jnp.float32)


def spread(site: Any, values: Float[Array, "E N"], *, inputs: bool) -> Float[Array, "..."]:
    """Returns values for each input, or each output, in a shape that broadcasts to the layer's weight."""
    ndim = len(sites.axes_of(site))
    experts, of_outputs, of_inputs = sites.dimensions(site)
    dims = [*(experts if len(values) > 1 else ()), *(of_inputs if inputs else of_outputs)]
    return values.reshape([site.w.shape[d] if d - ndim in dims else 1 for d in range(ndim)])
