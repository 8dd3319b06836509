"""Descriptions of models for tables. All functions also work on `jax.eval_shape` of a model."""

from collections.abc import Iterator
from typing import Any, TypeVar

import jax
from flax import nnx

from maxlib.nn.cache import LayerCache, layer_caches
from maxlib.nn.decoder._positions import LearnedPositions
from maxlib.nn.experts._moe import MoE
from maxlib.nn.mixer import mixers
from maxlib.nn.norm import LayerNorm
from maxlib.nn.per_layer import PerLayerEmbed
from maxlib.nn.stack import Stack
from maxlib.nn.tree import axes, num_parameters, variables
from maxlib.ops import Chunked, Mask, MRope, Rope, SlidingWindow

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
_POSITION_WORDS = ("partial RoPE", "layers without positions")
_ATTENTION_WORDS = ("qk-norm", "temperature tuning", "attention soft-cap", "sinks")  # in the order of the tables
_PARTS = ("q", "k", "v", "o", "gate", "up", "down")  # in the order of use


def num_active_parameters(model: Any) -> int:
    """Counts the parameters used for one token: all except those of experts it is not routed to."""
    idle = 0.0
    for moe in _all(MoE, model):
        names, share = axes(moe), moe.router.top_k / moe.router.num_experts
        experts = sum(v.get_value().size for path, v in variables(moe).items() if "expert" in names[path])
        # Each token uses top_k of the experts.
        idle += experts * (1 - share)
    return num_parameters(model) - round(idle)


def attention_kind(model: Any) -> str:
    """Names the kinds of the decoder's sequence mixers, such as "GQA"."""
    return ", ".join(dict.fromkeys(mixer.kind for stack in _stacks(model) for mixer in mixers(stack)))


def features(model: Any) -> tuple[str, ...]:
    """Lists labels of the decoder's features, from positions to head; an image encoder is not described."""
    # dict.fromkeys keeps the first of equal labels, in order.
    return tuple(dict.fromkeys(_labels(model)))


def _labels(model: Any) -> Iterator[str]:
    """Yields the labels of `features`, perhaps repeatedly."""
    stacks = _stacks(model)
    yield from _positions(model)
    yield from _attention(stacks)
    if _all(LayerNorm, *stacks):
        yield "LayerNorm"
    yield from _biases(stacks)
    yield from _experts(stacks)
    if _all(PerLayerEmbed, model):
        yield "per-layer embeddings"
    if model.softcap is not None:
        yield "logit soft-cap"
    if _is_tied(model):
        yield "tied head"
    if "mtp" in vars(model):
        yield "multi-token prediction"


def _is_tied(model: Any) -> bool:
    """Returns True if embedding and head share the only vocabulary table, apart from that of per-layer embeddings."""
    tables = sum("vocab" in names for names in axes(model).values())
    return tables - len(_all(PerLayerEmbed, model)) == 1


def input_names(model: Any) -> tuple[str, ...]:
    """Lists what the model reads besides tokens, such as `images` (`nn.Decoder.inputs`)."""
    return tuple(getattr(model, "inputs", ()))


def cache_kinds(model: Any) -> tuple[str, ...]:
    """Names the kinds of the layers' caches: `full`, `ring` (sliding window), `latent`, or another cache's name."""
    # Long enough for every window to get a ring, but no longer than a table of learned positions.
    capacity = min([LONG, *(table.length for table in _all(LearnedPositions, model))])
    cache = jax.eval_shape(lambda model: model.init_cache(1, capacity), model)
    return tuple(sorted({_cache_kind(one) for one in layer_caches(cache.layers)}))


def _cache_kind(cache: Any) -> str:
    """Names the kind of a layer's cache; a cache without a name has that of its class."""
    kind = cache.kind if isinstance(cache, LayerCache) else None
    return type(cache).__name__ if kind is None else kind


def _all(kind: type[Kind], *models: Any) -> list[Kind]:
    """Lists all modules of a type."""
    return [part for model in models for _, part in nnx.iter_modules(model) if isinstance(part, kind)]


def _stacks(model: Any) -> list[Stack]:
    """Lists the decoder's own stacks, without those of an image encoder."""
    return [child for child in vars(model).values() if isinstance(child, Stack)]


def _static(kind: type[Kind], stacks: list[Stack]) -> list[Kind]:
    """Lists attributes of layers that have the type `kind`, such as masks."""
    return [value for part in _all(nnx.Module, *stacks) for value in vars(part).values() if isinstance(value, kind)]


def _positions(model: Any) -> Iterator[str]:
    """Yields labels of how the model encodes positions."""
    stacks = _stacks(model)
    ropes, mropes, of_mixers = _static(Rope, stacks), _static(MRope, stacks), _mixer_features(stacks)
    if _all(LearnedPositions, model):
        yield "learned positions"
    if mropes:
        yield "M-RoPE"
    for rope in ropes:
        yield SCALINGS[type(rope.scaling).__name__] if rope.scaling else "RoPE"
    if "partial RoPE" in of_mixers:
        yield "partial RoPE"
    # Worth a word only if other layers have positions.
    if "layers without positions" in of_mixers and (ropes or mropes):
        yield "layers without positions"


def _attention(stacks: list[Stack]) -> Iterator[str]:
    """Yields labels of masks, then those of the mixers."""
    masks = [part for mask in _static(Mask, stacks) for part in _parts(mask)]
    if any(isinstance(mask, SlidingWindow) for mask in masks):
        yield "sliding window"
    if any(isinstance(mask, Chunked) for mask in masks):
        yield "chunked attention"
    # First the usual words in the order of the tables, then the others in the order of the layers.
    found = _mixer_features(stacks)
    yield from (word for word in _ATTENTION_WORDS if word in found)
    yield from (word for word in found if word not in (*_POSITION_WORDS, *_ATTENTION_WORDS))


def _mixer_features(stacks: list[Stack]) -> list[str]:
    """Lists the features of all mixers, each once, in the order of the layers."""
    return list(dict.fromkeys(word for stack in stacks for mixer in mixers(stack) for word in mixer.features()))


def _parts(mask: Mask) -> Iterator[Mask]:
    """Yields a mask and the masks that it combines."""
    yield mask
    for value in vars(mask).values():
        if isinstance(value, Mask):
            yield from _parts(value)


def _biases(stacks: list[Stack]) -> list[str]:
    """Names the projections with a bias."""
    paths = [path.split(".") for stack in stacks for path in variables(stack)]
    owners = {parts[-2] for parts in paths if parts[-1] == "b"}
    return [f"biases on {' '.join(sorted(owners, key=_place))}"] if owners else []


def _place(part: str) -> tuple[int, str]:
    """Returns a sort key: the order in which a layer uses its parts."""
    return (_PARTS.index(part) if part in _PARTS else len(_PARTS)), part


def _experts(stacks: list[Stack]) -> Iterator[str]:
    """Yields labels of the experts."""
    for moe in _all(MoE, *stacks):
        yield f"{moe.router.top_k} of {moe.router.num_experts} experts"
        if moe.shared is not None:
            yield "shared expert"
