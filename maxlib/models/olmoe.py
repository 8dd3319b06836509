"""OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): 64 small experts in each layer, and norms over all heads of
queries and of keys.
"""

from dataclasses import dataclass

from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, SparseSizes
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, SparseSizes):
    """Sizes of an OLMoE; `PRESETS` has the published ones."""

    num_experts: int = 64
    top_k: int = 8
    renormalize: bool = False  # the weights of a token's experts sum to one
    norm_eps: float = 1e-5
    clip: float | None = None  # the largest value of queries and keys, after their norms, and of values
    attention_bias: bool = False


class ClippedNorm(nn.norm.HeadsRMSNorm):
    """RMS norm over all heads together, whose result is clipped."""

    def __init__(self, dim: int, *, limit: float, eps: float):
        super().__init__(dim, eps=eps)
        self.clip = nn.norm.Clip(limit)

    def __call__(self, x: Float[Array, "... N H"]) -> Float[Array, "... N H"]:
        """Normalizes the last two axes together, and clips."""
        return self.clip(super().__call__(x))


class Block(PreNorm):
    """Llama's layer with norms of queries and keys, and experts in place of the MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(
            cfg,
            rope=cfg.rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            q_norm=_norm(cfg, cfg.num_heads),
            k_norm=_norm(cfg, cfg.num_kv_heads),
            v_norm=None if cfg.clip is None else nn.norm.Clip(cfg.clip),
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # Softmax over all E experts; the weights of the best k are not divided by their sum.
        router = nn.Router(D, cfg.num_experts, top_k=cfg.top_k, renormalize=cfg.renormalize, rngs=rngs)
        self.moe = nn.MoE(D, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


def _norm(cfg: Config, heads: int) -> nn.norm.HeadsRMSNorm:
    if cfg.clip is None:
        return nn.norm.HeadsRMSNorm(heads * cfg.head_dim, eps=cfg.norm_eps)
    return ClippedNorm(heads * cfg.head_dim, limit=cfg.clip, eps=cfg.norm_eps)


class OLMoE(TextDecoder):
    """OLMoE: 7B parameters (1B active); weights, data and code are open."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("expert_dim", "intermediate_size"),
        *fields.HEADS,
        fields.EQUAL_HEADS,
        fields.rope(),
        Field("num_experts"),
        Field("top_k", "num_experts_per_tok"),
        Field("renormalize", "norm_topk_prob"),
        Field("clip", "clip_qkv"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"olmoe": "OlmoeForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_kv_heads": fields.num_heads},
)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.EXPERTS])


# fmt: off
PRESETS = {
    "olmoe-1b-7b": Config(
        vocab=50_304, num_layers=16, dim=2048, expert_dim=1024, num_heads=16, num_kv_heads=16, head_dim=128,
        rope=Rope(128, max_length=4096),
    )
}
# fmt: on

FAMILY = Family("olmoe", OLMoE, FIELDS, _table, PRESETS)
