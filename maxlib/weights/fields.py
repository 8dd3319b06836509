"""Fields that the config.json of many models share: lists and entries that a family's `FIELDS` combines.

    [*DECODER, *ATTENTION, Field("mlp_dim", "intermediate_size"), rope(partial=True)]

An entry is for a field of the family's configuration; see `Fields`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from maxlib.weights._fields import Computed as Computed
from maxlib.weights._fields import Default, Values
from maxlib.weights._fields import Field as Field
from maxlib.weights._fields import Fields as Fields
from maxlib.weights._fields import Multimodal as Multimodal
from maxlib.weights._fields import equal_heads as equal_heads
from maxlib.weights._fields import num_heads as num_heads
from maxlib.weights._hf_config import REQUIRED as REQUIRED
from maxlib.weights._hf_config import HFConfig as HFConfig
from maxlib.weights._hf_rope import RopeSpelling as RopeSpelling
from maxlib.weights._hf_rope import read_rope as read_rope
from maxlib.weights._hf_rope import write_rope as write_rope

DECODER = (
    Field("vocab", "vocab_size"),
    Field("num_layers", "num_hidden_layers"),
    Field("dim", "hidden_size"),
    Field("norm_eps", "rms_norm_eps"),
    Field("tied", "tie_word_embeddings"),
)
MLP = Field("mlp_dim", "intermediate_size")
HEADS = (Field("num_heads", "num_attention_heads"), Field("num_kv_heads", "num_key_value_heads"))
ATTENTION = (*HEADS, Field("head_dim"))
# Of an encoder, with as many key heads as query heads.
ENCODER = (
    Field("dim", "hidden_size"),
    Field("num_layers", "num_hidden_layers"),
    Field("num_heads", "num_attention_heads"),
    MLP,
)
ATTENTION_BIAS = Field("attention_bias")
WINDOW = Field("window", "sliding_window")
# Latent attention, in DeepSeek's names. It has no number of key heads; `latent_rope` has the rotary part.
MLA = (
    Field("num_heads", "num_attention_heads"),
    Field("q_rank", "q_lora_rank"),
    Field("kv_rank", "kv_lora_rank"),
    Field("nope_dim", "qk_nope_head_dim"),
    Field("v_dim", "v_head_dim"),
)
# Experts and their router, in Qwen's names.
EXPERTS = (
    Field("expert_dim", "moe_intermediate_size"),
    Field("num_experts"),
    Field("top_k", "num_experts_per_tok"),
)
# The same in DeepSeek's names; GROUPS has the fields of its expert groups.
DEEPSEEK_EXPERTS = (
    Field("expert_dim", "moe_intermediate_size"),
    Field("num_experts", "n_routed_experts"),
    Field("top_k", "num_experts_per_tok"),
    Field("routed_scale", "routed_scaling_factor"),
)
GROUPS = (Field("num_groups", "n_group"), Field("top_groups", "topk_group"), Field("renormalize", "norm_topk_prob"))
NUM_SHARED = Field("num_shared", "n_shared_experts")
# Gated DeltaNet.
LINEAR_ATTENTION = (
    Field("num_key_heads", "linear_num_key_heads"),
    Field("num_value_heads", "linear_num_value_heads"),
    Field("key_dim", "linear_key_head_dim"),
    Field("value_dim", "linear_value_head_dim"),
    Field("conv_width", "linear_conv_kernel_dim"),
)
# Factors of Granite's models.
MULTIPLIERS = (
    Field("embed_factor", "embedding_multiplier"),
    Field("score_factor", "attention_multiplier"),
    Field("residual_factor", "residual_multiplier"),
    Field("logit_divisor", "logits_scaling"),
)


def under(parent: str, entries: Sequence[Field]) -> list[Field]:
    """Puts the fields of `entries` into the nested object `parent` of config.json."""
    return [dataclasses.replace(entry, hf_name=f"{parent}.{entry.hf_name}") for entry in entries]


def decoder(norm_eps: str) -> list[Field]:
    """Lists `DECODER` for models that call the epsilon of their norms `norm_eps`."""
    return [*without(DECODER, "norm_eps"), Field("norm_eps", norm_eps)]


def without(entries: Sequence[Field], *names: str) -> list[Field]:
    """Lists the entries of all fields but those of the configuration's `names`."""
    return [entry for entry in entries if entry.name not in names]


# For models whose heads always have the usual width.
EQUAL_HEADS = Computed("head_dim", lambda hf, c: equal_heads(c), lambda width, cfg: {})


def rope(name: str = "rope", **spelling: Any) -> Computed:
    """Makes the entry for a rotary embedding of `head_dim` dimensions.

    Args:
        name: Name in the configuration.
        **spelling: Arguments of `RopeSpelling`.
    """
    spelled = RopeSpelling(**spelling)
    return Computed(
        name,
        lambda hf, c: spelled.read(hf, c.head_dim),
        lambda value, cfg: spelled.write(value, cfg.head_dim),
    )


def layer_rope(
    name: str,
    layer_type: str,
    head_dim: Callable[[Any], int],
    usual: Callable[[int], Any],
    *,
    length: int = 131_072,
) -> Computed:
    """Makes the entry for the rotary embedding of one layer type, for families that are only in transformers 5.

    Args:
        name: Name in the configuration.
        layer_type: Key within `rope_parameters`.
        head_dim: Function from the preceding fields to the width of a head.
        usual: Function from the width of a head to the rope of a config without `rope_parameters`.
        length: Length of a config without `max_position_embeddings`.
    """

    def read(hf: HFConfig, c: Any) -> Any:
        stored = read_rope(
            hf,
            head_dim=head_dim(c),
            default_length=length,
            layer_type=layer_type,
            theta_field="",
            scaling_field=None,
        )
        if hf.take("rope_parameters", None, kind=dict):
            return stored
        return dataclasses.replace(usual(head_dim(c)), max_length=stored.max_length)

    def write(value: Any, cfg: Any) -> Values:
        written, limit = write_rope(value, head_dim=head_dim(cfg), whole_heads=True), "max_position_embeddings"
        return {f"rope_parameters.{layer_type}": written["rope_parameters"], limit: written[limit]}

    return Computed(name, read, write)


def latent_rope(*, interleaved: bool | None = None) -> Computed:
    """Makes the entry for the rotary embedding of latent attention, whose width is `qk_rope_head_dim`.

    Args:
        interleaved: True if the family always pairs neighbouring dimensions; None if `rope_interleave` decides.
    """

    def read(hf: HFConfig, c: Any) -> Any:
        width = hf.take("qk_rope_head_dim", kind=int)
        hf.require("head_dim", width)
        hf.require("qk_head_dim", c.nope_dim + width)
        pairs = hf.take("rope_interleave", True) if interleaved is None else interleaved
        return read_rope(hf, head_dim=width, interleaved=pairs)

    def write(value: Any, cfg: Any) -> Values:
        pairs = value.interleaved if interleaved is None else interleaved
        written = {"qk_rope_head_dim": value.dim, **write_rope(value, head_dim=value.dim, interleaved=pairs)}
        return written | ({"rope_interleave": pairs} if interleaved is None else {})

    return Computed("rope", read, write)


def axial_theta(default: float, *rope_types: str) -> Computed:
    """Makes the entry for `rope_theta`, the base of the rotary embedding of an image encoder by row and column.

    Args:
        default: Value if a config omits it.
        *rope_types: Accepted values of `rope_type` besides "axial".
    """

    def read(hf: HFConfig, c: Any) -> float:
        encoder = hf.nested("vision_config")
        theta = encoder.take("rope_theta", default)  # as transformers 4 wrote it
        if not encoder.take("rope_parameters", None, kind=dict):
            return theta
        parameters = encoder.nested("rope_parameters")
        parameters.require("rope_type", "axial", *rope_types)
        return parameters.take("rope_theta", theta)

    def write(value: float, cfg: Any) -> Values:
        return {"vision_config.rope_parameters": {"rope_type": "axial", "rope_theta": value}}

    return Computed("rope_theta", read, write)


SLIDING = "sliding_attention"


def layer_types(
    *known: str,
    usual: Callable[[Any], tuple[str, ...]],
    absent: Callable[[HFConfig, Any], tuple[str, ...]] | None = None,
    also: Callable[[tuple[str, ...]], Values] | None = None,
) -> Computed:
    """Makes the entry for `layer_types`, one of `known` for each layer, or None for the family's default.

    Args:
        *known: The possible layer types.
        usual: `usual(c)` returns the default types, for None.
        absent: `absent(hf, c)` returns the types of a config.json without `layer_types`; by default the usual ones.
        also: `also(types)` returns additional fields to write with `layer_types`.
    """

    def read(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
        stored = hf.layer_types(c.num_layers, *known)
        # Always called, so that the fields it reads count as read.
        implied = usual(c) if absent is None else absent(hf, c)
        types = implied if stored is None else stored
        return None if types == usual(c) else types

    def write(value: tuple[str, ...] | None, cfg: Any) -> Values:
        types = usual(cfg) if value is None else value
        return {"layer_types": list(types), **({} if also is None else also(types))}

    return Computed("layer_types", read, write)


def check_layer_types(cfg: Any) -> None:
    """Raises ValueError unless `cfg.layer_types` has one type per layer, and sliding layers have a window."""
    types = cfg.layer_types
    if types is not None and len(types) != cfg.num_layers:
        raise ValueError(f"layer_types must name {cfg.num_layers} layers, got {len(types)}")
    if SLIDING in (types or ()) and cfg.window is None:
        raise ValueError(
            f"layer_types has {SLIDING}, which needs a window (config.json: use_sliding_window and sliding_window)"
        )


def upper_layers_slide(full: str, *, absent: int, window: int) -> tuple[Computed, Computed]:
    """Makes the entries of `layer_types` and `window` for families in which, with a window, layers from
    `max_window_layers` on use sliding windows.

    Args:
        full: Name of the layer type without a window.
        absent: Value if a config omits `max_window_layers`.
        window: Value if it omits `sliding_window`.
    """

    def implied(hf: HFConfig, c: Any) -> tuple[str, ...]:
        first = hf.take("max_window_layers", absent)
        first = c.num_layers if switched_window(hf, window) is None else first
        return tuple(SLIDING if i >= first else full for i in range(c.num_layers))

    def usual(c: Any) -> tuple[str, ...]:
        return (full,) * c.num_layers

    def num_full(types: tuple[str, ...]) -> Values:
        return {"max_window_layers": types.count(full)}  # early versions of transformers read only this

    return layer_types(full, SLIDING, usual=usual, absent=implied, also=num_full), window_of_sliding(absent=window)


def window_of_sliding(*, absent: int | None) -> Computed:
    """Makes the entry for the window of sliding layers, which `use_sliding_window` enables. It must come after
    the entry for `layer_types`.

    Args:
        absent: Value if a config omits `sliding_window`.
    """

    def read(hf: HFConfig, c: Any) -> int | None:
        window = switched_window(hf, absent)
        return window if SLIDING in (c.layer_types or ()) else None

    def write(value: int | None, cfg: Any) -> Values:
        return {"use_sliding_window": SLIDING in (cfg.layer_types or ()), "sliding_window": value}

    return Computed("window", read, write)


def switched_window(hf: HFConfig, absent: int | None) -> int | None:
    """Returns `sliding_window`, or None if `use_sliding_window` is off.

    Args:
        hf: The fields of config.json.
        absent: What a config means by leaving `sliding_window` out.
    """
    window = hf.take("sliding_window", absent, kind=int, nullable=True)
    return window if hf.take("use_sliding_window", False) else None


def num_dense(absent: int = 1) -> Computed:
    """Makes the entry for the number of first layers with a plain MLP: `first_k_dense_replace`, or "dense" in
    `mlp_layer_types`.

    Args:
        absent: Value if a config omits both.
    """

    def read(hf: HFConfig, c: Any) -> int:
        types = hf.take("mlp_layer_types", None, kind=list)
        implied = min(absent, c.num_layers) if types is None else types.count("dense")
        number = hf.take("first_k_dense_replace", implied)
        if types is not None and types != dense_first(number, c.num_layers):
            raise ValueError(
                f"{hf.where('mlp_layer_types')} must be 'dense' for the first layers (first_k_dense_replace is "
                f"{number}) and 'sparse' for all others of {c.num_layers}, got {types}."
            )
        return number

    def write(value: int, cfg: Any) -> Values:
        return {"first_k_dense_replace": value, "mlp_layer_types": dense_first(value, cfg.num_layers)}

    def dense_first(number: int, num_layers: int) -> list[str]:
        return ["dense" if i < number else "sparse" for i in range(num_layers)]

    return Computed("num_dense", read, write)


def dt_limit() -> Computed:
    """Makes the entry for the smallest and largest step of Mamba; without the field there is no limit."""

    def number(x: Any) -> float:
        # JSON has no infinity: transformers writes {"__float__": "Infinity"}.
        return float(x["__float__"] if isinstance(x, dict) else x)

    def read(hf: HFConfig, c: Any) -> tuple[float, float]:
        limit = hf.take("time_step_limit", [0.0, math.inf], kind=list)
        if len(limit) != 2:
            raise ValueError(f"{hf.where('time_step_limit')} must be the least and the greatest step, got {limit}.")
        return number(limit[0]), number(limit[1])

    def write(value: tuple[float, float], cfg: Any) -> Values:
        if value == (0.0, math.inf):
            return {}
        return {"time_step_limit": [x if math.isfinite(x) else {"__float__": "Infinity"} for x in value]}

    return Computed("dt_limit", read, write)


def mtp(absent: int, hf_name: str = "num_nextn_predict_layers") -> Computed:
    """Makes the entry for `stored_mtp`, the number of multi-token prediction modules in a checkpoint.

    Writes `cfg.num_mtp` instead, because an export only has the modules that the model has.

    Args:
        absent: Value if a config omits the field.
        hf_name: Name of the field.
    """

    def read(hf: HFConfig, c: Any) -> int:
        return hf.take(hf_name, absent)

    def write(value: int, cfg: Any) -> Values:
        return {hf_name: cfg.num_mtp}

    return Computed("stored_mtp", read, write)


def only_if(
    condition: Callable[[Any], bool], name: str, hf_name: str, absent: Default = REQUIRED, *, kind: type | None = None
) -> Computed:
    """Makes the entry for a field that only some models of a family have; None in the others, and then not written.

    Args:
        condition: Function from the preceding fields, and `model_type`: whether the model has it.
        name: Name in the configuration.
        hf_name: Name in config.json.
        absent: Value if the config of such a model omits it.
        kind: Type of the value, by default that of `absent`.
    """

    def read(hf: HFConfig, c: Any) -> Any:
        return hf.take(hf_name, absent, kind=kind) if condition(c) else None

    def write(value: Any, cfg: Any) -> Values:
        return {} if value is None else {hf_name: value}

    return Computed(name, read, write)
