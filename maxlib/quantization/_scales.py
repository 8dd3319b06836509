"""Moves scales from the inputs of matmuls into what computes them, so that both round better: AWQ and SmoothQuant.

A norm, or a matmul whose output is only multiplied before the next matmul (the up-projection of a gated MLP), is the
source of its readers' inputs: `(x / s) (s w) = x w`. Which matmuls read a source is found by trial, so a family says
nothing about it: a factor on the source must come back in what they read, and must leave the layer's output as it was
once their weights are divided by it.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib._utils.paths import dotted
from maxlib.nn import sites
from maxlib.quantization._apply import divides
from maxlib.quantization._formats import INFERENCE, Format, Rules, as_rules
from maxlib.quantization._streaming import Inputs, Stream, formats_of, matrices, spread, with_layers

Model = TypeVar("Model")
Factor = Float[Array, "E N"]  # E is 1, or experts have factors of their own
_NORMS = (nn.RMSNorm, nn.LayerNorm)
_TOLERANCE = 1e-2  # of the largest value; factors are 0.5 and 2


@dataclasses.dataclass(frozen=True)
class Link:
    """A source of inputs, and all matmuls that read it.

    Attributes:
        source: Path of a norm or a matmul in its layer.
        readers: Paths of matmuls.
    """

    source: str
    readers: tuple[str, ...]


def awq(
    model: Model,
    tokens: Sequence[Int[Any, "B T"]],
    rules: Rules = "int4",
    *,
    grid: int = 12,
    clip: bool = True,
    dtype: Any = jnp.float32,
) -> Model:
    """Returns a model in full precision whose weights lose less when they are rounded to nearest.

    AWQ (Lin et al. 2023, arXiv:2306.00978) multiplies the weights of inputs that are often large, so that they are
    rounded more finely, and divides what computes these inputs. Of `s = rms(x)^r` it takes the exponent for which the
    outputs change least. Then it limits the largest weights of each group where that helps the others.

        small = quantization.for_inference(quantization.awq(model, [tokens], "int4"), "int4")

    Args:
        model: An `nn.Decoder` in full precision.
        tokens: Batches of text, as for `gptq`.
        rules: Those of the following `for_inference`, or `gptq`.
        grid: Number of exponents between 0 and 1.
        clip: False leaves large weights as they are: the model then computes what it did.
        dtype: Dtype of the computation.

    Raises:
        ValueError: when there is no text.
    """
    decide = sites.Decisions(as_rules(rules, INFERENCE), lambda rule: rule.format)

    def change(i: int, layer: Any, links: Sequence[Link], records: dict[str, Inputs]) -> Any:
        formats = formats_of(layer, decide, i, count)
        for link in links:
            layer = _scaled(layer, link, _best(layer, link, formats, records, grid), records)
        if not clip:
            return layer
        return sites.map_sites(layer, lambda path, site: _clipped(site, formats[path], records.get(path)))

    count = len(model.layers)  # pyright: ignore[reportAttributeAccessIssue]
    return _by_layer(model, tokens, change, dtype)


def smoothquant(
    model: Model, tokens: Sequence[Int[Any, "B T"]], *, strength: float = 0.5, dtype: Any = jnp.float32
) -> Model:
    """Returns a model that computes the same, with smaller outliers among the inputs of its matmuls.

    SmoothQuant (Xiao et al. 2022, arXiv:2211.10438) divides each input by `max|x|^a / max|w|^(1 - a)` and multiplies
    its weights by it, for formats that round activations too.

        small = quantization.for_inference(quantization.smoothquant(model, [tokens]), "int8_w8a8")

    Args:
        model: An `nn.Decoder` in full precision.
        tokens: Batches of text, as for `gptq`.
        strength: The exponent `a`: 1 moves all outliers from the inputs to the weights.
        dtype: Dtype of the computation.

    Raises:
        ValueError: when `strength` is not in [0, 1], or there is no text.
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"strength must be in [0, 1], got {strength}")

    def change(i: int, layer: Any, links: Sequence[Link], records: dict[str, Inputs]) -> Any:
        for link in links:
            of_inputs = _over_readers(link, layer, jnp.max, lambda path, _: records[path].largest)
            of_weights = _over_readers(link, layer, jnp.max, lambda _, w: jnp.abs(w).max(axis=1))
            factor = jnp.maximum(of_inputs, 1e-5) ** strength / jnp.maximum(of_weights, 1e-5) ** (1 - strength)
            layer = _scaled(layer, link, jnp.where(of_inputs > 0, factor, 1.0), records)
        return layer

    return _by_layer(model, tokens, change, dtype)


def _by_layer(
    model: Any,
    tokens: Sequence[Any],
    change: Callable[[int, Any, Sequence[Link], dict[str, Inputs]], Any],
    dtype: Any,
) -> Any:
    """Replaces the layers of a model by `change(i, layer, links, what its matmuls read)`."""
    stream, layers = Stream(model, tokens, dtype), []
    links: dict[Hashable, list[Link]] = {}  # layers of a kind have the same
    for i, layer in stream:
        kind = model.layers.kind_numbers[i]
        if kind not in links:
            links[kind] = find_links(stream, i, layer)
        records, outputs = stream.record(i, layer)
        layers.append(change(i, layer, links[kind], records))
        stream.put(outputs)
    return with_layers(model, layers)


def find_links(stream: Stream, i: int, layer: Any) -> list[Link]:
    """Lists the sources of layer `i` whose readers can take over a factor."""
    records, (output,) = stream.record(i, layer, batches=1)
    links = []
    for path, node in nn.tree.find(layer, (*_NORMS, *sites.SITES)):
        if isinstance(node, nn.Embed) or not _is_plain(node):
            continue
        factor = jnp.asarray(np.random.RandomState(0).choice([0.5, 2.0], (1, _width(node))), jnp.float32)
        after, _ = stream.record(i, _with_factor(layer, Link(path, ()), 1 / factor), batches=1)
        # All experts together: each gets other tokens while their router reads what is scaled.
        sums = {p: (after[p].covariance.sum(axis=0), read.covariance.sum(axis=0)) for p, read in records.items()}
        readers = tuple(p for p, (new, old) in sums.items() if _is_near(new, old, jnp.outer(factor[0], factor[0])))
        if not readers:
            continue
        link = Link(path, readers)
        _, (same,) = stream.record(i, _with_factor(layer, link, 1 / factor), batches=1)
        pairs = zip(jax.tree.leaves(same), jax.tree.leaves(output), strict=True)
        if all(_is_near(a, b) for a, b in pairs):
            links.append(link)
    return links


def _is_near(a: Array, b: Array, factor: Array | None = None) -> bool:
    """Returns True if `a` is `b`, or `b` times a factor of its shape."""
    if factor is not None and b.shape != factor.shape:
        return False
    want = b if factor is None else b * factor
    return bool(jnp.abs(a - want).max() <= _TOLERANCE * jnp.abs(want).max())


def _is_plain(node: Any) -> bool:
    """Returns True for norms, and for matmuls with a plain weight and no adapter."""
    return isinstance(node, _NORMS) or (
        not isinstance(node.w, nn.quantized.QuantizedWeight) and isinstance(node.matmul, nn.matmul.PlainMatmul)
    )


def _width(node: Any) -> int:
    """Returns the number of outputs of a norm or a matmul."""
    if isinstance(node, _NORMS):
        return node.scale.shape[-1]
    return matrices(node).shape[1]


def without_weight(layer: Any, link: Link) -> Any:
    """Returns a layer whose norm, if the source is one, has moved its weight into the readers."""
    source = dict(nn.tree.find(layer, (*_NORMS, *sites.SITES)))[link.source]
    if not isinstance(source, nn.RMSNorm):
        return layer
    weight = (source.scale[...] + (1.0 if source.plus_one else 0.0))[None]
    ones = jax.tree.map(lambda a: jnp.ones_like(a) - source.plus_one, source)
    layer = _replaced(layer, (link.source,), lambda _: ones)
    return _replaced(layer, link.readers, lambda site: _with_inputs(site, weight))


def _with_factor(layer: Any, link: Link, factor: Factor) -> Any:
    """Returns a layer with a factor on its readers' weights, and its source divided by it."""
    layer = _replaced(layer, (link.source,), lambda node: _with_outputs(node, 1 / factor))
    return _replaced(layer, link.readers, lambda site: _with_inputs(site, factor))


def _scaled(layer: Any, link: Link, factor: Factor, records: dict[str, Inputs]) -> Any:
    """Returns a layer as `_with_factor` does, and updates the records of what its matmuls read."""
    for path in link.readers:
        read = records[path]
        square = factor[:, :, None] * factor[:, None, :]
        records[path] = Inputs(
            read.covariance / jnp.broadcast_to(square, read.covariance.shape),
            read.largest / jnp.broadcast_to(factor, read.largest.shape),
        )
    return _with_factor(layer, link, factor)


@jax.jit
def _with_outputs(node: Any, factor: Factor) -> Any:
    new = jax.tree.map(lambda a: a, node)
    if isinstance(node, _NORMS):
        new.scale = _product(node.scale, factor[0], offset=1.0 if node.plus_one else 0.0)
        bias = getattr(node, "bias", None)
        if bias is not None:
            new.bias = _product(bias, factor[0])
        return new
    new.w = _product(node.w, spread(node, factor, inputs=False))
    if node.b is not None:
        experts = len(sites.dimensions(node)[0]) if len(factor) == 1 else 0
        new.b = _product(node.b, factor.reshape(node.b.shape[experts:]))
    return new


@jax.jit
def _with_inputs(site: Any, factor: Factor) -> Any:
    return sites.replace(site, w=_product(site.w, spread(site, factor, inputs=True)))


def _product(variable: nnx.Variable, factor: Array, offset: float = 0.0) -> nnx.Variable:
    """Returns a variable multiplied by a factor, in its dtype; `offset` is added before and subtracted after."""
    value = variable[...]
    product = (value.astype(jnp.float32) + offset) * jnp.broadcast_to(factor, value.shape) - offset
    return variable.replace(product.astype(value.dtype))


def _replaced(layer: Any, paths: Collection[str], change: Callable[[Any], Any]) -> Any:
    """Returns a layer in which the norms or the matmuls at some paths are changed."""

    def changed(path: Any, node: Any) -> Any:
        return change(node) if dotted(path) in paths else node

    return jax.tree_util.tree_map_with_path(changed, layer, is_leaf=lambda x: isinstance(x, (*_NORMS, *sites.SITES)))


def _over_readers(
    link: Link, layer: Any, join: Callable[..., Array], of: Callable[[str, Array], Float[Array, "E I"]]
) -> Factor:
    """Joins a value of each reader's inputs; those of experts are separate only if the source has experts too."""
    nodes = dict(nn.tree.find(layer, (*_NORMS, *sites.SITES)))
    values = [of(path, matrices(nodes[path])) for path in link.readers]
    if isinstance(nodes[link.source], nn.ExpertLinear):
        return join(jnp.stack(values), axis=0)
    return join(jnp.concatenate(values), axis=0, keepdims=True)


def _best(layer: Any, link: Link, formats: dict[str, Format | None], records: dict[str, Inputs], grid: int) -> Factor:
    """Returns the factor on the readers' weights for which their outputs change least when they are rounded."""

    def power(path: str, _: Array) -> Array:
        return jnp.diagonal(records[path].covariance, axis1=1, axis2=2)

    size = jnp.sqrt(_over_readers(link, layer, jnp.sum, power))
    size = jnp.where(size > 0, size / size.max(), 1.0)
    exponents = jnp.linspace(0, 1, grid)
    candidates = jnp.maximum(size[None] ** exponents[:, None, None], 1e-4)  # [R, E, I]
    most, least = candidates.max(axis=-1, keepdims=True), candidates.min(axis=-1, keepdims=True)
    candidates = candidates / jnp.sqrt(most * least)
    nodes = dict(nn.tree.find(layer, sites.SITES))
    errors = jnp.zeros(candidates.shape[:2])
    for path in link.readers:
        format = formats[path]
        if format is not None and divides(format, nodes[path].w):
            of_path = _errors(nodes[path], candidates, records[path].covariance, format)
            errors += of_path if errors.shape[1] > 1 else of_path.sum(axis=1, keepdims=True)
    choice = errors.argmin(axis=0)  # [E]
    return jnp.take_along_axis(candidates, choice[None, :, None], axis=0)[0]


@functools.partial(jax.jit, static_argnames="format")
def _errors(
    site: Any, candidates: Float[Array, "R F I"], covariance: Float[Array, "E I I"], format: Format
) -> Float[Array, "R E"]:
    """Returns the squared error of the outputs for each factor on the weights; F is E, or 1 for a factor of all."""
    exact = matrices(site)

    def error(factor: Factor) -> Array:
        on_w = jnp.broadcast_to(spread(site, factor, inputs=True), site.w.shape)
        rounded = _nearest(site, site.w[...] * on_w, format) / on_w
        change = matrices(sites.replace(site, w=site.w.replace(rounded))) - exact
        return jnp.sum((change @ covariance) * change, axis=(1, 2))

    return jax.lax.map(error, candidates)


def _nearest(site: Any, w: Array, format: Format) -> Array:
    """Returns a weight rounded as `for_inference` stores it."""
    outputs, axes = sites.outputs(site), sites.axes_of(site)
    return nn.quantized.QuantizedWeight(w, qtype=format.weights, outputs=outputs, group=format.group, axes=axes)[...]


def _clipped(site: Any, format: Format | None, read: Inputs | None) -> Any:
    """Returns a layer with the largest weights of its groups limited, where that changes its outputs less."""
    if format is None or format.group is None or read is None or not divides(format, site.w):
        return site
    if -1 not in sites.dimensions(site)[2]:
        return site
    return sites.replace(site, w=site.w.replace(_limited(site, read.covariance, format).astype(site.w.dtype)))


@functools.partial(jax.jit, static_argnames="format")
def _limited(site: Any, covariance: Float[Array, "E I I"], format: Format) -> Array:
    """Returns the weight with the best of several limits for each group, by the error of the group's product."""
    w, group = site.w[...], format.group
    assert group is not None
    E, O, I = matrices(site).shape
    # Blocks of the diagonal: [E, I, I] -> [E, G, g, g]
    blocks = covariance.reshape(len(covariance), I // group, group, I // group, group)
    blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)
    groups = w.reshape(*w.shape[:-1], -1, group)
    most = jnp.abs(groups).max(axis=-1, keepdims=True)

    def limited(shrink: Array) -> Array:
        most_now = jnp.broadcast_to(most * shrink, groups.shape)
        return jnp.clip(groups, -most_now, most_now).reshape(w.shape)

    def error(shrink: Array) -> Array:
        change = _nearest(site, limited(shrink), format) - w
        change = matrices(sites.replace(site, w=site.w.replace(change))).reshape(E, O, I // group, group)
        return jnp.einsum("eogi,egij,eogj->eog", change, blocks, change)

    shrinks = jnp.linspace(1.0, 0.5, 11)
    best = shrinks[jax.lax.map(error, shrinks).argmin(axis=0)]  # [E, O, G]
    # Back to the order of the weight, whose last dimension has the groups.
    experts, outputs, inputs = sites.dimensions(site)
    order = [d % w.ndim for d in (*experts, *outputs, *inputs)]
    best = best.reshape([*(w.shape[d] for d in order[:-1]), w.shape[-1] // group]).transpose(np.argsort(order))
    limit = jnp.broadcast_to(most * best[..., None], groups.shape)
    return jnp.clip(groups, -limit, limit).reshape(w.shape)
