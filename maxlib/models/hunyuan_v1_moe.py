"""Hunyuan-A13B (Tencent 2025): Hunyuan's attention, and in each layer 64 experts and one for every token."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models import hunyuan_v1_dense as dense
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import AttentionSizes, SparseSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, SparseSizes):
    """Sizes of a Hunyuan with experts; `PRESETS` has the published one."""

    attention_bias: bool = False
    norm_eps: float = 1e-5


class Block(PreNorm):
    """Hunyuan's layer with experts in place of the MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, bias, eps = cfg.dim, cfg.attention_bias, cfg.norm_eps
        self.attn_norm = nn.RMSNorm(D, eps=eps)
        self.attn = attention(cfg, dense.Attention, rope=cfg.rope, bias=bias, out_bias=bias, norm_eps=eps, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=eps)
        # Softmax over all experts, then the best k, whose weights are divided by their sum.
        router = nn.Router(D, cfg.num_experts, top_k=cfg.top_k, rngs=rngs)
        shared = nn.GatedMLP(D, cfg.expert_dim, rngs=rngs)
        self.moe = nn.MoE(D, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class HunyuanMoE(TextDecoder):
    """Hunyuan-A13B: 80B parameters (13B active)."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)


def _of_all_layers(name: str, hf_name: str) -> Computed:
    """Makes the entry for a number that config.json may state once for each layer."""

    def read(hf: HFConfig, c: Any) -> int:
        value = hf.take(hf_name, 1, kind=object)
        numbers = {*value} if isinstance(value, list) else {value}
        if len(numbers) != 1:
            raise ValueError(f"{hf.where(hf_name)} must be the same in all layers, got {value}")
        return numbers.pop()

    return Computed(name, read, lambda value, cfg: {hf_name: value})


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("expert_dim", "intermediate_size"),
        *fields.ATTENTION,
        dense.ROPE,
        fields.ATTENTION_BIAS,
        _of_all_layers("num_experts", "num_experts"),
        _of_all_layers("top_k", "moe_topk"),
    ],
    model_types={"hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM"},
    fixed=dense.FIELDS.fixed,
    fixed_if_present={name: value for name, value in dense.FIELDS.fixed_if_present.items() if name != "num_experts"}
    | {
        "use_mixed_mlp_moe": True,
        "moe_layer_num_skipped": 0,
        "moe_intermediate_size": lambda c: (c.expert_dim, [c.expert_dim] * c.num_layers),
        "num_shared_expert": lambda c: (1, [1] * c.num_layers),
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "group_limited_greedy": False,
        "position_embedding_xdrope": False,
    },
    ignored=(*dense.FIELDS.ignored, "moe_drop_tokens", "moe_random_routing_dropped_token", "capacity_factor"),
    absent=dense.FIELDS.absent,
)


def _table(cfg: Config) -> Table:
    router = Weight("mlp.gate.wg.weight", "moe.router.gate.w")
    experts = [*names.experts("mlp.experts.{e}.{}_proj"), *names.mlp("mlp.shared_mlp.{}_proj", "moe.shared")]
    return names.decoder_table([*names.NORMS, *dense.ATTENTION, router, *experts])


# fmt: off
PRESETS = {
    "hunyuan-a13b": Config(
        vocab=128_167, num_layers=32, dim=4096, expert_dim=3072, num_heads=32, num_kv_heads=8, head_dim=128, tied=True,
        rope=Rope(128, 10_000.0 * 1000.0 ** (128 / 126), max_length=32_768), num_experts=64, top_k=8,
    ),
}
# fmt: on

FAMILY = Family("hunyuan_v1_moe", HunyuanMoE, FIELDS, _table, PRESETS)
