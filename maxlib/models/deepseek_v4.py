"""DeepSeek V4 (DeepSeek-AI 2026): attention to a window and to compressed keys, a residual of four streams, experts
that the first layers choose by the token's id. Prediction modules are loaded only with `num_mtp=1`.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import _deepseek_v4_files as files
from maxlib.models._layers import TextDecoder, hyper_connection
from maxlib.models._sizes import SLIDING, STREAMS, MTPSizes, Sizes, StreamSizes
from maxlib.weights import Family, Field, Fields, fields

SPARSE, HEAVY = files.SPARSE, files.HEAVY


@dataclass(frozen=True, kw_only=True)
class Config(Sizes, StreamSizes, MTPSizes):
    """Sizes of a DeepSeek V4; `PRESETS` has the published ones."""

    head_dim: int  # H
    layer_types: tuple[str, ...] | None = None  # SLIDING, SPARSE or HEAVY for each layer; None: the usual ones
    window: int = 128
    sparse_rate: int = 4  # tokens of a compressed key
    heavy_rate: int = 128
    rope: ops.Rope  # of SLIDING layers
    compressed_rope: ops.Rope  # of all others
    q_rank: int
    num_groups: int  # of heads, for the output
    group_rank: int
    index_heads: int
    index_dim: int
    index_top: int  # compressed keys that a SPARSE layer chooses
    expert_dim: int
    num_experts: int
    top_k: int
    num_hash: int = 3  # first layers, whose experts the token's id chooses
    routed_scale: float = 1.5
    act_limit: float = 10.0
    losses: tuple[Any, ...] = ()  # router losses for training
    index_loss: nn.IndexLoss | None = None  # trains the indexers

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def kinds(self) -> list[tuple[str, bool]]:
        """The type of each layer, and whether the token's id chooses its experts."""
        types = self.layer_types or files.usual_types(self.num_layers)
        return [(kind, i < self.num_hash) for i, kind in enumerate(types)]


class Block(nn.Layer):
    """Layer of compressed attention and experts, each of which reads, writes and mixes the streams `B T n D`."""

    def __init__(self, cfg: Config, kind: str, hashed: bool, *, rngs: nnx.Rngs):
        self.attn_streams = hyper_connection(cfg, rngs=rngs)
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = _attention(cfg, kind, rngs=rngs)
        self.mlp_streams = hyper_connection(cfg, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.moe = _experts(cfg, hashed=hashed, rngs=rngs)

    def __call__(self, x: Float[Array, "B T n D"], ctx: nn.Context, cache: Any = None):
        h, mix = self.attn_streams.read(x)
        h, cache, loss = self.attn.with_loss(self.attn_norm(h), ctx, cache)
        x = self.attn_streams.write(x, h, mix, "attn")
        h, mix = self.mlp_streams.read(x)
        h, aux = self.moe(self.mlp_norm(h), ctx)
        return self.mlp_streams.write(x, h, mix, "mlp"), cache, aux | loss


def _attention(cfg: Config, kind: str, *, rngs: nnx.Rngs) -> nn.CompressedAttention:
    # The cache keeps 128 keys [B, 128, 512] for all heads, and one entry [B, 512] for every 4 or 128 tokens.
    index = {"num_heads": cfg.index_heads, "head_dim": cfg.index_dim, "top_k": cfg.index_top}
    return nn.CompressedAttention(
        cfg.dim,
        num_heads=cfg.num_heads,
        head_dim=cfg.head_dim,
        q_rank=cfg.q_rank,
        groups=cfg.num_groups,
        group_rank=cfg.group_rank,
        window=cfg.window,
        rope=cfg.rope if kind == SLIDING else cfg.compressed_rope,
        rate={SLIDING: None, SPARSE: cfg.sparse_rate, HEAVY: cfg.heavy_rate}[kind],
        overlap=kind == SPARSE,
        index=index if kind == SPARSE else None,
        index_loss=cfg.index_loss if kind == SPARSE else None,
        norm_eps=cfg.norm_eps,
        rngs=rngs,
    )


def _experts(cfg: Config, *, hashed: bool, rngs: nnx.Rngs) -> nn.MoE:
    D, E, options = cfg.dim, cfg.num_experts, {"score": nn.router.sqrt_softplus, "scale": cfg.routed_scale}
    if hashed:
        router = nn.HashRouter(D, E, vocab=cfg.vocab, top_k=cfg.top_k, rngs=rngs, **options)
    else:
        router = nn.Router(D, E, top_k=cfg.top_k, expert_bias=True, rngs=rngs, **options)
    # silu(min(gate, limit)) * clip(up): no expert can overflow, nor can the shared one.
    act = ops.ClampedSwiGLU(1.0, cfg.act_limit, 0.0)
    shared = nn.GatedMLP(D, cfg.expert_dim, limit=cfg.act_limit, rngs=rngs)
    return nn.MoE(D, cfg.expert_dim, router=router, activation=act, shared=shared, losses=cfg.losses, rngs=rngs)


class Module(nn.mtp.MTP):
    """Predicts one token further: `norm(sum of streams of block(hidden_project(norm(streams)) + embed_project(...)))`.

    What it reads and returns are vectors for the head, `B T D`, followed by the streams, as the model's output.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D = cfg.dim
        self.embed_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.hidden_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.embed_project = nn.Einsum("...F,DF->...D", (D, D), ("embed", "mlp"), rngs=rngs)
        self.hidden_project = nn.Einsum("...F,DF->...D", (D, D), ("embed", "mlp"), rngs=rngs)
        self.block: Any = Block(cfg, SLIDING, hashed=False, rngs=rngs)
        self.streams = nn.HyperHead(cfg.dim, streams=cfg.streams, eps=cfg.stream_eps, norm_eps=cfg.norm_eps, rngs=rngs)
        self.norm = nn.RMSNorm(D, eps=cfg.norm_eps)

    def __call__(
        self, hidden: Float[Array, "B T F"], embedded: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None
    ) -> tuple[Float[Array, "B T F"], Any, dict[str, Any]]:
        """Returns the new `hidden`, the block's cache and its `aux`; see `nn.mtp.MTP`."""
        B, T, D = embedded.shape
        # [B, T, D + n * D] -> [B, T, n, D]
        x = self.hidden_project(self.hidden_norm(hidden[..., D:].reshape(B, T, -1, D)))
        x, cache, aux = self.block(x + self.embed_project(self.embed_norm(embedded))[:, :, None], ctx, cache)
        return _with_streams(self.norm(self.streams(x)), x), cache, aux


def _with_streams(hidden: Float[Array, "B T D"], x: Float[Array, "B T n D"]) -> Float[Array, "B T F"]:
    return jnp.concatenate([hidden, x.reshape(*x.shape[:2], -1)], axis=-1)


class DeepSeekV4(TextDecoder):
    """DeepSeek V4: a cache of a million tokens is about two percent of one with a key per token and eight heads."""

    layers_take_tokens = True

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda kind, rngs: Block(cfg, *kind, rngs=rngs), cfg.kinds, rngs=rngs)
        self.streams = nn.HyperHead(cfg.dim, streams=cfg.streams, eps=cfg.stream_eps, norm_eps=cfg.norm_eps, rngs=rngs)
        self.mtp = nnx.List([Module(cfg, rngs=rngs) for _ in range(cfg.num_mtp)])

    def enter(self, x: Float[Array, "B T D"], **inputs: Any) -> tuple[Float[Array, "B T n D"], nn.Context]:
        """Prepares the input of the first layer: as many copies of `x` as there are streams."""
        x, ctx = super().enter(x, **inputs)
        return jnp.repeat(x[:, :, None], self.cfg.streams, axis=2), ctx

    def layer_inputs(self, x: Float[Array, "B T n D"], ctx: nn.Context) -> None:
        """Returns None: text has no inputs of single layers."""

    def leave(self, x: Float[Array, "B T n D"], ctx: nn.Context) -> Float[Array, "B T F"]:
        """Returns the input of the head, the normed sum of the streams; then the streams if there are `mtp` modules."""
        hidden = super().leave(self.streams(x), ctx)
        return _with_streams(hidden, x) if len(self.mtp) else hidden

    def logits(self, hidden: Float[Array, "B T F"]) -> Float[Array, "B T V"]:
        """Returns the logits of the next token."""
        return super().logits(hidden[..., : self.cfg.dim])


FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("num_heads", "num_attention_heads"),
        Field("head_dim"),
        files.LAYER_TYPES,
        fields.WINDOW,
        files.rate("sparse_rate", SPARSE, "compress_rate_csa", 4),
        files.rate("heavy_rate", HEAVY, "compress_rate_hca", 128),
        files.rope("rope", "main", "rope_theta", 10_000.0, None),
        files.rope("compressed_rope", "compress", "compress_rope_theta", 160_000.0, "rope_scaling"),
        Field("q_rank", "q_lora_rank"),
        Field("num_groups", "o_groups"),
        Field("group_rank", "o_lora_rank"),
        Field("index_heads", "index_n_heads"),
        Field("index_dim", "index_head_dim"),
        Field("index_top", "index_topk"),
        *fields.DEEPSEEK_EXPERTS,
        files.NUM_HASH,
        Field("act_limit", "swiglu_limit"),
        *STREAMS,
        fields.mtp(absent=1),
    ],
    model_types={"deepseek_v4": "DeepseekV4ForCausalLM"},
    fixed={
        "hidden_act": "silu",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
        "attention_bias": False,
        "mlp_bias": False,
    },
    fixed_if_present={"topk_method": "noaux_tc"},
    ignored=["expert_dtype"],  # whether experts are FP4 is seen from their tensors
    absent={
        "vocab": 129_280, "num_layers": 43, "dim": 4096, "num_heads": 64, "head_dim": 512, "q_rank": 1024,
        "num_groups": 8, "group_rank": 1024, "index_heads": 64, "index_dim": 128, "index_top": 512,
        "expert_dim": 2048, "num_experts": 256, "top_k": 6,
    },
)  # fmt: skip


# fmt: off
_YARN = ops.YarnScaling(16.0, 65_536, attention_factor=1.0)
_FLASH = Config(
    vocab=129_280, num_layers=43, dim=4096, num_heads=64, head_dim=512,
    layer_types=(SLIDING, SLIDING, *(HEAVY if i % 2 else SPARSE for i in range(41))),
    rope=ops.Rope(64, 10_000.0, interleaved=True, max_length=files.LENGTH),
    compressed_rope=ops.Rope(64, 160_000.0, _YARN, interleaved=True, max_length=files.LENGTH),
    q_rank=1024, num_groups=8, group_rank=1024, index_heads=64, index_dim=128, index_top=512,
    expert_dim=2048, num_experts=256, top_k=6,
)
PRESETS = {
    "deepseek-v4-flash": _FLASH,
    "deepseek-v4-pro": replace(
        _FLASH, num_layers=61, dim=7168, num_heads=128, q_rank=1536, num_groups=16, index_top=1024, expert_dim=3072,
        num_experts=384, routed_scale=2.5, layer_types=(HEAVY, HEAVY, *(HEAVY if i % 2 else SPARSE for i in range(59))),
    ),
}
# fmt: on

FAMILY = Family("deepseek_v4", DeepSeekV4, FIELDS, files.table, PRESETS)
