"""AFMoE, Trinity (Arcee AI 2025): gated attention in windows, every fourth layer without windows and positions, four
norms in a layer, and DeepSeek V3's experts.
"""

from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention, deepseek_experts
from maxlib.models._sizes import FULL, SLIDING, ExpertSizes, RotatedWindowSizes, every
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(RotatedWindowSizes, ExpertSizes):
    """Sizes of a Trinity; `PRESETS` has the published ones."""

    window: int = 1024
    scaled: bool = False  # the embedding, by sqrt(D)
    norm_eps: float = 1e-5


class Block(PreNorm):
    """`x + norm(branch(norm(x)))` twice; from the `num_dense`th layer on with experts."""

    def __init__(self, cfg: Config, mask: ops.Mask, rope: Rope | None, *, dense: bool, rngs: nnx.Rngs):
        D, eps = cfg.dim, cfg.norm_eps
        self.attn_norm, self.attn_post_norm = nn.RMSNorm(D, eps=eps), nn.RMSNorm(D, eps=eps)
        self.attn = attention(cfg, mask=mask, rope=rope, qk_norm=True, out_gate_act=jax.nn.sigmoid, rngs=rngs)
        self.mlp_norm, self.mlp_post_norm = nn.RMSNorm(D, eps=eps), nn.RMSNorm(D, eps=eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


class AFMoE(TextDecoder):
    """Trinity: 26B parameters (3B active)."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        kinds = [(mask, rope, dense) for (mask, rope), dense in zip(cfg.kinds, cfg.dense, strict=True)]
        super().__init__(cfg, lambda k, rngs: Block(cfg, k[0], k[1], dense=k[2], rngs=rngs), kinds, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the vectors of `tokens`."""
        x = self.embed(tokens, dtype=dtype)
        return x * self.cfg.dim**0.5 if self.cfg.scaled else x


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    if (period := hf.take("global_attn_every_n_layers", 4)) < 1:
        raise ValueError(f"{hf.where('global_attn_every_n_layers')} must be at least 1, got {period}.")
    types = hf.layer_types(c.num_layers, FULL, SLIDING) or every(period, c.num_layers, SLIDING, FULL)
    return None if types == every(4, c.num_layers, SLIDING, FULL) else types


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        fields.MLP,
        *fields.ATTENTION,
        fields.rope(default_length=16_384),
        fields.WINDOW,
        Computed("layer_types", _read_types, lambda value, cfg: {"layer_types": [*cfg.types]}),
        *fields.EXPERTS,
        Field("num_dense", "num_dense_layers"),
        Field("num_shared", "num_shared_experts"),
        Field("routed_scale", "route_scale"),
        Field("scaled", "mup_enabled"),
    ],
    model_types={"afmoe": "AfmoeForCausalLM"},
    fixed={"hidden_act": "silu", "attention_bias": False},
    fixed_if_present={"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1}
    | {"num_expert_groups": 1, "num_limited_groups": 1},
    ignored=["load_balance_coeff", "use_grouped_mm"],  # of training, and of how it is computed
    absent={"num_dense": 1, "num_kv_heads": fields.num_heads, "head_dim": 128, "num_shared": 2},
)


def _table(cfg: Config) -> Table:
    layer = names.norms(
        attn_norm="input_layernorm",
        attn_post_norm="post_attention_layernorm",
        mlp_norm="pre_mlp_layernorm",
        mlp_post_norm="post_mlp_layernorm",
    )
    layer += [*names.ATTENTION, Weight("self_attn.gate_proj.weight", "attn.gate.w", "(N H) D -> N H D"), *names.MLP]
    layer += [entry for entry in names.MOE if "mlp.gate." not in entry.hf_name]
    layer += [
        Weight("mlp.router.gate.weight", "moe.router.gate.w"),
        Weight("mlp.expert_bias", "moe.router.expert_bias"),
    ]
    return names.decoder_table(layer)


# fmt: off
PRESETS = {
    "trinity-mini": Config(
        vocab=200_192, num_layers=32, num_dense=2, dim=2048, mlp_dim=6144, expert_dim=1024, num_heads=32, num_kv_heads=4,
        head_dim=128, rope=Rope(128, 10_000.0, max_length=131_072), window=2048, num_experts=128, num_shared=1, top_k=8,
        routed_scale=2.826, scaled=True,
    ),
}
# fmt: on

FAMILY = Family("afmoe", AFMoE, FIELDS, _table, PRESETS)
