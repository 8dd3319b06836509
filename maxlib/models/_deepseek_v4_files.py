"""How files spell DeepSeek V4: fields of config.json and names of weights, of the release and of transformers."""

from dataclasses import replace
from typing import Any

import numpy as np

from maxlib.models._sizes import SLIDING, hyper_connection
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Computed, Convert, Copy, HFConfig, Ignore, Renamed, Table, Weight, fields, names

SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
TYPES = {0: SLIDING, 4: SPARSE, 128: HEAVY}  # by the release's `compress_ratios`
LENGTH = 1_048_576


def usual_types(num_layers: int) -> tuple[str, ...]:
    """Returns the types of layers of a config.json without them, as in transformers: two HEAVY layers, then HEAVY and
    SPARSE in turn.
    """
    return tuple(SPARSE if i > 2 and i % 2 else HEAVY for i in range(num_layers))


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...]:
    ratios = hf.take("compress_ratios", None, kind=list)
    if ratios is None:
        return usual_types(c.num_layers)
    if len(ratios) < c.num_layers or not TYPES.keys() >= set(ratios):
        raise ValueError(
            f"{hf.where('compress_ratios')} must be 0, 4 or 128 for each of {c.num_layers} layers, got {ratios}"
        )
    return tuple(TYPES[ratio] for ratio in ratios[: c.num_layers])  # those of prediction modules follow


def rate(name: str, layer_type: str, before: str, usual: int) -> Computed:
    """Makes the entry for the number of tokens of a compressed key."""

    def read(hf: HFConfig, c: Any) -> int:
        value = hf.take(before, usual)
        return hf.nested("compress_rates").take(layer_type, value) if "compress_rates" in hf else value

    return Computed(name, read, lambda value, cfg: {f"compress_rates.{layer_type}": value})


def rope(name: str, label: str, theta_field: str, theta: float, scaling_field: str | None) -> Computed:
    """Makes the entry for the rotary embedding of the last `qk_rope_head_dim` numbers of a head."""

    def read(hf: HFConfig, c: Any) -> Rope:
        width = hf.take("qk_rope_head_dim", None, kind=int)
        rope = fields.read_rope(
            hf,
            head_dim=c.head_dim,
            interleaved=True,
            partial=True,
            default_theta=theta,
            default_length=LENGTH,
            default_fraction=64 / 512 if width is None else width / c.head_dim,
            layer_type=label,
            theta_field=theta_field,
            scaling_field=scaling_field,
        )
        if width not in (None, rope.dim):
            raise ValueError(f"{hf.where('qk_rope_head_dim')} must be {rope.dim}, as partial_rotary_factor says")
        if isinstance(rope.scaling, YarnScaling) and rope.scaling.attention_factor is None:
            return replace(rope, scaling=replace(rope.scaling, attention_factor=1.0))
        return rope

    def write(rope: Rope, cfg: Any) -> dict[str, Any]:
        written = fields.write_rope(rope, head_dim=cfg.head_dim, interleaved=True)
        limit = "max_position_embeddings"
        shared = {"qk_rope_head_dim": rope.dim, "partial_rotary_factor": rope.dim / cfg.head_dim, limit: written[limit]}
        return {theta_field: rope.theta, f"rope_parameters.{label}": written["rope_parameters"], **shared}

    return Computed(name, read, write)


def _read_hash(hf: HFConfig, c: Any) -> int:
    types = hf.take("mlp_layer_types", None, kind=list)
    number = hf.take("num_hash_layers", min(3, c.num_layers) if types is None else types.count("hash_moe"))
    if types is not None and types != _mlp_types(number, c.num_layers):
        raise ValueError(
            f"{hf.where('mlp_layer_types')} must be 'hash_moe' for the first layers and 'moe' for all others of "
            f"{c.num_layers}, got {types}"
        )
    return number


NUM_HASH = Computed("num_hash", _read_hash, lambda n, cfg: {"mlp_layer_types": _mlp_types(n, cfg.num_layers)})
LAYER_TYPES = fields.layer_types(SLIDING, SPARSE, HEAVY, usual=lambda c: usual_types(c.num_layers), absent=_read_types)


def _mlp_types(number: int, num_layers: int) -> list[str]:
    return ["hash_moe" if i < number else "moe" for i in range(num_layers)]


def _compressor(hf_name: str, path: str) -> list[Weight]:
    """Lists the weights of a compressor."""
    parts = {"wkv.weight": "kv.w", "wgate.weight": "gate.w", "ape": "place", "norm.weight": "norm.scale"}
    return [Weight(f"{hf_name}.{name}", f"{path}.{part}") for name, part in parts.items()]


def table(cfg: Any) -> Table:
    """Maps the names that transformers writes; those of the release lack "model.", and differ in a norm."""
    experts = {"gate": "w1", "up": "w3", "down": "w2"}
    layer = [
        Weight("attn_norm.weight", "attn_norm.scale"),
        Weight("ffn_norm.weight", "mlp_norm.scale"),
        *hyper_connection("hc_attn", "attn_streams"),
        *hyper_connection("hc_ffn", "mlp_streams"),
        Weight("attn.wq_a.weight", "attn.q_down.w"),
        Weight("attn.q_norm.weight", "attn.q_norm.scale"),
        Weight("attn.wq_b.weight", "attn.q_up.w", "(N H) R -> N H R"),
        Weight("attn.wkv.weight", "attn.kv.w"),
        Weight("attn.norm.weight", "attn.kv_norm.scale"),
        Weight("attn.attn_sink", "attn.sinks"),
        Weight("attn.wo_a.weight", "attn.group_out.w", "(G R) F -> G R F"),
        Weight("attn.wo_b.weight", "attn.o.w", "D (G R) -> D G R"),
        *_compressor("attn.compressor", "attn.compressor"),
        *_compressor("attn.indexer.compressor", "attn.indexer.compressor"),
        Weight("attn.indexer.wq_b.weight", "attn.indexer.q.w", "(N H) R -> N H R"),
        Weight("attn.indexer.weights_proj.weight", "attn.indexer.weight.w"),
        Weight("ffn.gate.weight", "moe.router.gate.w"),
        Weight("ffn.gate.bias", "moe.router.expert_bias"),
        *[Weight(f"ffn.experts.{{e}}.{w}.weight", f"moe.{part}.w", "O I -> e O I") for part, w in experts.items()],
        *[Weight(f"ffn.shared_experts.{w}.weight", f"moe.shared.{part}.w") for part, w in experts.items()],
    ]
    release = [Renamed(f"layers.{i}.attn.kv_norm.", f"model.layers.{i}.attn.norm.") for i in range(cfg.num_layers)]
    release += [Renamed(f"mtp.{i}.attn.kv_norm.", f"mtp.{i}.attn.norm.") for i in range(cfg.num_mtp)]
    release += [Renamed("layers.", "model.layers."), Renamed("embed.", "model.embed_tokens.")]
    release += [Renamed("norm.", "model.norm."), Renamed("hc_head_", "model.hc_head.hc_")]
    embed, path = "model.embed_tokens.weight", "layers.{i}.moe.router.table"
    return [
        *release,
        Weight(embed, "embed.w"),
        *names.under(layer, "model.layers.{i}", "layers.{i}"),
        Convert(("model.layers.{i}.ffn.gate.tid2eid",), path, _to_int32, _to_int64, dtype=np.int32),
        *hyper_connection("model.hc_head.hc", "streams"),
        Weight("model.norm.weight", "norm.scale"),
        Weight("head.weight", "head.w"),
        Copy("head.weight", of=embed),
        *_modules(layer, cfg, embed),
    ]


def _modules(layer: list[Weight], cfg: Any, embed: str) -> Table:
    """Maps the names of the release of prediction modules, which have copies of the embedding and the head."""
    if not cfg.num_mtp:
        return [Ignore("mtp.*")]
    projections = {"e_proj": "embed_project.w", "h_proj": "hidden_project.w"}
    norms = {"enorm": "embed_norm.scale", "hnorm": "hidden_norm.scale", "norm": "norm.scale"}
    module = [Weight(f"{name}.weight", path) for name, path in (projections | norms).items()]
    return [
        *names.under(layer, "mtp.{i}", "mtp.{i}.block"),
        *names.under([*module, *hyper_connection("hc_head", "streams")], "mtp.{i}", "mtp.{i}"),
        *[Copy(f"mtp.{i}.emb.tok_emb.weight", of=embed) for i in range(cfg.num_mtp)],
        *[Copy(f"mtp.{i}.head.weight", of="head.weight") for i in range(cfg.num_mtp)],
        *[Ignore(f"mtp.{i}.*") for i in range(cfg.num_mtp, cfg.stored_mtp)],
    ]


def _to_int32(table: np.ndarray) -> np.ndarray:
    return table.astype(np.int32)


def _to_int64(table: np.ndarray) -> tuple[np.ndarray]:
    return (table.astype(np.int64),)
