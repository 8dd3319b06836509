"""Mixtral 8x7B and 8x22B (Jiang et al. 2024, arXiv:2401.04088): Mistral's block with eight MLPs, two of them for
each token.
"""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, SparseSizes, causal, mixtral_experts
from maxlib.ops import Rope
from maxlib.weights import Family, Field, Fields, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, SparseSizes):
    """Sizes of a Mixtral; `PRESETS` has the published ones."""

    window: int | None = None  # None: every token attends to all earlier ones
    norm_eps: float = 1e-5


class Block(PreNorm):
    """Llama's layer with experts in place of the MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=causal(cfg.window), rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # Softmax over the E experts, then the best k of them, whose weights are divided by their sum.
        router = nn.Router(D, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
        self.moe = nn.MoE(D, cfg.expert_dim, router=router, losses=cfg.losses, rngs=rngs)


class Mixtral(TextDecoder):
    """Mixtral: Mistral with eight experts per layer, of which each token uses two."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("expert_dim", "intermediate_size"),
        *fields.ATTENTION,
        fields.rope(default_theta=1e6),
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
        fields.WINDOW,
    ],
    model_types={"mixtral": "MixtralForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"head_dim": fields.equal_heads, "num_experts": 8, "top_k": 2},
)


def _table(cfg: Config) -> Table:
    moe = "block_sparse_moe"
    router = Weight(f"{moe}.gate.weight", "moe.router.gate.w")
    return names.decoder_table([*names.NORMS, *names.ATTENTION, router, *mixtral_experts(moe)])


# fmt: off
_8X7B = Config(
    vocab=32_000, num_layers=32, dim=4096, expert_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768), num_experts=8, top_k=2,
)
_8X22B = replace(
    _8X7B, num_layers=56, dim=6144, expert_dim=16_384, num_heads=48, rope=Rope(128, 1_000_000.0, max_length=65_536),
)
# fmt: on
PRESETS = {
    "mixtral-8x7b": _8X7B,
    "mixtral-8x22b": _8X22B,
    "mixtral-8x22b-instruct": replace(_8X22B, vocab=32_768),
}

FAMILY = Family("mixtral", Mixtral, FIELDS, _table, PRESETS)
