"""dots.llm1 (rednote-hilab 2025, arXiv:2506.05767): Qwen3's attention under DeepSeek V3's experts."""

from dataclasses import dataclass
from typing import Any

from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention, deepseek_experts
from maxlib.models._sizes import FULL, SLIDING, ExpertSizes, WindowSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes, ExpertSizes):
    """Sizes of a dots.llm1; `PRESETS` has the published ones."""

    renormalize: bool = False
    attention_bias: bool = False


class Block(PreNorm):
    """Qwen3's layer; from the `num_dense`th on with experts in place of the MLP."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, dense: bool, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = attention(cfg, mask=mask, rope=cfg.rope, qk_norm=True, bias=bias, out_bias=bias, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)


class Dots1(TextDecoder):
    """dots.llm1: 142B parameters (14B active)."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        def block(kind: tuple[ops.Mask, bool], rngs: nnx.Rngs) -> Block:
            mask, dense = kind
            return Block(cfg, mask, dense=dense, rngs=rngs)

        super().__init__(cfg, block, tuple(zip(cfg.masks, cfg.dense, strict=True)), rngs=rngs)


def _window(hf: HFConfig) -> int | None:
    return hf.take("sliding_window", 4096, kind=int, nullable=True)


def _implied(hf: HFConfig, c: Any) -> tuple[str, ...]:
    first = hf.take("max_window_layers", 62)
    first = c.num_layers if _window(hf) is None else first
    return tuple(SLIDING if i >= first else FULL for i in range(c.num_layers))


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("num_dense", "first_k_dense_replace"),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.ATTENTION,
        fields.rope(default_length=2048),
        fields.NUM_SHARED,
        *fields.GROUPS,
        fields.layer_types(
            FULL,
            SLIDING,
            usual=lambda c: (FULL,) * c.num_layers,
            absent=_implied,
            also=lambda types: {"max_window_layers": types.count(FULL)},
        ),
        Computed(
            "window",
            lambda hf, c: _window(hf) if SLIDING in (c.layer_types or ()) else None,
            lambda value, cfg: {"sliding_window": value},
        ),
        fields.ATTENTION_BIAS,
    ],
    model_types={"dots1": "Dots1ForCausalLM"},
    fixed={"hidden_act": "silu"},
    absent={"num_dense": 0, "num_kv_heads": 32, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    # What a layer lacks (biases, experts, an MLP) is passed over.
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP, *names.MOE])


# fmt: off
PRESETS = {
    "dots.llm1-143b": Config(
        vocab=152_064, num_layers=62, num_dense=1, dim=4096, mlp_dim=10_944, expert_dim=1408, num_heads=32,
        num_kv_heads=32, head_dim=128, norm_eps=1e-5, rope=Rope(128, 10_000_000.0, max_length=32_768), num_experts=128,
        num_shared=2, top_k=6, renormalize=True, routed_scale=2.5,
    )
}
# fmt: on

FAMILY = Family("dots1", Dots1, FIELDS, _table, PRESETS)
