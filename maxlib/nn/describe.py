"""What a model is made of, in words, read off its parts. All of it works on `jax.eval_shape` of a model."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
from flax import nnx

from maxlib.nn._attention import Attention
from maxlib.nn._mla import MLA
from maxlib.nn._moe import MoE
from maxlib.nn._norm import LayerNorm
from maxlib.nn._positions import LearnedPositions
from maxlib.nn._stack import Stack
from maxlib.nn.tree import axes, num_parameters, variables
from maxlib.ops._attention import Chunked, Mask, SlidingWindow
from maxlib.ops._rope import Rope

Kind = TypeVar("Kind")
LONG = 2**20  # tokens: more than any window
SCALINGS = {
    "DynamicNTK": "dynamic NTK",
    "LinearScaling": "linear scaling",
    "Llama3Scaling": "Llama 3's scaling",
    "LongRope": "LongRoPE",
    "Proportional": "proportional RoPE",
    "Yarn": "YaRN",
}
_PARTS = ("q", "k", "v", "o", "gate", "up", "down")  # in the order in which a layer uses them
CACHES = {"KVCache": "full", "RingCache": "ring", "LatentCache": "latent"}


@runtime_checkable
class _PredictsAhead(Protocol):
    def predict_ahead(self, hidden: Any, tokens: Any, **inputs: Any) -> Any: ...


def num_active_parameters(model: Any) -> int:
    """How many numbers one token meets: all but those of the experts that it does not go to."""
    idle = 0.0
    for moe in _all(MoE, model):
        names, share = axes(moe), moe.router.top_k / moe.router.num_experts
        experts = sum(v.get_value().size for path, v in variables(moe).items() if "expert" in names[path])
        idle += experts * (1 - share)
    return num_parameters(model) - round(idle)


def attention_kind(model: Any) -> str:
    """MLA, or by the number of key heads MHA (as many as queries), GQA or MQA (one)."""
    if _all(MLA, *_stacks(model)):
        return "MLA"
    sizes = {"heads": 0, "kv_heads": 0}
    for stack in _stacks(model):
        names = axes(stack)
        for path, variable in variables(stack).items():
            own = dict(zip(reversed(names[path]), reversed(variable.get_value().shape), strict=False))
            sizes |= {axis: own[axis] for axis in sizes if axis in own}
    heads, keys = sizes["heads"], sizes["kv_heads"]
    return "MHA" if heads == keys else "MQA" if keys == 1 else "GQA"


def features(model: Any) -> tuple[str, ...]:
    """What distinguishes its decoder, from positions to head; of a tower for images nothing but that it is there."""
    stacks = _stacks(model)
    found = [
        *_positions(model),
        *_attention(stacks),
        *(["LayerNorm"] if _all(LayerNorm, *stacks) else []),
        *_biases(stacks),
        *_experts(stacks),
        *(["logit soft-cap"] if model.softcap is not None else []),
        *(["tied head"] if sum("vocab" in names for names in axes(model).values()) == 1 else []),
        *(["multi-token prediction"] if isinstance(model, _PredictsAhead) else []),
    ]
    return tuple(dict.fromkeys(found))


def takes_images(model: Any) -> bool:
    """Whether its call has `images`, and it a tower (layers within a child of its own) to see them with."""
    children = [child for child in vars(model).values() if isinstance(child, nnx.Module)]
    towers = [child for child in children if not isinstance(child, Stack | nnx.List) and _all(Stack, child)]
    return bool(towers) and "images" in inspect.signature(type(model).__call__).parameters


def cache_kinds(model: Any) -> tuple[str, ...]:
    """How its layers keep keys and values: `full`, `ring` (of a window), `latent`, or the name of another class."""
    capacity = min([LONG, *(table.length for table in _all(LearnedPositions, model))])
    cache = jax.eval_shape(lambda model: model.init_cache(1, capacity), model)
    found = [type(one).__name__ for one in jax.tree.leaves(cache.layers, is_leaf=dataclasses.is_dataclass)]
    return tuple(sorted({CACHES.get(name, name) for name in found}))


def _all(kind: type[Kind], *models: Any) -> list[Kind]:
    return [part for model in models for _, part in nnx.iter_modules(model) if isinstance(part, kind)]


def _stacks(model: Any) -> list[Stack]:
    """The decoder's layers; those of a tower belong to a child."""
    return [child for child in vars(model).values() if isinstance(child, Stack)]


def _static(kind: type[Kind], stacks: list[Stack]) -> list[Kind]:
    """What layers keep of `kind` beside their weights, such as masks."""
    return [value for part in _all(nnx.Module, *stacks) for value in vars(part).values() if isinstance(value, kind)]


def _positions(model: Any) -> Iterator[str]:
    stacks = _stacks(model)
    yield from ["learned positions"] if _all(LearnedPositions, model) else []
    ropes = _static(Rope, stacks)
    for rope in ropes:
        yield SCALINGS[type(rope.scaling).__name__] if rope.scaling else "RoPE"
    attentions = _all(Attention, *stacks)
    yield from ["partial RoPE"] if any(a.rope and a.rope.dim < a.head_dim for a in attentions) else []
    yield from ["layers without positions"] if ropes and any(a.rope is None for a in attentions) else []


def _attention(stacks: list[Stack]) -> Iterator[str]:
    masks = [part for mask in _static(Mask, stacks) for part in _parts(mask)]
    yield from ["sliding window"] if any(isinstance(mask, SlidingWindow) for mask in masks) else []
    yield from ["chunked attention"] if any(isinstance(mask, Chunked) for mask in masks) else []
    attentions = _all(Attention, *stacks)
    yield from ["qk-norm"] if any(a.q_norm is not None for a in attentions) else []
    yield from ["temperature tuning"] if any(a.temperature is not None for a in attentions) else []
    yield from ["attention soft-cap"] if any(a.softcap is not None for a in attentions) else []
    yield from ["sinks"] if any(a.sinks is not None for a in attentions) else []


def _parts(mask: Mask) -> Iterator[Mask]:
    """A mask and those it combines."""
    yield mask
    for value in vars(mask).values():
        if isinstance(value, Mask):
            yield from _parts(value)


def _biases(stacks: list[Stack]) -> list[str]:
    paths = [path.split(".") for stack in stacks for path in variables(stack)]
    owners = {parts[-2] for parts in paths if parts[-1] == "b"}
    return [f"biases on {' '.join(sorted(owners, key=_place))}"] if owners else []


def _place(part: str) -> tuple[int, str]:
    return (_PARTS.index(part) if part in _PARTS else len(_PARTS)), part


def _experts(stacks: list[Stack]) -> Iterator[str]:
    for moe in _all(MoE, *stacks):
        yield f"{moe.router.top_k} of {moe.router.num_experts} experts"
        yield from ["shared expert"] if moe.shared is not None else []
