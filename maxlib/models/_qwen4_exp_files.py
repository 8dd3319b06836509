"""How files spell Qwen3.8-Flash-Next: fields of config.json, and names of weights."""

from dataclasses import dataclass
from typing import Any

from maxlib import nn
from maxlib.models import _qwen_vision as vision
from maxlib.models._sizes import by_interval, delta_net_names, every
from maxlib.weights import Computed, Constant, Field, HFConfig, Ignore, Renamed, Table, Weight, names

LINEAR, INDEXED = "linear_attention", "indexed_attention"


@dataclass(frozen=True, kw_only=True)
class StreamSizes:
    """Sizes of the streams, of what chooses keys, and of the embeddings of hashed n-grams."""

    streams: int = 4
    stream_rank: int = 320
    index_heads: int
    index_dim: int
    index_top: int  # keys of the blocks that a query attends to
    block: int
    ngram_layers: tuple[int, ...] = ()  # LINEAR layers with embeddings of n-grams, counted from 1
    ngram_dim: int
    ngram_conv: int = 4
    ngram_size: int = 3
    ngram_heads: int = 8  # of each number of ids, from 2 to ngram_size
    ngram_base: int = 20_000_000  # least number of rows of a head
    ngram_multiple: int = 128  # the table has a multiple of so many rows
    ngram_seed: int = 1234
    ngram_parts: int = 512  # tensors that a table has in files
    end_token: int | None = None


def check_ngrams(cfg: Any) -> None:
    """Raises ValueError for n-grams without the id that ends a text, or in layers that there are not."""
    if not all(1 <= layer <= cfg.num_layers for layer in cfg.ngram_layers):
        layers = f"must be from 1 to {cfg.num_layers}, got {cfg.ngram_layers}"
        raise ValueError(f"ngram_layers (ple_layer_ids) {layers}")
    if cfg.ngram_layers and cfg.end_token is None:
        raise ValueError("end_token (eos_token_id) must be an id, where ngram_layers (ple_layer_ids) has layers")


def usual_types(num_layers: int) -> tuple[str, ...]:
    """Returns the types of layers of a config.json without them: every fourth is INDEXED."""
    return every(4, num_layers, LINEAR, INDEXED)


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    implied = by_interval(LINEAR, INDEXED)(hf, c)
    types = hf.layer_types(c.num_layers, LINEAR, INDEXED, "full_attention") or implied
    types = tuple(INDEXED if kind == "full_attention" else kind for kind in types)
    return None if types == usual_types(c.num_layers) else types


def _write_types(types: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"layer_types": list(types or usual_types(cfg.num_layers))}


LAYER_TYPES = Computed("layer_types", _read_types, _write_types)


def _read_end(hf: HFConfig, c: Any) -> int | None:
    end: Any = hf.take("eos_token_id", None, kind=object)
    return end[0] if isinstance(end, list) else end


END = Computed("end_token", _read_end, lambda end, cfg: {} if end is None else {"eos_token_id": end})


STREAMS_AND_NGRAMS = (
    Field("streams", "hc_count"),
    Field("stream_rank", "hc_lowrank"),
    Field("index_heads", "indexer_n_heads"),
    Field("index_dim", "indexer_head_dim"),
    Field("index_top", "indexer_budget"),
    Field("block", "indexer_compress_ratio"),
    Field("ngram_layers", "ple_layer_ids"),
    Field("ngram_dim", "ple_embed_dim"),
    Field("ngram_conv", "ple_conv_kernel_size"),
    Field("ngram_size"),
    Field("ngram_heads", "heads_per_ngram"),
    Field("ngram_base", "ngram_vocab_size_base"),
    Field("ngram_multiple", "make_ngram_vocab_size_divisible_by"),
    Field("ngram_seed", "seed"),
    Field("ngram_parts", "split_ngram_parts"),
)


def ngram_hash(cfg: Any, table: int) -> nn.NgramHash:
    """Returns the rows of n-grams in one of the tables, which count from 0."""
    return nn.NgramHash(
        vocab=cfg.vocab,
        size=cfg.ngram_size,
        heads=cfg.ngram_heads,
        base=cfg.ngram_base,
        layer=table,
        seed=cfg.ngram_seed,
    )


def _streams(hf_name: str, path: str) -> list[Weight]:
    """Lists the weights of gated streams."""
    parts = {
        "hc_norm": "norm.scale",
        "input_mix_weight_down": "down.w",
        "input_mix_weight_up": "up.w",
        "block_inject_weight": "inject.w",
    }
    return [Weight(f"{hf_name}.{name}.weight", f"{path}.{part}") for name, part in parts.items()]


def _indexer(hf_name: str, path: str, heads: int) -> list[Weight]:
    """Lists the weights of an indexer, whose projection has the queries of all heads, then the key."""
    product = f"{hf_name}.index_qk_proj.weight"
    return [
        Weight(product, f"{path}.q.w", "(N H) D -> N H D"),
        Weight(product, f"{path}.k.w", "(N H) D -> H D", {"N": heads}),
        Weight(f"{hf_name}.q_layernorm.weight", f"{path}.q_norm.scale"),
        Weight(f"{hf_name}.k_layernorm.weight", f"{path}.k_norm.scale"),
    ]


_NGRAMS = (
    Weight("ple.ple_embedding.ngram_embedding.shard_{e}.weight", "ngrams.table", "V W -> e V W"),
    Weight("ple.key_proj.weight", "ngrams.key.w"),
    Weight("ple.value_proj.weight", "ngrams.value.w"),
    Weight("ple.norm_key.weight", "ngrams.key_norm.scale"),
    Weight("ple.norm_query.weight", "ngrams.query_norm.scale"),
    Weight("ple.norm_conv.weight", "ngrams.conv_norm.scale"),
    Weight("ple.conv1d.weight", "ngrams.conv", "F one W -> F W", {"one": 0}),
)


def _hashes(cfg: Any, model: str) -> list[Constant]:
    """Lists what files have of the hash of n-grams."""
    constants = []
    for table, layer in enumerate(sorted(cfg.ngram_layers)):
        rows, prefix = ngram_hash(cfg, table), f"{model}.layers.{layer - 1}.ple.ple_embedding"
        constants.append(Constant(f"{prefix}.layer_multipliers", rows.factors))
        constants.append(Constant(f"{prefix}.ngram_heads_vocab_sizes", rows.rows))
        constants.append(Constant(f"{prefix}.ngram_heads_offsets", rows.offsets))
    return constants


def table(cfg: Any) -> Table:
    """Maps the tensor names of the release to parameters; the prediction module is skipped."""
    layer = [
        *_streams("attn_hyper_connection", "attn_streams"),
        *_streams("mlp_hyper_connection", "mlp_streams"),
        *names.gated_attention(cfg.head_dim),
        *_indexer("self_attn.indexer", "attn.indexer", cfg.index_heads),
        *delta_net_names(cfg),
        *_NGRAMS,
        *names.EXPERTS,
        *names.GATED_SHARED_EXPERT,
    ]
    model = "model" if cfg.vision is None else "model.language_model"
    text = [
        *names.decoder_table(layer, model=model),
        *names.fused_experts(model),
        *_streams(f"{model}.hyper_connection_mixer", "norm"),
        *_hashes(cfg, model),
        Ignore("mtp.*"),
    ]
    if cfg.vision is not None:
        return [*text, *vision.table()]
    # A text model can also be loaded from a vision model's checkpoint.
    return [*text, Renamed("model.language_model.", "model."), Ignore("model.visual.*")]
