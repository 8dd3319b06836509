"""GPT-OSS: windows in turn, attention sinks, and experts with biases and a clamped SwiGLU (OpenAI 2025,
arXiv:2508.10925).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import Rope, Yarn
from maxlib.sharding import constrain
from maxlib.weights import Convert, Family, HFConfig, Table, Weight, names, rope_to_hf
from maxlib.weights import _mxfp4 as mxfp4

SLIDING, FULL = "sliding_attention", "full_attention"
# Our sizes, and what config.json calls them.
_SIZES = {
    "vocab": "vocab_size",
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "expert_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_experts": "num_local_experts",
    "top_k": "num_experts_per_tok",
}


def _in_turn(num_layers: int) -> tuple[str, ...]:
    return tuple(FULL if i % 2 else SLIDING for i in range(num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one GPT-OSS from another; `PRESETS` has the published ones.

    act_alpha, act_limit: of `nn.ClampedSwiGLU`. losses: what the routers report for training.
    """

    vocab: int
    num_layers: int
    dim: int
    expert_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    top_k: int
    rope: Rope
    window: int = 128  # of the sliding layers
    layer_types: tuple[str, ...] | None = None  # SLIDING or FULL each; None: in turn, SLIDING first
    act_alpha: float = 1.702
    act_limit: float = 7.0
    norm_eps: float = 1e-5
    tied: bool = False
    attention_bias: bool = True
    losses: tuple[Any, ...] = ()

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "gpt_oss")
        fields.require("hidden_act", "silu")
        sizes = {ours: fields.take(theirs, kind=int) for ours, theirs in _SIZES.items()}
        fields.require("experts_per_token", sizes["top_k"])  # OpenAI's own name, in the releases too
        _check_quantization(fields)
        head_dim = fields.take("head_dim", 64, nullable=True) or sizes["dim"] // sizes["num_heads"]
        layer_types = fields.layer_types(sizes["num_layers"], SLIDING, FULL)
        return cls(
            **sizes,
            num_kv_heads=fields.take("num_key_value_heads", 8, nullable=True) or sizes["num_heads"],
            head_dim=head_dim,
            rope=_rope(fields, head_dim),
            window=fields.take("sliding_window", 128),
            layer_types=None if layer_types == _in_turn(sizes["num_layers"]) else layer_types,
            act_alpha=fields.take("swiglu_alpha", 1.702),
            act_limit=fields.take("swiglu_limit", 7.0),
            norm_eps=fields.take("rms_norm_eps", 1e-5),
            tied=fields.take("tie_word_embeddings", False),
            attention_bias=fields.take("attention_bias", True),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json, for unquantized weights. Raises ValueError for a rope that Hugging Face's class
        does not have.
        """
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            **{theirs: getattr(self, ours) for ours, theirs in _SIZES.items()},
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "layer_types": list(self.layer_types or _in_turn(self.num_layers)),
            "sliding_window": self.window,
            "swiglu_alpha": self.act_alpha,
            "swiglu_limit": self.act_limit,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "attention_bias": self.attention_bias,
            **rope_to_hf(self.rope, head_dim=self.head_dim, whole_heads=True),
        }


def _rope(fields: HFConfig, head_dim: int) -> Rope:
    """YaRN unless the config says something else; transformers 4 says by a null that nothing is scaled."""
    rope = fields.rope(head_dim=head_dim, default_theta=150_000.0, default_length=131_072)
    fields.ignore("initial_context_length")  # OpenAI's own name for what rope_scaling calls original_...
    given = "rope_scaling" in fields or fields.take("rope_parameters", None, kind=dict)
    return rope if given else dataclasses.replace(rope, scaling=_YARN)


def _check_quantization(fields: HFConfig) -> None:
    """MXFP4 is read (see `_table`), whichever weights have it."""
    if fields.take("quantization_config", None, kind=dict):
        quantization = fields.nested("quantization_config")
        quantization.require("quant_method", "mxfp4")
        quantization.ignore("modules_to_not_convert", "dequantize")


class Block(nnx.Module):
    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=cfg.rope,
            bias=cfg.attention_bias,
            out_bias=cfg.attention_bias,
            sinks=True,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.moe = nn.MoE(
            cfg.dim,
            cfg.expert_dim,
            router=nn.Router(cfg.dim, cfg.num_experts, top_k=cfg.top_k, bias=True, rngs=rngs),
            activation=nn.ClampedSwiGLU(cfg.act_alpha, cfg.act_limit),
            bias=True,
            losses=cfg.losses,
            rngs=rngs,
        )

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        h, aux = self.moe(self.mlp_norm(x), ctx)
        return constrain(x + checkpoint_name(h, "mlp"), "batch", "seq", "act_embed"), cache, aux

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class GptOss(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        types = cfg.layer_types or _in_turn(cfg.num_layers)
        masks = {SLIDING: ops.Causal() & ops.SlidingWindow(cfg.window), FULL: ops.Causal()}
        self.masks, self.ropes = tuple(masks.values()), (cfg.rope,)
        make = lambda i, rngs: Block(cfg, masks[types[i]], rngs=rngs)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(types), rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights; experts are read from MXFP4 where they are stored so, and written plain.

    MXFP4 lies as `E O I`, plain ones as `E I O`. These are turned when read (numpy: 1.3 GB/s, 7 unturned), for the
    releases are MXFP4, whose reading would fall from 1.2 to 0.8 GB/s if experts lay as plain ones do.
    """
    layer = [
        *names.NORMS,
        *names.ATTENTION,
        Weight("self_attn.sinks", "attn.sinks"),
        Weight("mlp.router.weight", "moe.router.gate.w"),
        Weight("mlp.router.bias", "moe.router.gate.b"),
        Weight("mlp.experts.gate_up_proj", "moe.gate.w", "E D (F two) -> E F D", at={"two": 0}),
        Weight("mlp.experts.gate_up_proj", "moe.up.w", "E D (F two) -> E F D", at={"two": 1}),
        Weight("mlp.experts.gate_up_proj_bias", "moe.gate.b", "E (F two) -> E F", at={"two": 0}),
        Weight("mlp.experts.gate_up_proj_bias", "moe.up.b", "E (F two) -> E F", at={"two": 1}),
        Weight("mlp.experts.down_proj", "moe.down.w", "E F D -> E D F"),
        Weight("mlp.experts.down_proj_bias", "moe.down.b"),
    ]
    experts, moe = "model.layers.{i}.mlp.experts.", "layers.{i}.moe."
    gate_up = (experts + "gate_up_proj_blocks", experts + "gate_up_proj_scales")
    down = (experts + "down_proj_blocks", experts + "down_proj_scales")
    return [
        *names.decoder_table(layer),
        Convert(gate_up, moe + "gate.w", load=_dequantize_gate, batch=1),
        Convert(gate_up, moe + "up.w", load=_dequantize_up, batch=1),
        Convert(down, moe + "down.w", load=mxfp4.dequantize, batch=2),
    ]


def _dequantize_gate(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Every other row, from the first on."""
    return mxfp4.dequantize(blocks[:, ::2], scales[:, ::2])


def _dequantize_up(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The rows between the gate's."""
    return mxfp4.dequantize(blocks[:, 1::2], scales[:, 1::2])


_YARN = Yarn(32.0, 4096, truncate=False)
_20B = Config(
    vocab=201_088,
    num_layers=24,
    dim=2880,
    expert_dim=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    num_experts=32,
    top_k=4,
    rope=Rope(64, 150_000.0, _YARN, max_length=131_072),
)

PRESETS = {
    "gpt-oss-20b": _20B,
    "gpt-oss-120b": dataclasses.replace(_20B, num_layers=36, num_experts=128),
}

FAMILY = Family(name="gpt_oss", model_types=("gpt_oss",), model=GptOss, config=Config, table=_table, presets=PRESETS)
