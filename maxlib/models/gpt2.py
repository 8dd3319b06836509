"""GPT-2 and GPT-3: learned positions, LayerNorm, biases everywhere, one MLP without a gate (Radford et al. 2019, Brown
et al. 2020).

GPT-3 is the same model at other sizes; what its paper says of sparse attention in every second layer is left out.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.sharding import constrain
from maxlib.weights import Copy, Family, HFConfig, Ignore, Renamed, Table, Weight

MASK = ops.Causal()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one GPT-2 from another; `PRESETS` has the published ones.

    num_positions: how many the table of positions has. scaled: whether scores are divided by the root of the head's
    width; scaled_by_layer: and layer i's by `i + 1`.
    """

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_positions: int
    norm_eps: float = 1e-5
    tied: bool = True
    scaled: bool = True
    scaled_by_layer: bool = False

    def __post_init__(self):
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim (n_embd) must be a multiple of num_heads (n_head), got {self.dim} and {self.num_heads}"
            )

    @property
    def scales(self) -> tuple[float, ...]:
        """What each layer multiplies its scores by."""
        scale = (self.dim // self.num_heads) ** -0.5 if self.scaled else 1.0
        return tuple(scale / (i + 1 if self.scaled_by_layer else 1) for i in range(self.num_layers))

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "gpt2")
        fields.require("activation_function", "gelu_new", "gelu_pytorch_tanh")  # two names of one formula
        # What heads for classification did, and a way to compute scores in float32, which ours are anyhow.
        fields.ignore("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
        fields.ignore("n_special", "predict_special_tokens", "output_past", "reorder_and_upcast_attn")
        dim, num_positions = fields.take("n_embd", kind=int), fields.take("n_positions", 1024)
        fields.require("n_ctx", num_positions)  # written by early versions, read by none
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=fields.take("n_layer", kind=int),
            dim=dim,
            mlp_dim=fields.take("n_inner", 4 * dim),
            num_heads=fields.take("n_head", kind=int),
            num_positions=num_positions,
            norm_eps=fields.take("layer_norm_epsilon", 1e-5),
            tied=fields.take("tie_word_embeddings", True),
            scaled=fields.take("scale_attn_weights", True),
            scaled_by_layer=fields.take("scale_attn_by_inverse_layer_idx", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json."""
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab,
            "n_positions": self.num_positions,
            "n_ctx": self.num_positions,
            "n_embd": self.dim,
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "n_inner": self.mlp_dim,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": self.norm_eps,
            "tie_word_embeddings": self.tied,
            "scale_attn_weights": self.scaled,
            "scale_attn_by_inverse_layer_idx": self.scaled_by_layer,
        }


class Attention(nnx.Module):
    """Multi-head attention whose weights lie as [in, out], GPT-2's way (`nn.Attention` has [out, in], as all
    others).
    """

    def __init__(self, cfg: Config, scale: float, *, rngs: nnx.Rngs):
        D, N, H = cfg.dim, cfg.num_heads, cfg.dim // cfg.num_heads
        wide = lambda heads: nn.Einsum("...D,DNH->...NH", (D, N, H), ("embed", heads, "head_dim"), bias=True, rngs=rngs)
        self.q, self.k, self.v = wide("heads"), wide("kv_heads"), wide("kv_heads")
        self.o = nn.Einsum("...NH,NHD->...D", (N, H, D), ("heads", "head_dim", "embed"), bias=True, rngs=rngs)
        self.mask, self.scale, self.num_heads, self.head_dim = MASK, scale, N, H

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        q, k, v = (constrain(part(x), "batch", "seq", "act_heads", None) for part in (self.q, self.k, self.v))
        k_start, k_end = ctx.bounds(self.mask)
        if cache is not None:
            cache, k, v, k_start, k_end = cache.extend(k, v, ctx, k_start, k_end)
        out = nn.attend(q, k, v, k_start, k_end, scale=self.scale, zigzag=ctx.zigzag)
        return self.o(out), cache

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        heads, width = self.num_heads, self.head_dim
        return nn.cache.kv_cache(
            batch, capacity, num_kv_heads=heads, k_dim=width, v_dim=width, ring=self.mask.ring, dtype=dtype
        )


class MLP(nnx.Module):
    """`down(gelu(up(x)))`, its weights as [in, out] too."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.up = nn.Einsum("...D,DF->...F", (cfg.dim, cfg.mlp_dim), ("embed", "mlp"), bias=True, rngs=rngs)
        self.down = nn.Einsum("...F,FD->...D", (cfg.mlp_dim, cfg.dim), ("mlp", "embed"), bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.down(constrain(jax.nn.gelu(self.up(x), approximate=True), "batch", "seq", "act_mlp"))


class Block(nnx.Module):
    def __init__(self, cfg: Config, scale: float, *, rngs: nnx.Rngs):
        self.attn_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = Attention(cfg, scale, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = MLP(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class GPT2(nn.Decoder):
    """A decoder, `docs/decisions/0001`. Raises ValueError for text longer than its positions, see
    `nn.LearnedPositions`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks = (MASK,)
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.positions = nn.LearnedPositions(cfg.num_positions, cfg.dim, rngs=rngs)
        scales = cfg.scales
        make = lambda i, rngs: Block(cfg, scales[i], rngs=rngs)
        self.layers = nn.Stack(make, cfg.num_layers, **nn.layout_for(scales), rngs=rngs)
        self.norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)

    def enter(self, x: Float[Array, "B T D"], *, cache: nn.Cache | None = None, **inputs: Any):
        ctx = nn.context(*x.shape[:2], cache=cache, **inputs)
        return super().enter(x + self.positions(ctx, dtype=x.dtype), cache=cache, **inputs)

    @property
    def max_length(self) -> int:
        """Number of positions in the table."""
        return self.positions.length

    def init_cache(self, batch: int, capacity: int, *, dtype: Any = jnp.bfloat16, rope_length: int | None = None):
        """An empty cache for `capacity` tokens a row. Raises ValueError if there are fewer positions; nothing is
        rotated.
        """
        self.positions.check(capacity)
        return super().init_cache(batch, capacity, dtype=dtype)


def _table(cfg: Config) -> Table:
    """Hugging Face's names. Releases leave out the prefix, and have the causal mask as a buffer."""
    theirs, ours = "transformer.h.{i}.", "layers.{i}."
    layer = {
        "ln_1.weight": ("attn_norm.scale", None),
        "ln_1.bias": ("attn_norm.bias", None),
        "attn.c_proj.weight": ("attn.o.w", "(N H) D -> N H D"),
        "attn.c_proj.bias": ("attn.o.b", None),
        "ln_2.weight": ("mlp_norm.scale", None),
        "ln_2.bias": ("mlp_norm.bias", None),
        "mlp.c_fc.weight": ("mlp.up.w", None),
        "mlp.c_fc.bias": ("mlp.up.b", None),
        "mlp.c_proj.weight": ("mlp.down.w", None),
        "mlp.c_proj.bias": ("mlp.down.b", None),
    }
    qkv = []
    for n, part in enumerate("qkv"):
        qkv.append(Weight(f"{theirs}attn.c_attn.weight", f"{ours}attn.{part}.w", "D (R N H) -> D N H", at={"R": n}))
        qkv.append(Weight(f"{theirs}attn.c_attn.bias", f"{ours}attn.{part}.b", "(R N H) -> N H", at={"R": n}))
    return [
        Weight("transformer.wte.weight", "embed.w"),
        Weight("transformer.wpe.weight", "positions.w"),
        *qkv,
        *[Weight(theirs + name, ours + path, pattern) for name, (path, pattern) in layer.items()],
        Weight("transformer.ln_f.weight", "norm.scale"),
        Weight("transformer.ln_f.bias", "norm.bias"),
        Weight("lm_head.weight", "head.w"),
        Copy("lm_head.weight", of="transformer.wte.weight"),
        Ignore(theirs + "attn.bias"),
        Ignore(theirs + "attn.masked_bias"),
        *[Renamed(name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")],
    ]


def _gpt(num_layers: int, dim: int, num_heads: int, *, vocab: int = 50_257, num_positions: int = 1024) -> Config:
    return Config(
        vocab=vocab,
        num_layers=num_layers,
        dim=dim,
        mlp_dim=4 * dim,
        num_heads=num_heads,
        num_positions=num_positions,
    )


PRESETS = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-52k": _gpt(1, 16, 2, vocab=1024, num_positions=2048),
    "gpt3-6b": _gpt(48, 3072, 12, vocab=32_768, num_positions=16_384),
    "gpt3-22b": _gpt(48, 6144, 24, vocab=32_768, num_positions=16_384),
    "gpt3-175b": _gpt(96, 12_288, 96, vocab=50_304, num_positions=16_384),
}

FAMILY = Family(name="gpt2", model_types=("gpt2",), model=GPT2, config=Config, table=_table, presets=PRESETS)
