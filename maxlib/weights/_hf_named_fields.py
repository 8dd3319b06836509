"""Declarations of fields that several families share: rotary embeddings, layer types, windows, dense layers, MTP."""

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from maxlib.weights._hf_config import HFConfig
from maxlib.weights._hf_fields import Default, FieldCodec, declare, default_value
from maxlib.weights._hf_rope import rope_to_hf


def hf_head_dim() -> Any:
    """Declares `head_dim`, by default `dim / num_heads`, which transformers' Llama requires to be whole."""

    def read(fields: HFConfig, c: Any, hint: Any) -> int:
        head_dim = fields.take("head_dim", None, kind=int)
        if head_dim is None and c.dim % c.num_heads:
            raise ValueError(
                f"config.json: num_attention_heads ({c.num_heads}) must divide hidden_size ({c.dim}), or head_dim be "
                "given."
            )
        return c.dim // c.num_heads if head_dim is None else head_dim

    def write(value: int, cfg: Any) -> dict[str, Any]:
        if cfg.dim % cfg.num_heads:
            warnings.warn(
                f"num_heads ({cfg.num_heads}) does not divide dim ({cfg.dim}): maxlib reads the export, transformers 5 "
                "refuses such a config",
                stacklevel=5,
            )
        return {"head_dim": value}

    return declare(FieldCodec(read, write), dataclasses.MISSING)


def hf_rope(
    *,
    head_dim: Default = lambda c: c.head_dim,
    interleaved: bool = False,
    partial: bool = False,
    layer_type: str | None = None,
    theta_field: str = "rope_theta",
    scaling_field: str | None = "rope_scaling",
    **defaults: Any,
) -> Any:
    """Declares a rotary embedding, in both spellings; see `HFConfig.rope`.

    Args:
        head_dim: Width of a head, or a function of the preceding fields.
        interleaved: True if the family pairs neighbouring dimensions, rather than dimensions half a head apart.
        partial: True if it can rotate a part of the head.
        layer_type: Key within `rope_parameters`, for families whose layer types rotate differently.
        theta_field: Name of the base in transformers 4.
        scaling_field: Name of the scaling in transformers 4; None if it has none for this layer type.
        **defaults: `default_theta`, `default_length`, `default_fraction`: values if these fields are omitted.
    """
    spelling = {"layer_type": layer_type, "theta_field": theta_field, "scaling_field": scaling_field}

    def read(fields: HFConfig, c: Any, hint: Any) -> Any:
        width = default_value(head_dim, c)
        return fields.rope(head_dim=width, interleaved=interleaved, partial=partial, **spelling, **defaults)

    def write(rope: Any, cfg: Any) -> dict[str, Any]:
        width = default_value(head_dim, cfg)
        written = rope_to_hf(rope, head_dim=width, whole_heads=not partial, interleaved=interleaved)
        if layer_type is not None:
            written[f"rope_parameters.{layer_type}"] = written.pop("rope_parameters")
        if scaling_field is None:
            return {theta_field: written["rope_theta"], **{k: v for k, v in written.items() if "." in k}}
        return written

    return declare(FieldCodec(read, write), dataclasses.MISSING)


def hf_layer_rope(
    layer_type: str, head_dim: Callable[[Any], int], usual: Callable[[int], Any], *, length: int = 131_072
) -> Any:
    """Declares the rotary embedding of one layer type, for families that are only in transformers 5.

    Args:
        layer_type: Key within `rope_parameters`.
        head_dim: Function from the preceding fields to the width of a head.
        usual: Function from the width of a head to the rope of a config without `rope_parameters`.
        length: Length of a config without `max_position_embeddings`.
    """
    spelling = {"layer_type": layer_type, "theta_field": "", "scaling_field": None}

    def read(fields: HFConfig, c: Any, hint: Any) -> Any:
        rope = fields.rope(head_dim=head_dim(c), default_length=length, **spelling)
        if fields.take("rope_parameters", None, kind=dict):
            return rope
        return dataclasses.replace(usual(head_dim(c)), max_length=rope.max_length)

    def write(rope: Any, cfg: Any) -> dict[str, Any]:
        written, limit = rope_to_hf(rope, head_dim=head_dim(cfg), whole_heads=True), "max_position_embeddings"
        return {f"rope_parameters.{layer_type}": written["rope_parameters"], limit: written[limit]}

    return declare(FieldCodec(read, write), dataclasses.MISSING)


SLIDING = "sliding_attention"


def hf_layer_types(
    *known: str,
    usual: Callable[[Any], tuple[str, ...]],
    absent: Callable[[HFConfig, Any], tuple[str, ...]] | None = None,
    also: Callable[[tuple[str, ...]], Mapping[str, Any]] = lambda types: {},
) -> Any:
    """Declares `layer_types`, one of `known` for each layer, or None for the family's default.

    Args:
        *known: The possible layer types.
        usual: `usual(c)` returns the default types, for None.
        absent: `absent(fields, c)` returns the types of a config.json without `layer_types`; by default the usual ones.
        also: `also(types)` returns additional fields to write with `layer_types`.
    """

    def read(fields: HFConfig, c: Any, hint: Any) -> tuple[str, ...] | None:
        given = fields.layer_types(c.num_layers, *known)
        # Always called, so that the fields it reads count as read.
        implied = usual(c) if absent is None else absent(fields, c)
        types = implied if given is None else given
        return None if types == usual(c) else types

    def write(value: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
        types = usual(cfg) if value is None else value
        return {"layer_types": list(types), **also(types)}

    def check(value: tuple[str, ...] | None, cfg: Any) -> None:
        if value is not None and len(value) != cfg.num_layers:
            raise ValueError(f"layer_types must name {cfg.num_layers} layers, got {len(value)}")
        if SLIDING in (value or ()) and cfg.window is None:
            raise ValueError(
                f"layer_types has {SLIDING}, which needs a window (config.json: use_sliding_window and sliding_window)"
            )

    return declare(FieldCodec(read, write, check=check), None)


def hf_max_window_layers(full: str, *, absent: int, window: int) -> Any:
    """Declares `layer_types` for families in which, with a window, layers from `max_window_layers` on use sliding
    windows.

    Args:
        full: Name of the layer type without a window.
        absent: Value if a config omits `max_window_layers`.
        window: Value if it omits `sliding_window`.
    """

    def implied(fields: HFConfig, c: Any) -> tuple[str, ...]:
        first = fields.take("max_window_layers", absent)
        first = c.num_layers if switched_window(fields, window) is None else first
        return tuple(SLIDING if i >= first else full for i in range(c.num_layers))

    # Early versions of transformers only read the count.
    also = lambda types: {"max_window_layers": types.count(full)}
    return hf_layer_types(full, SLIDING, usual=lambda c: (full,) * c.num_layers, absent=implied, also=also)


def hf_switched_window(*, absent: int | None) -> Any:
    """Declares the window of sliding layers, which `use_sliding_window` enables; `layer_types` must precede it.

    Args:
        absent: Value if a config omits `sliding_window`.
    """

    def read(fields: HFConfig, c: Any, hint: Any) -> int | None:
        window = switched_window(fields, absent)
        return window if SLIDING in (c.layer_types or ()) else None

    def write(value: int | None, cfg: Any) -> dict[str, Any]:
        return {"use_sliding_window": SLIDING in (cfg.layer_types or ()), "sliding_window": value}

    return declare(FieldCodec(read, write), None)


def switched_window(fields: HFConfig, absent: int | None) -> int | None:
    """Returns `sliding_window`, or None if `use_sliding_window` is off.

    Args:
        fields: Those of config.json.
        absent: What a config means by leaving `sliding_window` out.
    """
    window = fields.take("sliding_window", absent, kind=int, nullable=True)
    return window if fields.take("use_sliding_window", False) else None


def hf_num_dense(absent: int = 1) -> Any:
    """Declares the number of first layers with a plain MLP: `first_k_dense_replace`, or "dense" in `mlp_layer_types`.

    Args:
        absent: Value if a config omits both.
    """

    def read(fields: HFConfig, c: Any, hint: Any) -> int:
        types = fields.take("mlp_layer_types", None, kind=list)
        implied = min(absent, c.num_layers) if types is None else types.count("dense")
        number = fields.take("first_k_dense_replace", implied)
        if types is not None and types != _dense_first(number, c.num_layers):
            raise ValueError(
                f"{fields.where('mlp_layer_types')} must be 'dense' for the first layers (first_k_dense_replace is "
                f"{number}) and 'sparse' for all others of {c.num_layers}, got {types}."
            )
        return number

    def write(value: int, cfg: Any) -> dict[str, Any]:
        return {"first_k_dense_replace": value, "mlp_layer_types": _dense_first(value, cfg.num_layers)}

    return declare(FieldCodec(read, write), dataclasses.MISSING)


def _dense_first(number: int, num_layers: int) -> list[str]:
    return ["dense" if i < number else "sparse" for i in range(num_layers)]


def hf_dt_limit(name: str = "time_step_limit") -> Any:
    """Declares the smallest and largest step of Mamba; without the field there is no limit.

    Args:
        name: Name in config.json.
    """
    # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
    number = lambda x: float(x["__float__"] if isinstance(x, dict) else x)

    def read(fields: HFConfig, c: Any, hint: Any) -> tuple[float, float]:
        limit = fields.take(name, [0.0, math.inf], kind=list)
        if len(limit) != 2:
            raise ValueError(f"{fields.where(name)} must be the least and the greatest step, got {limit}.")
        return number(limit[0]), number(limit[1])

    def write(limit: tuple[float, float], cfg: Any) -> dict[str, Any]:
        if limit == (0.0, math.inf):
            return {}
        return {name: [x if math.isfinite(x) else {"__float__": "Infinity"} for x in limit]}

    return declare(FieldCodec(read, write), (0.0, math.inf))


def hf_mtp(absent: int, field: str = "num_nextn_predict_layers") -> Any:
    """Declares the number of multi-token prediction modules of a checkpoint; an export has `cfg.num_mtp`.

    Args:
        absent: Value if a config omits the field.
        field: Name of the field.
    """
    codec = FieldCodec(lambda fields, c, hint: fields.take(field, absent), lambda value, cfg: {field: cfg.num_mtp})
    return declare(codec, 0, compare=False)
