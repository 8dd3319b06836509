"""GLM-5.3-Flash (Z.ai 2026): Kimi delta attention, latent attention to chosen pools of keys, four streams, images."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _glm_vision as vision
from maxlib.models import _sizes as sizes
from maxlib.models._layers import TextDecoder, hyper_connection, kimi_delta_attention, latent_attention, sigmoid_router
from maxlib.models._sizes import STREAMS, ExpertSizes, KimiDeltaSizes, LatentSizes, StreamSizes
from maxlib.models._vision import PatchReader
from maxlib.weights import Computed, Family, Field, Fields, HFConfig, Ignore, Multimodal, Table, Weight, fields, names

Vision = vision.Vision
LINEAR, INDEXED = "linear_attention", "indexed_attention"


@dataclass(frozen=True, kw_only=True)
class Config(ExpertSizes, KimiDeltaSizes, LatentSizes, StreamSizes):
    """Sizes of a GLM-5.3-Flash; `PRESETS` has the published one."""

    layer_types: tuple[str, ...] | None = None  # LINEAR or INDEXED for each layer; None: every fourth is INDEXED
    q_rank: int
    lower_bound: float | None = -5.0  # of the log decay of linear attention
    index_heads: int
    index_dim: int
    index_top: int  # keys of the pools that a query attends to
    pool: int = 16
    act_limit: float = 10.0
    norm_eps: float = 1e-5
    max_length: int = 1_048_576
    vision: Vision

    def __post_init__(self):
        fields.check_layer_types(self)
        if self.index_top % self.pool:
            raise ValueError(
                f"pool (index_kpool) must divide index_top (index_topk), got {self.pool} and {self.index_top}"
            )

    @property
    def kinds(self) -> list[tuple[str, bool]]:
        """The type of each layer, and whether it has a plain MLP."""
        return list(zip(self.layer_types or _usual_types(self.num_layers), self.dense, strict=True))


class Block(nn.Layer):
    """Linear or latent attention, and an MLP or experts, each of which reads and mixes the streams `B T n D`."""

    def __init__(self, cfg: Config, kind: str, dense: bool, *, rngs: nnx.Rngs):
        self.attn_streams = hyper_connection(cfg, rngs=rngs)
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn: Any = _latent(cfg, rngs=rngs) if kind == INDEXED else None
        self.delta: Any = kimi_delta_attention(cfg, lower_bound=cfg.lower_bound, rngs=rngs) if kind == LINEAR else None
        self.mlp_streams = hyper_connection(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp: Any = nn.GatedMLP(cfg.dim, cfg.mlp_dim, limit=cfg.act_limit, rngs=rngs) if dense else None
        self.moe: Any = None if dense else _experts(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T n D"], ctx: nn.Context, cache: Any = None):
        h, mix = self.attn_streams.read(x)
        h, cache = (self.attn or self.delta)(self.attn_norm(h), ctx, cache)
        x = self.attn_streams.write(x, h, mix, "attn")
        h, mix = self.mlp_streams.read(x)
        h = self.mlp_norm(h)
        h, aux = (self.mlp(h), {}) if self.moe is None else self.moe(h, ctx)
        return self.mlp_streams.write(x, h, mix, "mlp"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype: Any = jnp.bfloat16) -> Any:
        """Returns the mixer's empty cache."""
        return (self.attn or self.delta).init_cache(batch, capacity, dtype)


def _latent(cfg: Config, *, rngs: nnx.Rngs) -> nn.SparseMLA:
    # The cache keeps one latent [B, T, R] per token, R = 512 for all heads, and an index key with its gates.
    return latent_attention(
        cfg,
        nn.SparseMLA,
        rope=None,
        shared_dim=0,
        norm_eps=cfg.norm_eps,
        index_heads=cfg.index_heads,
        index_dim=cfg.index_dim,
        index_rope=None,
        pool=cfg.pool,
        top_k=cfg.index_top,
        rngs=rngs,
    )


def _experts(cfg: Config, *, rngs: nnx.Rngs) -> nn.MoE:
    D, F = cfg.dim, cfg.expert_dim
    # silu(min(gate, limit)) * clip(up): no expert can overflow, nor can the shared one.
    act = ops.ClampedSwiGLU(1.0, cfg.act_limit, 0.0)
    shared = nn.GatedMLP(D, cfg.num_shared * F, limit=cfg.act_limit, rngs=rngs)
    router = sigmoid_router(D, cfg, rngs=rngs)
    return nn.MoE(D, F, router=router, activation=act, shared=shared, losses=cfg.losses, rngs=rngs)


class GLM5Next(PatchReader, TextDecoder):
    """GLM-5.3-Flash: every fourth layer has a cache of tokens; the head reads the mean of the streams."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.tower = vision.ImageEncoder(cfg.vision, cfg.dim, rngs=rngs)

    def enter(self, x: Float[Array, "B T D"], **inputs: Any) -> tuple[Float[Array, "B T n D"], nn.Context]:
        """Prepares the input of the first layer: as many copies of `x` as there are streams."""
        x, ctx = super().enter(x, **inputs)
        return jnp.repeat(x[:, :, None], self.cfg.streams, axis=2), ctx

    def layer_inputs(self, x: Float[Array, "B T n D"], ctx: nn.Context) -> None:
        """Returns None: single layers have no inputs of their own."""

    def leave(self, x: Float[Array, "B T n D"], ctx: nn.Context) -> Float[Array, "B T D"]:
        """Returns the input of the head: the normed mean of the streams."""
        return super().leave(x.mean(axis=2), ctx)

    @property
    def max_length(self) -> int:
        """Number of positions that the model was made for."""
        return self.cfg.max_length


NESTED = "linear_attn_config"  # where config.json may have the sizes of linear attention
PREFIX = "model.language_model"  # before names of the text


def _usual_types(num_layers: int) -> tuple[str, ...]:
    """Returns the types of layers of a config.json without them: every fourth is INDEXED."""
    return tuple(INDEXED if i % 4 == 3 else LINEAR for i in range(num_layers))


def _linear(name: str, hf_name: str, nested_name: str, usual: int | float) -> Computed:
    """Makes the entry for a size of linear attention, which an object of its own may have."""

    def read(hf: HFConfig, c: Any) -> Any:
        value = hf.take(hf_name, usual, nullable=isinstance(usual, float))
        return hf.nested(NESTED).take(nested_name, value) if NESTED in hf else value

    return Computed(name, read, lambda value, cfg: {hf_name: value})


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    types = hf.layer_types(c.num_layers, LINEAR, INDEXED, "full_attention")
    types = types and tuple(INDEXED if kind == "full_attention" else kind for kind in types)
    chosen = hf.take("indexer_types", ["full"], kind=list)
    if {*chosen} != {"full"}:
        raise ValueError(f"{hf.where('indexer_types')} must be 'full' for all layers, got {chosen}")
    return None if types == _usual_types(c.num_layers) else types


def _write_types(types: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"layer_types": list(types or _usual_types(cfg.num_layers)), "indexer_types": ["full"] * cfg.num_layers}


_LAYER_TYPES = Computed("layer_types", _read_types, _write_types)


TEXT = Fields(
    Config,
    [
        *fields.DECODER,
        _LAYER_TYPES,
        fields.num_dense(absent=3),
        fields.MLP,
        *fields.DEEPSEEK_EXPERTS,
        *fields.MLA,
        fields.NUM_SHARED,
        *fields.GROUPS,
        _linear("delta_heads", "linear_num_heads", "num_heads", 64),
        _linear("delta_dim", "linear_head_dim", "head_dim", 128),
        _linear("conv_width", "linear_conv_kernel_dim", "short_conv_kernel_size", 4),
        _linear("lower_bound", "linear_lower_bound", "gate_lower_bound", -5.0),
        Field("index_heads", "index_n_heads"),
        Field("index_dim", "index_head_dim"),
        Field("index_top", "index_topk"),
        Field("pool", "index_kpool"),
        Field("act_limit", "swiglu_limit"),
        *STREAMS,
        Field("max_length", "max_position_embeddings"),
    ],
    model_types={"glm5_next_text": "Glm5NextTextModel"},
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "num_key_value_heads": fields.num_heads,
        "qk_rope_head_dim": 0,
        "index_kpool_always_select_tail": True,
    },
    fixed_if_present={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "index_topk_freq": 1},
    # Nothing is rotated, heads have the widths of `qk_nope_head_dim` and so on, and prediction modules are not built.
    ignored=["head_dim", "qk_head_dim", "rope_theta", "rope_parameters", "rope_scaling", "num_nextn_predict_layers"],
    absent={"num_shared": 1, "routed_scale": 2.5},
)
FIELDS = Multimodal(
    TEXT,
    {"vision": vision.FIELDS},
    model_types={"glm5_next": "Glm5NextForConditionalGeneration"},
    fixed={"vision_config.out_hidden_size": lambda c: c.dim},
    text_alone=False,
)


def _indexer(hf_name: str, path: str) -> list[Weight]:
    """Lists the weights of an indexer of pools."""
    return [
        Weight(f"{hf_name}.wq_b.weight", f"{path}.q.w", "(N H) R -> N H R"),
        Weight(f"{hf_name}.wk.weight", f"{path}.k.w"),
        *names.layer_norm(f"{hf_name}.k_norm", f"{path}.k_norm"),
        Weight(f"{hf_name}.weights_proj.weight", f"{path}.weight.w"),
        Weight(f"{hf_name}.index_kpool_compress_ape", f"{path}.place"),
        Weight(f"{hf_name}.index_kpool_compress_gate", f"{path}.gate.w"),
    ]


def _table(cfg: Any) -> Table:
    """Maps the tensor names of the release to parameters; prediction modules are further layers, which are skipped."""
    layer = [
        *names.NORMS,
        *sizes.hyper_connection("hc_attn", "attn_streams"),
        *sizes.hyper_connection("hc_ffn", "mlp_streams"),
        *sizes.kimi_delta_attention("N -> N"),
        *names.mla(cfg.q_rank, cfg.nope_dim),
        *_indexer("self_attn.indexer", "attn.indexer"),
        *names.MLP,
        *names.MOE,
    ]
    return [*names.decoder_table(layer, model=PREFIX), *vision.table(), Ignore(f"{PREFIX}.layers.{cfg.num_layers}.*")]


# fmt: off
PRESETS = {
    "glm-5.3-flash": Config(
        vocab=154_880, num_layers=45, num_dense=3, dim=4096, mlp_dim=12_288, expert_dim=2048, num_heads=64, q_rank=1536,
        kv_rank=512, nope_dim=256, v_dim=256, delta_heads=64, delta_dim=128, num_experts=288, num_shared=1, top_k=8,
        routed_scale=2.5, index_heads=32, index_dim=128, index_top=2048, vision=Vision(),
    ),
}
# fmt: on

FAMILY = Family("glm5_next", GLM5Next, FIELDS, _table, PRESETS)
