"""Fields of Gemma 4's config.json that need more than a name."""

from typing import Any

from maxlib.weights import HFConfig, hf_fields

LOCAL, GLOBAL = "sliding_attention", "full_attention"
TEXT, VISION_TYPES = ("gemma4_text", "gemma4_unified_text"), ("gemma4", "gemma4_unified")
_PER_LAYER = "hidden_size_per_layer_input"


def pattern(num_layers: int, period: int = 6) -> tuple[str, ...]:
    """Returns the usual types: every sixth layer is global, and the last one."""
    return tuple(LOCAL if (i + 1) % period and i + 1 < num_layers else GLOBAL for i in range(num_layers))


def hf_global_heads() -> Any:
    """Declares width and number of the key heads of global layers."""
    write = lambda heads, cfg: {"global_head_dim": heads[0], "num_global_key_value_heads": heads[1]}
    return hf_fields(_read_global, write)


def _read_global(fields: HFConfig, c: Any) -> tuple[int, int]:
    width, heads = fields.take("global_head_dim", 512), fields.take("num_global_key_value_heads", None, kind=int)
    types = c.layer_types or pattern(c.num_layers)
    usual = {"head_dim": c.head_dim, "num_key_value_heads": c.num_kv_heads}
    if (own := fields.per_layer([i for i, kind in enumerate(types) if kind == GLOBAL], usual)) is not None:
        return own["head_dim"], own["num_key_value_heads"]  # as transformers writes them
    return width, heads if heads is not None and c.keys_as_values else c.num_kv_heads


def hf_of_experts(name: str) -> Any:
    """Declares a size that only models with experts have; None in the others."""
    read = lambda hf, c: hf.take(name, kind=int) if c.sparse else fields.take(name, None) and None
    return hf_fields(read, lambda value, cfg: {name: value}, default=None)


def hf_per_layer() -> Any:
    """Declares the width of a token's vector for each layer; the 12B model has none unless config.json says so."""
    read = lambda hf, c: hf.take(_PER_LAYER, 0 if fields.take("model_type", TEXT[0]) == TEXT[1] else 256)
    return hf_fields(read, lambda dim, cfg: {_PER_LAYER: dim}, default=0)


def hf_both_ways() -> Any:
    """Declares whether the tokens of an image attend to each other in both directions; text is causal."""
    name = "use_bidirectional_attention"

    def read(fields: HFConfig, c: Any) -> bool:
        usual = "vision" if name not in fields and fields.take("model_type", None, kind=str) == TEXT[1] else None
        return fields.require(name, usual, "vision", None) == "vision"

    return hf_fields(read, lambda both, cfg: {name: "vision" if both else None}, default=False)
