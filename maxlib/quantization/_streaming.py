"""Runs a decoder layer by layer, and records what its matmuls read: the data for calibration.

Only the records of one layer are in memory, and a new layer replaces the old one before the next is read.
"""

import dataclasses
import functools
import gc
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Float, Int, Num

from maxlib import nn, ops
from maxlib.nn import sites
from maxlib.quantization._apply import check_plain

Model = TypeVar("Model")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Statistics of the inputs of one matmul; E is 1 for a matmul that is not one of experts.

    Attributes:
        covariance: Sum of `x x^T` over tokens, not centered.
        largest: Largest absolute value of each input.
    """

    covariance: Float[Array, "E I I"]
    largest: Float[Array, "E I"]


_rows: dict[str, list[Any]] = {}  # what each matmul of the layer that runs has read, by path
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
        """Yields the number and a copy of each layer; `put` must be called before the next one."""
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
        layer = sites.map_sites(layer, _recording)
        records: dict[str, Inputs] = {}
        outputs = []
        for state in self._states[:batches]:
            outputs.append(_run(layer, state, i))
            for path, read in _statistics(_taken()).items():
                records[path] = read if path not in records else _added(records[path], read)
        return records, outputs

    def put(self, outputs: Sequence[Any]) -> None:
        """Makes the outputs of a layer for each batch the inputs of the next one."""
        self._states = [(x, *state[1:]) for x, state in zip(outputs, self._states, strict=True)]
        gc.collect()  # modules are in cycles, which would keep the arrays of earlier layers


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


def _run(layer: Any, state: Any, i: int) -> Any:
    """Returns the output of layer `i`, which gets its row of the inputs if there is one."""
    x, ctx, inputs = state
    has_row = inputs is not None and i < len(jax.tree.leaves(inputs)[0])
    return jax.block_until_ready(_call(layer, x, ctx, jax.tree.map(lambda a: a[i], inputs) if has_row else None))


def _recording(path: str, site: Any) -> Any:
    check_plain(site, path)
    return site if isinstance(site, nn.Embed) else sites.replace(site, matmul=_Recorder(path))


def _taken() -> dict[str, list[Any]]:
    """Returns what matmuls have read, and forgets it."""
    jax.effects_barrier()
    rows = dict(_rows)
    _rows.clear()
    return rows


def _statistics(rows: dict[str, list[Any]]) -> dict[str, Inputs]:
    """Returns the statistics of the rows of one batch, by path."""
    seen: list[tuple[Any, Inputs]] = []  # queries, keys and values read the same rows
    statistics: dict[str, Inputs] = {}
    for path, calls in rows.items():
        for x, counts in calls:
            read = next((read for y, read in seen if counts is None and np.array_equal(x, y)), None)
            if read is None:
                read = _inputs(x, counts)
                seen += [(x, read)] if counts is None else []
            statistics[path] = read if path not in statistics else _added(statistics[path], read)
    return statistics


@jax.jit
def _inputs(x: Float[Array, "M I"], counts: Int[Array, " E"] | None) -> Inputs:
    """Returns the statistics of rows, which are sorted by expert if there are `counts`."""
    if counts is None:
        return Inputs((x.T @ x)[None], jnp.abs(x).max(axis=0)[None])
    expert = jnp.searchsorted(jnp.cumsum(counts), jnp.arange(len(x)), side="right")
    x = jnp.where((expert < len(counts))[:, None], x, 0)  # rows behind those of the last expert belong to none
    largest = jax.ops.segment_max(jnp.abs(x), expert, len(counts))
    return Inputs(ops.grouped_outer(x, x, counts), jnp.maximum(largest, 0))  # -inf for an expert without rows


@jax.jit
def _added(a: Inputs, b: Inputs) -> Inputs:
    return Inputs(a.covariance + b.covariance, jnp.maximum(a.largest, b.largest))


@dataclasses.dataclass(frozen=True)
class _Recorder:
    """A plain matmul (`nn.matmul.Matmul`) that adds what it reads to `_rows`."""

    path: str

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        of_x, of_w, of_y = spec.replace("->", ",").split(",")
        summed = [letter for letter in of_w if letter not in of_y]
        # [..., inputs] -> [M, I], inputs in the order of the weight
        dims = [of_x.replace("...", "").index(letter) - len(of_x.replace("...", "")) for letter in summed]
        rows = jnp.moveaxis(x, dims, range(-len(dims), 0))
        rows = rows.reshape(-1, math.prod(rows.shape[-len(dims) :])).astype(jnp.float32)
        io_callback(functools.partial(_add, self.path), None, rows)
        return nn.matmul.PlainMatmul().einsum(spec, x, w)

    def grouped(
        self,
        rows: Float[Array, "M I"],
        w: Any,
        rows_per_expert: Int[Array, " E"],
        weight_order: ops.ExpertWeightOrder = "EOI",
    ) -> Float[Array, "M O"]:
        io_callback(functools.partial(_add, self.path), None, rows.astype(jnp.float32), rows_per_expert)
        return nn.matmul.PlainMatmul().grouped(rows, w, rows_per_expert, weight_order)


def _add(path: str, rows: Any, counts: Any = None) -> None:
    with _lock:
        _rows.setdefault(path, []).append((np.array(rows), None if counts is None else np.array(counts)))


def formats_of(layer: Any, decide: sites.Decide, i: int, count: int) -> dict[str, Any]:
    """Returns the format of each matmul of layer `i` of `count`, by path; None for one that is not quantized."""
    return {
        p: decide(sites.Where(f"layers.{p}", sites.kind_of(s), i, count)) for p, s in sites.find(layer, sites.SITES)
    }


def matrices(site: Any) -> Float[Array, "E O I"]:
    """Returns the matrices of a layer's plain weight in float32: one, or one for each expert."""
    sizes = [math.prod(site.w.shape[d] for d in dims) for dims in sites.dimensions(site)]
    # [.., outputs.., inputs..] in any order -> [E, O, I]
    return site.w[...].transpose(_order(site)).reshape(sizes).astype(jnp.float32)


def with_matrices(site: Any, matrices: Float[Array, "E O I"]) -> Any:
    """Returns a layer with other matrices as its weight, in the weight's dtype."""
    return sites.replace(site, w=site.w.replace(arranged(matrices, site, site.w[...])))


def arranged(matrices: Float[Array, "E O I"], site: Any, like: Any) -> Num[Array, "..."]:
    """Returns matrices, or their scales, in the order of a layer's weight, with the sizes and the dtype of `like`."""
    order = _order(site)
    # [E, O, I] -> [.., outputs.., inputs..] -> the order of the weight
    return matrices.reshape([like.shape[d] for d in order]).transpose(np.argsort(order)).astype(like.dtype)


def _order(site: Any) -> list[int]:
    """Returns the dimensions of a layer's weight: those of experts, of outputs, and of inputs."""
    return [d % site.w.ndim for dims in sites.dimensions(site) for d in dims]
