"""Mistral 7B, Nemo, Small and Large (Jiang et al. 2023, arXiv:2310.06825): Llama's block, first with a window."""

from dataclasses import dataclass, replace
from typing import Any

from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops import Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, ModelConfig, Table, hf, hf_rope, names


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes of a Mistral; `PRESETS` has the published ones."""

    model_types = ("mistral",)
    architecture = "MistralForCausalLM"
    fixed = {"hidden_act": "silu"}

    vocab: int = hf("vocab_size")
    num_layers: int = hf("num_hidden_layers")
    dim: int = hf("hidden_size")
    mlp_dim: int = hf("intermediate_size")
    num_heads: int = hf("num_attention_heads")
    num_kv_heads: int = hf("num_key_value_heads", null=lambda c: c.num_heads)
    head_dim: int = hf("head_dim", absent=lambda c: c.dim // c.num_heads)
    rope: Rope = hf_rope()
    window: int | None = hf("sliding_window", None, absent=4096)  # None: every token sees all before it
    norm_eps: float = hf("rms_norm_eps", 1e-5, absent=1e-6)
    tied: bool = hf("tie_word_embeddings", False)

    @property
    def mask(self) -> ops.Mask:
        # A token sees itself and the window - 1 before it. After L layers it has heard of L * window tokens.
        return ops.Causal() if self.window is None else ops.Causal() & ops.SlidingWindow(self.window)


class Block(nn.Layer):
    """Llama's layer, under a mask that may have a window."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N, K, H = cfg.dim, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.attn_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.attn = nn.Attention(D, num_heads=N, num_kv_heads=K, head_dim=H, mask=cfg.mask, rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(D, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(D, cfg.mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Mistral(nn.Decoder):
    """Mistral: Llama with a sliding window in every layer of the first release, whose cache is a ring of that size."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (cfg.mask,), (cfg.rope,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(self.layer, cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def layer(self, i: int, rngs: nnx.Rngs) -> nn.Layer:
        """Builds layer `i`."""
        return Block(self.cfg, rngs=rngs)


def _table(cfg: Config) -> Table:
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


# fmt: off
_7B = Config(
    vocab=32_000, num_layers=32, dim=4096, mlp_dim=14_336, num_heads=32, num_kv_heads=8, head_dim=128,
    rope=Rope(128, 1_000_000.0, max_length=32_768),
)
_LONG = Rope(128, 1_000_000.0, max_length=131_072)
_24B_ROPE = Rope(128, 100_000_000.0, max_length=32_768)
PRESETS = {
    "mistral-7b-v0.1": replace(_7B, rope=Rope(128, 10_000.0, max_length=32_768), window=4096),
    "mistral-7b-v0.2": _7B,
    "mistral-7b-v0.3": replace(_7B, vocab=32_768),
    "mistral-nemo-12b": replace(_7B, vocab=131_072, num_layers=40, dim=5120, rope=_LONG),
    "mistral-small-22b": replace(_7B, vocab=32_768, num_layers=56, dim=6144, mlp_dim=16_384, num_heads=48),
    "mistral-small-24b": replace(_7B, vocab=131_072, num_layers=40, dim=5120, mlp_dim=32_768, rope=_24B_ROPE),
    "mistral-large-123b": replace(
        _7B, vocab=32_768, num_layers=88, dim=12_288, mlp_dim=28_672, num_heads=96, rope=_LONG
    ),
}
# fmt: on

FAMILY = Family(name="mistral", model=Mistral, config=Config, table=_table, presets=PRESETS)
