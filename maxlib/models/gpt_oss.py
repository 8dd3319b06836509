"""GPT-OSS (OpenAI 2025, arXiv:2508.10925): windows in every second layer, attention sinks, experts with biases and a
clamped SwiGLU, stored as MXFP4.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from flax import nnx

from maxlib import nn, ops
from maxlib.models._layers import PreNorm, TextDecoder, attention
from maxlib.models._sizes import FULL, SLIDING, SparseSizes, WindowSizes, every
from maxlib.ops import Rope, YarnScaling
from maxlib.weights import Convert, Family, Field, Fields, Table, Weight, fields, mxfp4, names


@dataclass(frozen=True, kw_only=True)
class Config(WindowSizes, SparseSizes):
    """Sizes of a GPT-OSS; `PRESETS` has the published ones. Layers with and without a window alternate."""

    period: ClassVar[int] = 2

    window: int = 128  # of the sliding layers
    act_alpha: float = 1.702  # of `ops.ClampedSwiGLU`
    act_limit: float = 7.0
    norm_eps: float = 1e-5
    attention_bias: bool = True


class Block(PreNorm):
    """Llama's layer with a sink in each head's softmax and experts in place of the MLP."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        # A sink is an extra logit [N] per softmax, without a value, so that a head may attend to nothing.
        self.attn = attention(cfg, mask=mask, rope=cfg.rope, bias=bias, out_bias=bias, sinks=True, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        router = nn.Router(D, cfg.num_experts, top_k=cfg.top_k, bias=True, rngs=rngs)
        # (clip(up) + 1) * g * sigmoid(alpha * g) with g = min(gate, limit): no expert can overflow.
        act = ops.ClampedSwiGLU(cfg.act_alpha, cfg.act_limit)
        self.moe = nn.MoE(D, cfg.expert_dim, router=router, activation=act, bias=True, losses=cfg.losses, rngs=rngs)


class GptOss(TextDecoder):
    """GPT-OSS: every other layer only attends to the last 128 tokens, and every layer has experts."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)


_YARN = YarnScaling(32.0, 4096, truncate=False)
FIELDS = Fields(
    Config,
    [
        *fields.DECODER,
        Field("expert_dim", "intermediate_size"),
        *fields.ATTENTION,
        Field("num_experts", "num_local_experts"),
        Field("top_k", "num_experts_per_tok"),
        fields.rope(default_theta=150_000.0, default_length=131_072, default_scaling=_YARN),
        fields.WINDOW,
        fields.layer_types(SLIDING, FULL, usual=lambda c: every(2, c.num_layers, SLIDING, FULL)),
        Field("act_alpha", "swiglu_alpha"),
        Field("act_limit", "swiglu_limit"),
        fields.ATTENTION_BIAS,
    ],
    model_types={"gpt_oss": "GptOssForCausalLM"},
    fixed={"hidden_act": "silu"},
    fixed_if_present={
        "experts_per_token": lambda c: c.top_k,  # OpenAI's own name, in the releases too
        "quantization_config.quant_method": "mxfp4",  # read by `_table`, whichever weights have it
    },
    ignored=[
        "initial_context_length",  # OpenAI's own name for rope_scaling's original length
        "quantization_config.modules_to_not_convert",
        "quantization_config.dequantize",
    ],
    absent={"num_kv_heads": 8, "head_dim": 64},
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters; experts are read from MXFP4 where they are stored so, written
    plain.

    MXFP4 lies as `E O I`, plain ones as `E I O`. These are turned when read (numpy: 1.3 GB/s, 7 unturned), for the
    releases are MXFP4, whose reading would fall from 1.2 to 0.8 GB/s if experts lay as plain ones do.
    """
    layer = [
        *names.NORMS,
        *names.ATTENTION,
        Weight("self_attn.sinks", "attn.sinks"),
        *names.linear("mlp.router", "moe.router.gate"),
        # Rows of gate and up alternate in one tensor.
        Weight("mlp.experts.gate_up_proj", "moe.gate.w", "E D (F two) -> E F D", at={"two": 0}),
        Weight("mlp.experts.gate_up_proj", "moe.up.w", "E D (F two) -> E F D", at={"two": 1}),
        Weight("mlp.experts.gate_up_proj_bias", "moe.gate.b", "E (F two) -> E F", at={"two": 0}),
        Weight("mlp.experts.gate_up_proj_bias", "moe.up.b", "E (F two) -> E F", at={"two": 1}),
        Weight("mlp.experts.down_proj", "moe.down.w", "E F D -> E D F"),
        Weight("mlp.experts.down_proj_bias", "moe.down.b"),
    ]
    experts, moe = "model.layers.{i}.mlp.experts.", "layers.{i}.moe."
    gate_up = f"{experts}gate_up_proj_blocks", f"{experts}gate_up_proj_scales"
    down = f"{experts}down_proj_blocks", f"{experts}down_proj_scales"
    return [
        *names.decoder_table(layer),
        Convert(gate_up, moe + "gate.w", load=_dequantize_gate, batch=1),
        Convert(gate_up, moe + "up.w", load=_dequantize_up, batch=1),
        Convert(down, moe + "down.w", load=mxfp4.dequantize, batch=2),
    ]


def _dequantize_gate(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns every other row, from the first on."""
    return mxfp4.dequantize(blocks[:, ::2], scales[:, ::2])


def _dequantize_up(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Returns the rows between the gate's."""
    return mxfp4.dequantize(blocks[:, 1::2], scales[:, 1::2])


# fmt: off
_20B = Config(
    vocab=201_088, num_layers=24, dim=2880, expert_dim=2880, num_heads=64, num_kv_heads=8, head_dim=64,
    num_experts=32, top_k=4, rope=Rope(64, 150_000.0, _YARN, max_length=131_072),
)
# fmt: on
PRESETS = {"gpt-oss-20b": _20B, "gpt-oss-120b": replace(_20B, num_layers=36, num_experts=128)}

FAMILY = Family("gpt_oss", GptOss, FIELDS, _table, PRESETS)
