"""Rotary embeddings in Hugging Face's configs: reads and writes both spellings.

transformers 4 has `rope_theta` and `rope_scaling`, transformers 5 has `rope_parameters` with everything in it.
"""

import math
from dataclasses import dataclass
from typing import Any

from maxlib.ops import (
    DynamicNTKScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    Rope,
    YarnScaling,
)
from maxlib.weights._hf_config import HFConfig

LIMIT = "max_position_embeddings"
ORIGINAL = "original_max_position_embeddings"
TYPES = {
    "default": None,
    "linear": LinearScaling,
    "dynamic": DynamicNTKScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "longrope": LongRopeScaling,
    "proportional": ProportionalScaling,
}
OLD_NAMES = {"su": "longrope"}


@dataclass(frozen=True)
class _Spellings:
    """All places in which a config may give a rotary field; they must agree."""

    fields: HFConfig
    parts: tuple[HFConfig, ...]

    def get(self, *names: str, default: Any = None, kind: type = float, outside: str | None = None) -> Any:
        """Finds the one value given under any of `names` in any part, or as `outside` at the top level.

        None and null are absent. Raises ValueError for values that differ.
        """
        stated = {part.where(name): part.take(name, None, kind=kind) for part in self.parts for name in names}
        if outside is not None:
            stated[self.fields.where(outside)] = self.fields.take(outside, None, kind=kind)
        stated = {where: _modern(value) for where, value in stated.items() if value is not None}
        values = list(stated.values())
        if any(value != values[0] for value in values):
            listed = ", but ".join(f"{where} is {value!r}" for where, value in stated.items())
            raise ValueError(f"{listed}: they must agree. Keep the one the weights were trained with.")
        return values[0] if values else default

    def need(self, name: str, *, kind: type = float) -> Any:
        value = self.get(name, kind=kind)
        if value is None:
            place = (self.parts or (self.fields,))[-1]
            raise ValueError(f"{place.where(name)} must be given for this rope_type, but it is missing.")
        return value


def _modern(value: Any) -> Any:
    return OLD_NAMES.get(value, value) if isinstance(value, str) else value


@dataclass(frozen=True, kw_only=True)
class RopeSpelling:
    """How a family spells a rotary embedding: as transformers 4 (`rope_scaling`) or 5 (`rope_parameters`) does.

    Args:
        interleaved: True if the architecture pairs neighbouring dimensions.
        partial: True if it can rotate a part of the head (`partial_rotary_factor`).
        layer_type: Key within `rope_parameters`, for models whose layer types rotate differently.
        theta_field: Name of this type's base in transformers 4 (`rope_local_base_freq` for Gemma 3's local layers).
        scaling_field: Name of this type's scaling there; None if it has none.
        default_theta: Base of a config without `rope_theta`.
        default_length: Length of a config without `max_position_embeddings`.
        default_fraction: Fraction of the head that a config without `partial_rotary_factor` rotates.
        default_scaling: Scaling of a config without `rope_scaling` whose `rope_parameters` are absent or null.
    """

    interleaved: bool = False
    partial: bool = False
    layer_type: str | None = None
    theta_field: str = "rope_theta"
    scaling_field: str | None = "rope_scaling"
    default_theta: float = 10_000.0
    default_length: int | None = None
    default_fraction: float = 1.0
    default_scaling: Any = None

    def read(self, fields: HFConfig, head_dim: int) -> Rope:
        """Reads the rope of heads of a width.

        Raises ValueError for an unknown type, a missing or invalid number, and contradicting spellings.
        """
        spelled = _Spellings(fields, _parts(fields, self.layer_type, self.scaling_field))
        spelled.get("finetuned", kind=bool)  # whether YaRN's authors trained at this length; changes no frequency
        kind = spelled.get("rope_type", "type", kind=str, default="default")
        if kind not in TYPES:
            raise ValueError(f"{fields.where('rope_type')} must be one of {', '.join(TYPES)}, got {kind!r}.")
        theta = spelled.get("rope_theta", outside=self.theta_field, default=self.default_theta)
        partial = "partial_rotary_factor"
        fraction = spelled.get(partial, outside=partial, default=self.default_fraction)
        if fraction != 1.0 and not (self.partial or kind == "proportional"):
            raise ValueError(f"{fields.where(partial)} must be 1, got {fraction}: this architecture turns whole heads.")
        limit = fields.take(LIMIT, self.default_length, kind=int)
        try:
            scaling = _scaling(kind, spelled, limit, fraction)
            stated = fields.take("rope_parameters", None, kind=dict) or "rope_scaling" in fields
            if self.default_scaling is not None and not stated:
                scaling = self.default_scaling
            dim = head_dim if kind == "proportional" else int(head_dim * fraction)
            return Rope(dim, theta, scaling, self.interleaved, _reach(scaling, limit))
        except (ValueError, OverflowError, ZeroDivisionError) as error:
            if str(error).startswith("config.json"):
                raise
            raise ValueError(f"{fields.where('rope_type')} {kind!r} has invalid numbers: {error}") from error

    def write(self, rope: Rope, head_dim: int) -> dict[str, Any]:
        """Writes the fields of a rope."""
        whole_heads = not self.partial
        written = write_rope(rope, head_dim=head_dim, whole_heads=whole_heads, interleaved=self.interleaved)
        if self.default_fraction != 1.0:
            written = {"partial_rotary_factor": 1.0} | written
        if self.layer_type is not None:
            written[f"rope_parameters.{self.layer_type}"] = written.pop("rope_parameters")
        if self.scaling_field is None:
            return {self.theta_field: written["rope_theta"], **{k: v for k, v in written.items() if "." in k}}
        return written


def read_rope(fields: HFConfig, *, head_dim: int, **spelling: Any) -> Rope:
    """Reads a rotary embedding of heads of a width; `spelling` are arguments of `RopeSpelling`."""
    return RopeSpelling(**spelling).read(fields, head_dim)


def _parts(fields: HFConfig, layer_type: str | None, scaling_field: str | None) -> tuple[HFConfig, ...]:
    """Lists the objects that describe the rope, that of transformers 5 first."""
    parts = []
    if fields.take("rope_parameters", None, kind=dict):
        parameters = fields.nested("rope_parameters")
        layered = [name for name, value in fields.take("rope_parameters").items() if isinstance(value, dict)]
        if layered and layer_type not in layered:
            raise ValueError(
                f"{fields.where('rope_parameters')} must describe "
                f"{f'the layer type {layer_type!r}' if layer_type else 'one rope for all layers'}, "
                f"got one for each of {', '.join(layered)}."
            )
        parts.append(parameters.nested(layer_type) if layered and layer_type else parameters)
    if scaling_field is not None and fields.take(scaling_field, None, kind=dict):
        parts.append(fields.nested(scaling_field))
    return tuple(parts)


def _scaling(kind: str, spelled: _Spellings, limit: int | None, fraction: float) -> Any:
    top = spelled.fields.take(ORIGINAL, None, kind=int)  # Phi stores it here; without scaling it has no meaning
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(spelled.need("factor"))
    if kind == "proportional":
        return ProportionalScaling(fraction, spelled.get("factor", default=1.0))
    if kind == "dynamic":
        return DynamicNTKScaling(spelled.need("factor"), _length(spelled, limit, top=limit))
    original = _length(spelled, limit, top=top)
    if kind == "llama3":
        low, high = spelled.need("low_freq_factor"), spelled.need("high_freq_factor")
        return Llama3Scaling(spelled.need("factor"), low, high, original)
    factor = spelled.get("factor") or (limit or original) / original
    if kind == "yarn":
        optional = {name: spelled.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim")}
        fast, slow = spelled.get("beta_fast") or 32.0, spelled.get("beta_slow") or 1.0
        truncate = spelled.get("truncate", kind=bool, default=True)
        return YarnScaling(factor, original, fast, slow, **optional, truncate=truncate)
    short, long = (_numbers(spelled.need(name, kind=list), name) for name in ("short_factor", "long_factor"))
    return LongRopeScaling(short, long, original, factor, spelled.get("attention_factor"))


def _numbers(values: list, name: str) -> tuple[float, ...]:
    if bad := [value for value in values if isinstance(value, bool) or not isinstance(value, int | float)]:
        raise ValueError(f"{name} must be a list of numbers, got {bad[0]!r} in it.")
    return tuple(values)


def _length(spelled: _Spellings, limit: int | None, *, top: int | None) -> int:
    """Finds the original training length, by default `max_position_embeddings`."""
    inner = spelled.get(ORIGINAL, kind=int)
    if inner is not None and top is not None and inner != top:
        raise ValueError(
            f"{spelled.parts[0].where(ORIGINAL)} is {inner}, but the config says {top} outside of it: they must agree."
        )
    original = inner or top or limit
    if original is None:
        raise ValueError(f"{spelled.fields.where(LIMIT)} must be given for this rope_type, but it is missing.")
    return original


def _reach(scaling: Any, limit: int | None) -> int | None:
    """Computes the number of positions that the config supports; some configs store the length before scaling
    separately.
    """
    if limit is None or isinstance(scaling, DynamicNTKScaling):  # dynamic NTK has no limit
        return None
    if isinstance(scaling, LinearScaling):
        return max(limit, int(scaling.factor * limit))
    if isinstance(scaling, YarnScaling | LongRopeScaling):  # Llama 3's factor is not a ratio of lengths
        return max(limit, int(scaling.factor * scaling.original_length))
    return limit


def write_rope(
    rope: Rope,
    *,
    head_dim: int,
    whole_heads: bool = False,
    interleaved: bool = False,
) -> dict[str, Any]:
    """Writes the config fields that describe `rope`, in both spellings, so that transformers 4 and 5 load them.

    Args:
        rope: The rope.
        head_dim: Width of a head.
        whole_heads: True if the architecture can only rotate whole heads.
        interleaved: True if it pairs neighbours, False if it pairs dimensions half a head apart; no field stores this.

    Raises:
        ValueError: For a rope that the architecture does not support, or that the two spellings cannot express.
    """
    if rope.interleaved != interleaved or (whole_heads and rope.dim != head_dim):
        raise ValueError(
            f"Hugging Face's class for this model turns {'whole heads' if whole_heads else 'heads'} in "
            f"{'interleaved pairs' if interleaved else 'halves'}: the rope must have "
            f"{f'dim={head_dim} and ' if whole_heads else ''}interleaved={interleaved}, got {rope}"
        )
    limit = _limit(rope)
    kind = next(name for name, cls in TYPES.items() if type(rope.scaling) is (cls or type(None)))
    scaling = {"rope_type": kind, **_scaling_fields(rope.scaling)}
    if isinstance(rope.scaling, ProportionalScaling):
        partial = {"partial_rotary_factor": rope.scaling.fraction}
    else:
        partial = _partial(rope.dim, head_dim)
    fields = {
        LIMIT: limit,
        "rope_theta": float(rope.theta),
        "rope_scaling": scaling if rope.scaling is not None else None,
        "rope_parameters": {**scaling, "rope_theta": float(rope.theta), **partial},
        **partial,
    }
    return fields | ({ORIGINAL: rope.scaling.original_length} if isinstance(rope.scaling, LongRopeScaling) else {})


def _limit(rope: Rope) -> int:
    limit = rope.max_length
    if isinstance(rope.scaling, DynamicNTKScaling):
        return rope.scaling.original_length  # which is read from it
    if limit is None:
        raise ValueError(
            f"{LIMIT} must be known to describe a rope: build it with max_length=..., the longest sequence it is for."
        )
    if isinstance(rope.scaling, LinearScaling):  # the length before scaling, see _reach
        return math.ceil(limit / max(rope.scaling.factor, 1.0) - 1e-9)
    return limit


def _scaling_fields(scaling: Any) -> dict[str, Any]:
    """Returns a scaling's fields under Hugging Face's names, without those that are None."""
    if scaling is None:
        return {}
    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in vars(scaling).items() if v is not None}
    if isinstance(scaling, ProportionalScaling):  # the fraction is written as partial_rotary_factor
        return {} if scaling.factor == 1 else {"factor": scaling.factor}
    if "original_length" in fields:
        original = fields.pop("original_length")
        fields |= {} if isinstance(scaling, DynamicNTKScaling) else {ORIGINAL: original}
    return fields


def _partial(dim: int, head_dim: int) -> dict[str, float]:
    """Finds the fraction for which `int(head_dim * fraction)` is `dim`."""
    if dim == head_dim:
        return {}
    fraction = dim / head_dim
    if int(head_dim * fraction) != dim:
        fraction = math.nextafter(fraction, 1.0)
    if dim > head_dim or int(head_dim * fraction) != dim:
        raise ValueError(f"a rope of {dim} dimensions must fit into a head of {head_dim}.")
    return {"partial_rotary_factor": fraction}
