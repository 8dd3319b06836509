"""ERNIE 4.5 with experts (Baidu 2025): heads rotated in neighbouring pairs, and experts that a bias balances."""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import DECODER, AttentionSizes, SparseSizes
from maxlib.ops import Rope
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Config(AttentionSizes, SparseSizes):
    """Sizes of an ERNIE 4.5 with experts; `PRESETS` has the published ones."""

    mlp_dim: int  # of layers without experts
    num_shared: int = 2
    sparse_step: int = 1  # every `sparse_step`-th layer has experts, ...
    first_sparse: int = 1  # ... from this one on
    last_sparse: int  # ... to this one
    norm_eps: float = 1e-5
    tied: bool = True

    @property
    def sparse(self) -> list[bool]:
        """Whether each layer has experts."""
        step, first, last = self.sparse_step, self.first_sparse, self.last_sparse
        return [(i + 1) % step == 0 and first <= i <= last for i in range(self.num_layers)]


class Block(PreNorm):
    """Llama's layer, with experts or with an MLP."""

    def __init__(self, cfg: Config, *, sparse: bool, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attention(cfg, rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = None if sparse else nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)
        self.moe: Any = _experts(cfg, rngs=rngs) if sparse else None


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    # Softmax over all experts, then the best k by score and bias, whose scores are divided by their sum.
    router = nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, expert_bias=True, rngs=rngs)
    shared = nn.GatedMLP(cfg.dim, cfg.num_shared * cfg.expert_dim, rngs=rngs) if cfg.num_shared else None
    return nn.MoE(cfg.dim, cfg.expert_dim, router=router, shared=shared, losses=cfg.losses, rngs=rngs)


class Ernie45MoE(TextDecoder):
    """ERNIE 4.5 with experts; its module that predicts further ahead is not read."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda sparse, rngs: Block(cfg, sparse=sparse, rngs=rngs), cfg.sparse, rngs=rngs)


def _read_last(hf: HFConfig, c: Any) -> int:
    last = hf.take("moe_layer_end_index", -1)
    return c.num_layers - 1 if last == -1 else last


FIELDS = Fields(
    Config,
    [
        *DECODER,
        fields.rope(interleaved=True, default_theta=500_000.0),
        Field("expert_dim", "moe_intermediate_size"),
        Field("num_experts", "moe_num_experts"),
        Field("top_k", "moe_k"),
        Field("num_shared", "moe_num_shared_experts"),
        Field("sparse_step", "moe_layer_interval"),
        Field("first_sparse", "moe_layer_start_index"),
        Computed("last_sparse", _read_last, lambda value, cfg: {"moe_layer_end_index": value}),
    ],
    model_types={"ernie4_5_moe": "Ernie4_5_MoeForCausalLM"},
    fixed={"hidden_act": "silu", "use_bias": False},
    fixed_if_present={"moe_norm_min": 1e-12, "moe_use_aux_free": True},
    # Of training, and of a module that is not read.
    ignored=["moe_capacity", "moe_gate", "num_nextn_predict_layers"],
    absent={"num_kv_heads": 4, "head_dim": fields.equal_heads},
)


def _table(cfg: Config) -> Table:
    bias = Weight("mlp.moe_statics.e_score_correction_bias", "moe.router.expert_bias", "one E -> E", {"one": 0})
    moe = [entry for entry in names.MOE if "correction_bias" not in entry.hf_name]
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP, *moe, bias])


# fmt: off
_21B = Config(
    vocab=103_424, num_layers=28, dim=2560, mlp_dim=12_288, expert_dim=1536, num_heads=20, num_kv_heads=4, head_dim=128,
    rope=Rope(128, 500_000.0, interleaved=True, max_length=131_072), num_experts=64, top_k=6, last_sparse=27,
)
PRESETS = {
    "ernie-4.5-21b-a3b": _21B,
    "ernie-4.5-300b-a47b": replace(
        _21B, num_layers=54, dim=8192, mlp_dim=28_672, expert_dim=3584, num_heads=64, num_kv_heads=8, top_k=8,
        num_shared=0, first_sparse=3, last_sparse=53, tied=False,
    ),
}
# fmt: on

FAMILY = Family("ernie4_5_moe", Ernie45MoE, FIELDS, _table, PRESETS)
