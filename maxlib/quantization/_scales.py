"""Moves scales from the inputs of matmuls into what computes them, so that both round better: AWQ and SmoothQuant.

A norm, or a matmul whose output is only multiplied before the next matmul (the up-projection of a gated MLP), is the
source of its readers' inputs: `(x / s) (s w) = x w`. Which matmuls read a source is found by trial, so a family says
nothing about it: a factor on the source must come back in what they read, and must leave the layer's output as it was
once their weights are divided by it.
"""

import dataclasses
import functools
import itertools
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
from maxlib.quantization._streaming import Inputs, Stream, formats_of, matrices, with_layers, with_matrices

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
    grid: int = 20,
    clip: bool = True,
    dtype: Any = jnp.float32,
) -> Model:
    """Returns a model in full precision whose weights lose less when they are rounded to nearest.

    AWQ (Lin et al. 2023, arXiv:2306.00978) multiplies the weights of inputs that are often large, so that they are
    rounded more finely, and divides what computes these inputs. Of `s = rms(x)^r` it takes the exponent for which the
    outputs change least. Then it limits the largest weights of each group where that helps the others, and with zero
    points also the smallest.

        small = quantization.for_inference(quantization.awq(model, [tokens], "int4"), "int4")

    Args:
        model: An `nn.Decoder` in full precision.
        tokens: Batches of text, as for `gptq`.
        rules: Those of the following `for_inference`, or `gptq`. AWQ was published with "int4_asymmetric".
        grid: Number of exponents from 0 to below 1.
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
        return sites.map_sites(layer, lambda p, site: _clipped(site, formats[p], records.get(p))) if clip else layer

    count = len(model.layers)  # pyright: ignore[reportAttributeAccessIssue]
    return by_layer(model, tokens, change, dtype)


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

    return by_layer(model, tokens, change, dtype)


def by_layer(
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
        if isinstance(node, nn.Embed):
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
    square = factor[:, :, None] * factor[:, None, :]
    for path in link.readers:
        records[path] = Inputs(records[path].covariance / square, records[path].largest / factor)
    return _with_factor(layer, link, factor)


@jax.jit
def _with_outputs(node: Any, factor: Factor) -> Any:
    new = jax.tree.map(lambda a: a, node)
    if isinstance(node, nn.LayerNorm) and node.bias is not None:
        new.bias = _product(node.bias, factor[0])
    if isinstance(node, _NORMS):
        new.scale = _product(node.scale, factor[0], offset=1.0 if node.plus_one else 0.0)
        return new
    if node.b is not None:
        experts = len(sites.dimensions(node)[0]) if len(factor) == 1 else 0
        new.b = _product(node.b, factor.reshape(node.b.shape[experts:]))
    return with_matrices(new, matrices(node) * factor[:, :, None])


@jax.jit
def _with_inputs(site: Any, factor: Factor) -> Any:
    return with_matrices(site, matrices(site) * factor[:, None, :])


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
    exponents = jnp.arange(grid) / grid
    candidates = jnp.maximum(size[None] ** exponents[:, None, None], 1e-4)  # [R, E, I]
    most, least = candidates.max(axis=-1, keepdims=True), candidates.min(axis=-1, keepdims=True)
    candidates = candidates / jnp.sqrt(most * least)
    nodes = dict(nn.tree.find(layer, sites.SITES))
    errors = jnp.zeros(candidates.shape[:2])
    for path in link.readers:
        format = formats[path]
        if format is not None and _has_groups_of_inputs(nodes[path], format):
            of_path = _errors(matrices(nodes[path]), candidates, records[path].covariance, format)
            errors += of_path if errors.shape[1] > 1 else of_path.sum(axis=1, keepdims=True)
    choice = errors.argmin(axis=0)  # [E]
    return jnp.take_along_axis(candidates, choice[None, :, None], axis=0)[0]


def _has_groups_of_inputs(site: Any, format: Format) -> bool:
    """Returns True if groups run along inputs, as those of the matrices do, or if there are none."""
    return divides(format, site.w) and (format.group is None or -1 in sites.dimensions(site)[2])


@functools.partial(jax.jit, static_argnames="format")
def _errors(
    w: Float[Array, "E O I"], candidates: Float[Array, "R F I"], covariance: Float[Array, "E I I"], format: Format
) -> Float[Array, "R E"]:
    """Returns the squared error of the outputs for each factor on the weights; F is E, or 1 for a factor of all."""

    def error(factor: Factor) -> Array:
        change = _nearest(w * factor[:, None, :], format) / factor[:, None, :] - w
        return jnp.sum((change @ covariance) * change, axis=(1, 2))

    return jax.lax.map(error, candidates)


def _nearest(w: Float[Array, "E O I"], format: Format) -> Float[Array, "E O I"]:
    """Returns matrices rounded as `for_inference` stores them."""
    return nn.quantized.QuantizedWeight(
        w,
        qtype=format.weights,
        outputs=(0, 1),
        group=format.group,
        axes=("", "", ""),
        symmetric=format.symmetric,
    )[...]


def _clipped(site: Any, format: Format | None, read: Inputs | None) -> Any:
    """Returns a layer with the largest weights of its groups limited, where that changes its outputs less."""
    if read is None or format is None or format.group is None or not _has_groups_of_inputs(site, format):
        return site
    return with_matrices(site, _limited(matrices(site), read.covariance, format))


@functools.partial(jax.jit, static_argnames="format")
def _limited(w: Float[Array, "E O I"], covariance: Float[Array, "E I I"], format: Format) -> Float[Array, "E O I"]:
    """Returns matrices with the best of several limits for each group, by the error of the group's product.

    With zero points the smallest and the largest numbers of a group have limits of their own.
    """
    (E, O, I), group = w.shape, format.group
    assert group is not None
    # Blocks of the diagonal: [E, I, I] -> [E, G, g, g]
    blocks = covariance.reshape(E, I // group, group, I // group, group)
    blocks = jnp.moveaxis(jnp.diagonal(blocks, axis1=1, axis2=3), -1, 1)
    groups = w.reshape(E, O, I // group, group)
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    if format.symmetric:
        high = jnp.maximum(-low, high)
        low = -high
        shares = [(share, share) for share in np.linspace(1.0, 0.55, 10)]
    else:
        shares = [*itertools.product(np.linspace(1.0, 0.72, 5), repeat=2)]

    def limited(of_low: Array, of_high: Array) -> Array:
        return jnp.clip(groups, of_low * jnp.minimum(low, 0), of_high * jnp.maximum(high, 0)).reshape(w.shape)

    def error(share: Float[Array, "2"]) -> Array:
        change = (_nearest(limited(share[0], share[1]), format) - w).reshape(groups.shape)
        return jnp.einsum("eogi,egij,eogj->eog", change, blocks, change)

    shares = jnp.asarray(shares, jnp.float32)
    best = shares[jax.lax.map(error, shares).argmin(axis=0)]  # [E, O, G, 2]
    return limited(best[..., :1], best[..., 1:])
