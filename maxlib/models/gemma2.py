"""Gemma 2 (Gemma team 2024, arXiv:2408.00118): alternating local and global layers, norms before and after each
branch, soft-caps.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, ModelConfig, Table, hf, hf_layer_types, hf_rope, names

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def _in_turn(cfg: Any) -> tuple[str, ...]:
    return tuple(GLOBAL if i % 2 else LOCAL for i in range(cfg.num_layers))


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Gemma 2; `PRESETS` has the published ones."""

    model_types = ("gemma2",)
    architecture = "Gemma2ForCausalLM"
    fixed = {"hidden_activation": "gelu_pytorch_tanh"}
    # hidden_act is never read by transformers; the releases have both.
    fixed_if_present = {"hidden_act": "gelu_pytorch_tanh", "use_bidirectional_attention": False}

    vocab: int = hf("vocab_size", absent=256_000)
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads")
    head_dim: int = hf("head_dim", absent=256)
    rope: Rope = hf_rope()
    window: int = hf("sliding_window", 4096)  # of the local layers
    # LOCAL or GLOBAL for each layer; None: in turn, local first.
    layer_types: tuple[str, ...] | None = hf_layer_types(LOCAL, GLOBAL, usual=_in_turn)
    query_scalar: int = hf("query_pre_attn_scalar", 256)  # scores are divided by its square root
    attention_softcap: float | None = hf("attn_logit_softcapping", 50.0)
    final_softcap: float | None = hf("final_logit_softcapping", 30.0)
    norm_eps: float = hf("rms_norm_eps", 1e-6)
    tied: bool = hf("tie_word_embeddings", True)
    attention_bias: bool = hf("attention_bias", False)

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """The mask of each layer."""
        masks = {LOCAL: ops.Causal() & ops.SlidingWindow(self.window), GLOBAL: ops.Causal()}
        return tuple(masks[kind] for kind in self.layer_types or _in_turn(self))


class Block(nn.Layer):
    """Sandwich norms: each branch is normalized before and after, so that its output has a learned scale."""

    def __init__(self, cfg: Config, mask: ops.Mask, *, rngs: nnx.Rngs):
        D, bias = cfg.dim, cfg.attention_bias
        heads: Any = dict(num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads, head_dim=cfg.head_dim)
        # Scores become 50 * tanh(q . k / sqrt(query_scalar) / 50): none is larger than 50.
        scores: Any = dict(scale=cfg.query_scalar**-0.5, softcap=cfg.attention_softcap)
        norm = lambda: nn.RMSNorm(D, eps=cfg.norm_eps, plus_one=True)
        self.attn_norm = norm()
        self.attn = nn.Attention(D, **heads, mask=mask, rope=cfg.rope, **scores, bias=bias, out_bias=bias, rngs=rngs)
        self.attn_post_norm = norm()
        self.mlp_norm = norm()
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        self.mlp_post_norm = norm()

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + self.attn_post_norm(checkpoint_name(h, "attn")), "batch", "seq", "act_embed")
        x = x + self.mlp_post_norm(checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp"))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Gemma2(nn.Decoder):
    """Gemma 2: every other layer only attends to the last 4096 tokens; scores and logits are capped by a tanh."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg, self.softcap = cfg, cfg.final_softcap
        self.masks, self.ropes = tuple(dict.fromkeys(cfg.masks)), (cfg.rope,)  # each mask once
        # Scaled by sqrt(D), the vectors come out with variance one.
        self.embed = nn.Embed(cfg.vocab, cfg.dim, init=nnx.initializers.normal(cfg.dim**-0.5), rngs=rngs)
        self.layers = nn.Stack(lambda mask, rngs: Block(cfg, mask, rngs=rngs), cfg.masks, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, plus_one=True)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def embed_tokens(self, tokens: Int[Array, "B T"], dtype: Any) -> Float[Array, "B T D"]:
        """Returns the scaled vectors of `tokens`."""
        # The factor is rounded to the compute dtype, as Gemma was trained.
        return self.embed(tokens, dtype=dtype) * jnp.asarray(self.cfg.dim**0.5, dtype)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.SANDWICH_NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_9B = Config(
    vocab=256_000, num_layers=42, dim=3584, mlp_dim=14_336, num_heads=16, num_kv_heads=8, head_dim=256,
    rope=Rope(256, 10_000.0, max_length=8192),
)
PRESETS = {
    "gemma2-2b": replace(_9B, num_layers=26, dim=2304, mlp_dim=9216, num_heads=8, num_kv_heads=4),
    "gemma2-9b": _9B,
    "gemma2-27b": replace(
        _9B, num_layers=46, dim=4608, mlp_dim=36_864, num_heads=32, num_kv_heads=16, head_dim=128,
        rope=Rope(128, 10_000.0, max_length=8192), query_scalar=144,
    ),
}
# fmt: on

FAMILY = Family(name="gemma2", model=Gemma2, config=Config, table=_table, presets=PRESETS)
