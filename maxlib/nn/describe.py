"""Descriptions of models for tables. All functions also work on `jax.eval_shape` of a model."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from flax import nnx
from rich import box
from rich.table import Table

from maxlib._utils.text import to_text
from maxlib.nn._ngrams import NgramEmbedding
from maxlib.nn.cache import layer_caches
from maxlib.nn.decoder._positions import ALiBi, LearnedPositions, RelativeBias
from maxlib.nn.experts._moe import MoE
from maxlib.nn.mixer import mixers
from maxlib.nn.norm import LayerNorm
from maxlib.nn.per_layer import PerLayerEmbed
from maxlib.nn.stack import Stack
from maxlib.nn.tree import axes, num_parameters, own_axes, pattern_paths, variables
from maxlib.ops import Chunked, LocalWindow, Mask, MRope, Rope, SlidingWindow
from maxlib.sharding.layers import num_layer_axes

Kind = TypeVar("Kind")
LONG = 2**20  # tokens: longer than any window
SCALINGS = {
    "DynamicNTKScaling": "dynamic NTK",
    "LinearScaling": "linear scaling",
    "Llama3Scaling": "Llama 3's scaling",
    "LongRopeScaling": "LongRoPE",
    "ProportionalScaling": "proportional RoPE",
    "YarnScaling": "YaRN",
}


def num_active_parameters(model: Any) -> int:
    """Counts the parameters used for one token: all except those of experts it is not routed to, and tables of n-grams,
    of which it reads a few rows.
    """
    idle = float(sum(ngrams.table.get_value().size for ngrams in _all(NgramEmbedding, model)))
    for moe in _all(MoE, model):
        names, share = axes(moe), moe.router.top_k / moe.router.num_experts
        experts = sum(v.get_value().size for path, v in variables(moe).items() if "expert" in names[path])
        # Each token uses top_k of the experts.
        idle += experts * (1 - share)
    return num_parameters(model) - round(idle)


def attention_kind(model: Any) -> str:
    """Names the kinds of the decoder's sequence mixers, such as "GQA"."""
    return ", ".join(dict.fromkeys(m.kind or type(m).__name__ for stack in _stacks(model) for m in mixers(stack)))


def features(model: Any) -> tuple[str, ...]:
    """Lists labels of the decoder's features, from positions to head; an image encoder is not described."""
    # dict.fromkeys keeps the first of equal labels, in order.
    return tuple(dict.fromkeys(_labels(model)))


def _labels(model: Any) -> Iterator[str]:
    """Yields the labels of `features`, perhaps repeatedly."""
    stacks = _stacks(model)
    if isinstance(getattr(model, "position_bias", None), ALiBi):
        yield "ALiBi"
    if _all(LearnedPositions, model):
        yield "learned positions"
    if _all(RelativeBias, model):
        yield "relative position bias"
    ropes, mropes = _static(Rope, stacks), _static(MRope, stacks)
    if mropes:
        yield "M-RoPE"
    for rope in ropes:
        yield SCALINGS[type(rope.scaling).__name__] if rope.scaling else "RoPE"
    for mixer in (mixer for stack in stacks for mixer in mixers(stack)):
        # Worth a word only if other layers have positions.
        yield from (label for label in mixer.features if label != "layers without positions" or ropes or mropes)
    masks = [part for mask in _static(Mask, stacks) for part in _parts(mask)]
    if any(isinstance(mask, SlidingWindow) for mask in masks):
        yield "sliding window"
    if any(isinstance(mask, LocalWindow) for mask in masks):
        yield "local window"
    if any(isinstance(mask, Chunked) for mask in masks):
        yield "chunked attention"
    if _all(LayerNorm, *stacks):
        yield "LayerNorm"
    paths = [path.split(".") for stack in stacks for path in variables(stack)]
    if biased := {parts[-2] for parts in paths if parts[-1] == "b"}:
        yield f"biases on {' '.join(sorted(biased))}"
    for moe in _all(MoE, *stacks):
        yield f"{moe.router.top_k} of {moe.router.num_experts} experts"
        if moe.shared is not None:
            yield "shared expert"
    if _all(PerLayerEmbed, model):
        yield "per-layer embeddings"
    if model.softcap is not None:
        yield "logit soft-cap"
    if getattr(model, "head", None) is None:
        yield "tied head"
    if "mtp" in vars(model):
        yield "multi-token prediction"


def input_names(model: Any) -> tuple[str, ...]:
    """Lists what the model reads besides tokens, such as `images` (`nn.Decoder.inputs`)."""
    return tuple(getattr(model, "inputs", ()))


def cache_kinds(model: Any) -> tuple[str, ...]:
    """Names the kinds of the layers' caches: `full`, `ring` (sliding window), `latent`, or another cache's name."""
    # Long enough for every window to get a ring, but no longer than a table of learned positions.
    if not getattr(model, "has_cache", True):
        return ()
    capacity = min([LONG, *(model.max_length for _ in _all(LearnedPositions, model))])
    cache = jax.eval_shape(lambda model: model.init_cache(1, capacity), model)
    # A cache without a name has that of its class.
    return tuple(sorted({getattr(c, "kind", None) or type(c).__name__ for c in layer_caches(cache.layers)}))


def _all(kind: type[Kind], *models: Any) -> list[Kind]:
    """Lists all modules of a type."""
    return [module for model in models for _, module in nnx.iter_modules(model) if isinstance(module, kind)]


def _stacks(model: Any) -> list[Stack]:
    """Lists the decoder's own stacks, without those of an image encoder."""
    return [child for child in vars(model).values() if isinstance(child, Stack)]


def _static(kind: type[Kind], stacks: list[Stack]) -> list[Kind]:
    """Lists attributes of layers that have the type `kind`, such as masks."""
    return [value for module in _all(nnx.Module, *stacks) for value in vars(module).values() if isinstance(value, kind)]


def _parts(mask: Mask) -> Iterator[Mask]:
    """Yields a mask and the masks that it combines."""
    yield mask
    for value in vars(mask).values():
        if isinstance(value, Mask):
            yield from _parts(value)


def summary(model: Any) -> str:
    """Returns a table of every parameter of `model` with shape, axis names, dtype and size, and the total.

    Layers that a stack scans share a row: `26 x` before the shape is their number. Also works on `jax.eval_shape` of a
    model.
    """
    table = Table(box=box.SIMPLE, show_footer=True)
    names, short = axes(model), pattern_paths(model)
    rows = {path: v.get_value() for path, v in variables(model).items()}
    total = sum(a.size for a in rows.values())
    size = sum(a.size * a.dtype.itemsize for a in rows.values())
    table.add_column("parameter", footer="total")
    table.add_column("shape")
    table.add_column("axes")
    table.add_column("dtype", footer=scaled(size, "B"))
    table.add_column("numbers", justify="right", footer=scaled(total))
    for (path, shape, axis_names, dtype), group in _grouped(rows, names, short).items():
        # Arrays of scanned layers have a leading axis of layers; arrays of layers stored alone do not.
        count = sum(a.shape[0] if a.ndim > len(shape) else 1 for a in group)
        text = " ".join(map(str, shape)) or "scalar"
        text = f"{count} x {text}" if count > 1 else text
        table.add_row(
            path, text, " ".join(name or "-" for name in axis_names), dtype, scaled(sum(a.size for a in group))
        )
    return f"{type(model).__name__}\n{to_text(table)}"


def _grouped(rows: dict[str, Any], names: dict[str, tuple], short: dict[str, str]) -> dict[tuple, list[Any]]:
    """Groups arrays by the path, shape and axes of a single layer."""
    groups: dict[tuple, list[Any]] = {}
    for path, array in rows.items():
        shape = array.shape[num_layer_axes(names[path]) :]
        groups.setdefault((short[path], shape, own_axes(names[path]), str(array.dtype)), []).append(array)
    return groups


def scaled(number: float, unit: str = "") -> str:
    """Formats a number with a suffix: 1234567 becomes "1.235 M"."""
    suffixes = ["", "k", "M", "G", "T"]
    while number >= 1000 and len(suffixes) > 1:
        number, suffixes = number / 1000, suffixes[1:]
    return f"{number:.4g} {suffixes[0]}{unit}".rstrip()
