"""LLaDA (Nie et al. 2025, arXiv:2502.09992): Llama whose tokens attend in both directions, a masked diffusion model.

It predicts the tokens behind masks (`training.MaskedDiffusion`) and generates by replacing masks (`inference.denoise`).
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Table, fields, names

MASK = ops.Full()


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a LLaDA; `PRESETS` has the published ones."""

    mlp_dim: int
    norm_eps: float = 1e-5
    mask_token: int  # id of masks


class Block(PreNorm):
    """Llama's layer, with attention in both directions."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=MASK, rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)


class LLaDA(TextDecoder):
    """LLaDA: every token attends to every other one, so there is no cache."""

    has_cache = False

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    return Rope(c.head_dim, hf.take("rope_theta", 10_000.0), max_length=hf.take("max_sequence_length", kind=int))


def _write_rope(rope: Rope, cfg: Config) -> dict[str, Any]:
    if rope != Rope(cfg.head_dim, rope.theta, max_length=rope.max_length):
        raise ValueError(f"LLaDA's config.json has a rope over whole heads without scaling only, got {rope}")
    return {"rope_theta": rope.theta, "max_sequence_length": rope.max_length}


FIELDS = Fields(
    Config,
    [
        Field("vocab", "embedding_size"),
        Field("num_layers", "n_layers"),
        Field("dim", "d_model"),
        Field("norm_eps", "rms_norm_eps"),
        Field("tied", "weight_tying"),
        Field("mlp_dim", "mlp_hidden_size"),
        Field("num_heads", "n_heads"),
        Field("num_kv_heads", "n_kv_heads"),
        fields.EQUAL_HEADS,
        Computed("rope", _read_rope, _write_rope),
        Field("mask_token", "mask_token_id"),
    ],
    model_types={"llada": "LLaDAModelLM"},
    fixed={
        "vocab_size": lambda cfg: cfg.vocab,
        "block_type": "llama",
        "activation_type": "silu",
        "layer_norm_type": "rms",
        "layer_norm_with_affine": True,
        "attention_layer_norm": False,
        "input_emb_norm": False,
        "rope": True,
        "alibi": False,
        "include_bias": False,
        "include_qkv_bias": False,
        "bias_for_layer_norm": False,
        "scale_logits": False,
    },
    fixed_if_present={"multi_query_attention": None},
    ignored=(  # of options that are off, and of how it is computed
        *("alibi_bias_max", "attention_layer_norm_with_affine", "block_group_size", "flash_attn_varlen"),
        *("mlp_ratio", "precision", "rope_full_precision"),
    ),
    absent={"tied": True},
)


def _table(cfg: Config) -> Table:
    layer = [
        *names.norms(attn_norm="attn_norm", mlp_norm="ff_norm"),
        *names.attention("{}_proj", "attn", out="attn_out"),
        *names.linear("ff_proj", "mlp.gate"),
        *names.linear("up_proj", "mlp.up"),
        *names.linear("ff_out", "mlp.down"),
    ]
    model = "model.transformer"
    return [
        *names.decoder_table(layer, model=model, embed="wte", layers="blocks", norm="ln_f", head=f"{model}.ff_out"),
        Ignore(f"{model}.blocks.{{i}}.rotary_emb.inv_freq"),
    ]


# fmt: off
PRESETS = {
    "llada-8b": Config(
        vocab=126_464, num_layers=32, dim=4096, mlp_dim=12_288, num_heads=32, num_kv_heads=32, head_dim=128,
        rope=Rope(128, 500_000.0, max_length=4096), mask_token=126_336,
    ),
}
# fmt: on

FAMILY = Family("llada", LLaDA, FIELDS, _table, PRESETS)
