"""DeepSeek V3.2 (DeepSeek-AI 2025) and GLM-5 (GLM team 2026): DeepSeek V3 whose queries attend to the 2048 keys that an
indexer chooses; from GLM 5.2 on, neighbouring layers share a choice.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.models._layers import TextDecoder, deepseek_experts, latent_attention
from maxlib.models._sizes import ExpertSizes, MTPSizes, RotatedLatentSizes, mtp_table
from maxlib.ops import Rope, YarnScaling
from maxlib.sharding import constrain
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Table, Weight, fields, names

CHOOSES, SHARES = "full", "shared"


@dataclass(frozen=True, kw_only=True)
class Config(RotatedLatentSizes, ExpertSizes, MTPSizes):
    """Sizes of a DeepSeek V3.2, or a GLM-5; `PRESETS` has the published ones."""

    is_glm: bool = False  # whose indexer rotates pairs instead of halves
    q_rank: int
    index_heads: int  # of the indexer ...
    index_dim: int
    index_top: int  # ... and how many keys it chooses
    index_types: tuple[str, ...] | None = None  # CHOOSES or SHARES for each layer; None: all choose
    routed_scale: float = 2.5
    index_loss: nn.IndexLoss | None = None  # trains the indexers

    def __post_init__(self):
        types = self.index_types or (CHOOSES,)
        if types[0] != CHOOSES or len(types) != (self.num_layers if self.index_types else 1):
            raise ValueError(
                f"index_types must name {self.num_layers} layers, of which the first chooses, got {self.index_types}"
            )

    @property
    def kinds(self) -> list[tuple[bool, bool]]:
        """Whether each layer has a plain MLP, and whether it attends to the choice of the layer before it."""
        types = self.index_types or (CHOOSES,) * self.num_layers
        return [(dense, kind == SHARES) for dense, kind in zip(self.dense, types, strict=True)]

    @property
    def index_rope(self) -> Rope:
        """The rotation of index queries and keys: the same, in halves instead of pairs but for GLM."""
        return replace(self.rope, interleaved=self.is_glm)


class Block(nn.Layer):
    """Pre-norm layer of sparse latent attention, with an MLP in the first `num_dense` and experts in all others.

    Where layers share choices, the stream `B T D` comes and goes with the chosen keys, `B T K`.
    """

    def __init__(self, cfg: Config, *, dense: bool, shared: bool = False, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, shared=shared, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs) if dense else None
        self.moe: Any = None if dense else deepseek_experts(cfg, rngs=rngs)

    def __call__(self, x: Any, ctx: nn.Context, cache: Any = None):
        x, best = x if isinstance(x, SharedChoice) else SharedChoice(x, None)
        few = best is not None and not best.shape[2]  # keys, so that all are attended to
        h, cache, loss, chosen = self.attn.with_choice(self.attn_norm(x), ctx, cache, None if few else best)
        x = nn.residual(x, h, "attn")
        h = self.mlp_norm(x)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        x = nn.residual(x, h, "mlp")
        return x if best is None else SharedChoice(x, best if few else chosen), cache, aux | loss


def _attention(cfg: Config, *, shared: bool, rngs: nnx.Rngs) -> nn.SparseMLA:
    # The cache keeps one latent [B, T, R] per token, R = 512 for all heads, a rotary key of 64 and an index key of 128.
    # The norms of the latents have the default epsilon, whatever `norm_eps`.
    return latent_attention(
        cfg,
        nn.SparseMLA,
        rope=cfg.rope,
        index_heads=cfg.index_heads,
        index_dim=cfg.index_dim,
        index_rope=cfg.index_rope,
        top_k=cfg.index_top,
        index_loss=cfg.index_loss,
        shared=shared,
        rngs=rngs,
    )


class SharedChoice(NamedTuple):
    """What passes from layer to layer where they share choices: `x`, and the chosen keys; none if all are visible."""

    x: Float[Array, "B T D"]
    best: Int[Array, "B T K"] | None


class DeepSeekV32(TextDecoder):
    """DeepSeek V3.2: the cost of attention to a long text is that of its indexer, once kernels skip what is hidden."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        def block(kind: tuple[bool, bool], rngs: nnx.Rngs) -> Block:
            return Block(cfg, dense=kind[0], shared=kind[1], rngs=rngs)

        super().__init__(cfg, block, cfg.kinds, rngs=rngs)
        blocks = [Block(cfg, dense=False, rngs=rngs) for _ in range(cfg.num_mtp)]
        self.mtp = nnx.List([nn.mtp.MTP(cfg.dim, block=block, eps=cfg.norm_eps, rngs=rngs) for block in blocks])

    def enter(self, x: Float[Array, "B T D"], *, cache: Any = None, **inputs: Any) -> tuple[Any, nn.Context]:
        """Prepares the input of the first layer, with room for a choice if layers share one."""
        x, ctx = super().enter(x, cache=cache, **inputs)
        if self.cfg.index_types is None:
            return x, ctx
        keys, loss = x.shape[1] if cache is None else cache.capacity, self.cfg.index_loss
        chooses = keys > self.cfg.index_top and not (cache is None and loss is not None and loss.dense)
        best = jnp.zeros((*x.shape[:2], self.cfg.index_top if chooses else 0), jnp.int32)
        return SharedChoice(x, constrain(best, "batch", "seq", None)), ctx

    def layer_inputs(self, x: Any, ctx: nn.Context) -> None:
        """Returns None: text has no inputs of single layers."""

    def leave(self, x: Any, ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head."""
        return super().leave(x.x if isinstance(x, SharedChoice) else x, ctx)


DEEPSEEK, GLM = "deepseek_v32", "glm_moe_dsa"


def _read_kind(hf: HFConfig, c: Any) -> bool:
    if c.model_type == GLM:
        hf.require("indexer_rope_interleave", True)
    return c.model_type == GLM


def _read_index_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    """Reads which layers choose, in one of three spellings; the others take the choice of the layer before them."""
    if not c.is_glm:
        return None
    types, letters = hf.take("indexer_types", None, kind=list), hf.take("index_topk_pattern", None, kind=object)
    every, offset = max(hf.take("index_topk_freq", 1), 1), hf.take("index_skip_topk_offset", 2)
    if types is None and letters is not None:
        types = [{"F": CHOOSES, "S": SHARES}.get(letter, letter) for letter in letters]
    elif types is None:
        types = [SHARES if max(i - offset + 1, 0) % every else CHOOSES for i in range(c.num_layers)]
    if len(types) != c.num_layers or types[0] != CHOOSES or not {*types} <= {CHOOSES, SHARES}:
        raise ValueError(
            f"{hf.where('indexer_types')} must be {CHOOSES!r} or {SHARES!r} for each of {c.num_layers} layers, the first "
            f"one {CHOOSES!r}, got {types}"
        )
    return cast(tuple[str, ...], tuple(types)) if SHARES in types else None


def _write_index_types(types: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"indexer_types": list(types or [CHOOSES] * cfg.num_layers)} if cfg.is_glm else {}


def _either(deepseek: Any, glm: Any) -> Callable[[Any], Any]:
    return lambda c: glm if c.is_glm else deepseek


FIELDS = Fields(
    Config,
    [
        Computed("is_glm", _read_kind, lambda is_glm, cfg: {}),
        *fields.DECODER,
        Computed("index_types", _read_index_types, _write_index_types),
        fields.num_dense(absent=3),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.MLA,
        fields.latent_rope(interleaved=True),
        Field("index_heads", "index_n_heads"),
        Field("index_dim", "index_head_dim"),
        Field("index_top", "index_topk"),
        fields.NUM_SHARED,
        *fields.GROUPS,
        fields.mtp(absent=0),
    ],
    model_types={DEEPSEEK: "DeepseekV32ForCausalLM", GLM: "GlmMoeDsaForCausalLM"},
    model_type=lambda cfg: GLM if cfg.is_glm else DEEPSEEK,
    fixed={"hidden_act": "silu", "attention_bias": False, "num_key_value_heads": fields.num_heads},
    fixed_if_present={
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "rope_interleave": True,
        "layer_types": lambda c: ["indexed_attention"] * c.num_layers,  # every layer has an indexer
    },
    absent={
        "index_heads": _either(64, 32),
        "index_dim": 128,
        "index_top": 2048,
        "num_groups": _either(8, 1),
        "top_groups": _either(4, 1),
        "norm_eps": _either(1e-6, 1e-5),
    },
)


def _indexer() -> list[Weight]:
    """Lists the weights of the indexer."""
    hf_prefix, prefix = "self_attn.indexer", "attn.indexer"
    return [
        Weight(f"{hf_prefix}.wq_b.weight", f"{prefix}.q.w", "(N H) R -> N H R"),
        Weight(f"{hf_prefix}.wk.weight", f"{prefix}.k.w"),
        Weight(f"{hf_prefix}.k_norm.weight", f"{prefix}.k_norm.scale"),
        Weight(f"{hf_prefix}.k_norm.bias", f"{prefix}.k_norm.bias"),
        Weight(f"{hf_prefix}.weights_proj.weight", f"{prefix}.weight.w"),
    ]


def _table(cfg: Config) -> Table:
    layer = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *_indexer(), *names.MLP, *names.MOE]
    return mtp_table(cfg, layer)


# fmt: off
_GLM_5 = Config(  # and GLM-5.1
    is_glm=True,
    vocab=154_880, num_layers=78, num_dense=3, dim=6144, mlp_dim=12_288, expert_dim=2048, num_heads=64,
    q_rank=2048, kv_rank=512, nope_dim=192, v_dim=256, norm_eps=1e-5,
    rope=Rope(64, 1e6, interleaved=True, max_length=202_752),
    index_heads=32, index_dim=128, index_top=2048, num_experts=256, num_shared=1, top_k=8, routed_scale=2.5,
)
PRESETS = {
    "deepseek-v3.2": Config(
        vocab=129_280, num_layers=61, num_dense=3, dim=7168, mlp_dim=18_432, expert_dim=2048, num_heads=128,
        q_rank=1536, kv_rank=512, nope_dim=128, v_dim=128,
        rope=Rope(64, 1e4, YarnScaling(40.0, 4096, beta_fast=32.0, mscale=1.0, mscale_all_dim=1.0), interleaved=True, max_length=163_840),
        index_heads=64, index_dim=128, index_top=2048, num_experts=256, num_shared=1, top_k=8, num_groups=8,
        top_groups=4, routed_scale=2.5,
    ),
    "glm-5": _GLM_5,
    # Layers 0, 1 and every fourth from 2 on choose keys. GLM-5.2 has the same sizes.
    "glm-5.3": replace(
        _GLM_5,
        rope=Rope(64, 8e6, interleaved=True, max_length=1_048_576),
        index_types=tuple(SHARES if max(i - 2, 0) % 4 else CHOOSES for i in range(78)),
    ),
}
# fmt: on

FAMILY = Family("deepseek_v32", DeepSeekV32, FIELDS, _table, PRESETS)
