"""Hunyuan dense (Tencent 2025): Llama's block with norms on queries and keys after their rotation."""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes):
    """Sizes of a dense Hunyuan; `PRESETS` has the published ones."""

    mlp_dim: int
    attention_bias: bool = False
    norm_eps: float = 1e-5


class Attention(nn.Attention):
    """Grouped-query attention that norms queries and keys after their rotation."""

    def __init__(self, dim: int, *, head_dim: int, norm_eps: float, **options: Any):
        super().__init__(dim, head_dim=head_dim, **options)
        self.turned_q_norm = nn.RMSNorm(head_dim, eps=norm_eps)
        self.turned_k_norm = nn.RMSNorm(head_dim, eps=norm_eps)

    def project(self, x: Float[Array, "B T D"], ctx: nn.Context) -> tuple[Array, Array, Array]:
        """Returns queries, keys and values, see `nn.Attention.project`."""
        q, k, v = super().project(x, ctx)
        return self.turned_q_norm(q), self.turned_k_norm(k), v


class Block(PreNorm):
    """Llama's layer with norms on rotated queries and keys."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias, eps = cfg.dim, cfg.attention_bias, cfg.norm_eps
        self.attn_norm = nn.RMSNorm(D, eps=eps)
        self.attn = attention(cfg, Attention, rope=cfg.rope, bias=bias, out_bias=bias, norm_eps=eps, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)


class Hunyuan(TextDecoder):
    """Hunyuan dense: a Llama for texts of 256k tokens."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


def _read_rope(hf: HFConfig, c: Any) -> Rope:
    """Returns the rope. A fixed `alpha` stretches its base by `alpha^(H / (H - 2))`, whatever the length."""
    for name in ("rope_parameters", "rope_scaling"):
        if not hf.take(name, None, kind=dict) or "alpha" not in (scaling := hf.nested(name)):
            continue
        scaling.require("rope_type", "dynamic")
        scaling.require("type", "dynamic")
        scaling.ignore("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
        theta = scaling.take("rope_theta", hf.take("rope_theta", 10_000.0))
        stretched = theta * scaling.take("alpha", kind=float) ** (c.head_dim / (c.head_dim - 2))
        return Rope(c.head_dim, stretched, max_length=hf.take("max_position_embeddings", 2048))
    return fields.read_rope(hf, head_dim=c.head_dim, default_length=2048)


ROPE = Computed("rope", _read_rope, lambda rope, cfg: fields.write_rope(rope, head_dim=cfg.head_dim))
FIELDS = Fields(
    Config,
    [*DECODER, ROPE, fields.ATTENTION_BIAS],
    model_types={"hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={
        "attention_head_dim": lambda c: c.head_dim,
        "use_qk_norm": True,
        "use_rotary_pos_emb": True,
        "use_cla": False,
        "mlp_bias": False,
        "norm_type": "rms",
        "num_experts": 1,
    },
    ignored=(  # of tokens, of a head for classes, and of options that are off
        *("eod_token_id", "im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id", "mask_init_id"),
        *("org_vocab_size", "add_classification_head", "class_num", "pool_type", "cla_share_factor", "dense_list"),
        "enable_lm_head_fp32",
    ),
    absent={"num_kv_heads": fields.num_heads, "head_dim": fields.equal_heads},
)


ATTENTION = (
    *names.ATTENTION,
    Weight("self_attn.query_layernorm.weight", "attn.turned_q_norm.scale"),
    Weight("self_attn.key_layernorm.weight", "attn.turned_k_norm.scale"),
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *ATTENTION, *names.MLP])


# fmt: off
PRESETS = {
    "hunyuan-7b": Config(
        vocab=128_167, num_layers=32, dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128, tied=True,
        rope=Rope(128, 10_000.0 * 1000.0 ** (128 / 126), max_length=32_768),
    ),
}
# fmt: on

FAMILY = Family("hunyuan_v1_dense", Hunyuan, FIELDS, _table, PRESETS)
