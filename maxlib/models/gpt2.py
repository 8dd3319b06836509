"""GPT-2 and GPT-3 (Radford et al. 2019; Brown et al. 2020, arXiv:2005.14165): learned positions, LayerNorm, biases
everywhere, one MLP without a gate.

GPT-3 is the same model at other sizes; what its paper says of sparse attention in every second layer is left out.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import PositionedDecoder
from maxlib.sharding import constrain
from maxlib.weights import Family, Field, Fields, Ignore, Renamed, Table, Weight, names

MASK = ops.Causal()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a GPT-2; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_positions: int
    norm_eps: float = 1e-5
    tied: bool = True
    scaled: bool = True  # divide scores by the root of the head's width
    scaled_by_layer: bool = False  # and those of layer i by i + 1

    def __post_init__(self):
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim (n_embd) must be a multiple of num_heads (n_head), got {self.dim} and {self.num_heads}"
            )

    @property
    def scales(self) -> tuple[float, ...]:
        """The factor on the scores of each layer."""
        scale = (self.dim // self.num_heads) ** -0.5 if self.scaled else 1.0
        return tuple(scale / (i + 1 if self.scaled_by_layer else 1) for i in range(self.num_layers))


class Block(nn.Layer):
    """Pre-norm layer with LayerNorm; the layers differ in the scale of their scores only, if in anything."""

    def __init__(self, cfg: Config, scale: float, *, rngs: nnx.Rngs):
        self.attn_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = Attention(cfg, scale, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = MLP(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = nn.residual(x, h, "attn")
        return nn.residual(x, self.mlp(self.mlp_norm(x)), "mlp"), cache, {}


class Attention(nn.SequenceMixer):
    """Multi-head attention with weights stored as [in, out], as in GPT-2's files; `nn.Attention` has [out, in]."""

    op = "attention"
    reorderable = True
    quantizable_cache = True
    probes_scores = True

    def __init__(self, cfg: Config, scale: float, *, rngs: nnx.Rngs):
        D, N, H = cfg.dim, cfg.num_heads, cfg.dim // cfg.num_heads
        self.q, self.k, self.v = (
            nn.Einsum("...D,DNH->...NH", (D, N, H), ("embed", heads, "head_dim"), bias=True, rngs=rngs)
            for heads in ("heads", "kv_heads", "kv_heads")
        )
        self.o = nn.Einsum("...NH,NHD->...D", (N, H, D), ("heads", "head_dim", "embed"), bias=True, rngs=rngs)
        self.mask, self.scale, self.num_heads, self.head_dim = MASK, scale, N, H
        self.implementation: str | None = None

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        # [B, T, D] -> three of [B, T, N, H]
        (q, k), v = self.queries_and_keys(x, ctx), constrain(self.v(x), "batch", "seq", "act_heads", None)
        mask_hint = ctx.mask_hint(self.mask, cache)
        k_start, k_end = ctx.key_intervals(self.mask)  # query t attends to keys from k_start[t] to k_end[t]
        q, k, v = map(nn.remat.mark_heads, (q, k, v), ("q", "k", "v"))
        if cache is not None:
            cache, k, v, k_start, k_end = cache.extend(k, v, ctx, k_start, k_end)
        options = {
            "scale": self.scale,
            "implementation": self.implementation,
            "zigzag": ctx.zigzag,
            "mask_hint": mask_hint,
        }
        out = nn.attend(q, k, v, k_start, k_end, **options)
        return self.o(checkpoint_name(out, "heads")), cache  # [B, T, N, H] -> [B, T, D]

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        """Returns an empty cache for `batch` rows of up to `capacity` tokens."""
        heads, width = self.num_heads, self.head_dim
        return nn.cache.kv_cache(
            batch, capacity, num_kv_heads=heads, k_dim=width, v_dim=width, ring=self.mask.ring, dtype=dtype
        )

    def queries_and_keys(self, x: Float[Array, "B T D"], ctx: nn.Context) -> tuple[Array, Array]:
        q, k = (constrain(part(x), "batch", "seq", "act_heads", None) for part in (self.q, self.k))  # B T N H each
        return q, k

    def traffic(self, split: nn.mixer.SplitSequence) -> dict[str, float]:
        both = 2 * self.num_heads * self.head_dim
        return split.attention(queries=both, keys=both)

    @property
    def kind(self) -> str:
        return "MHA"


class MLP(nnx.Module):
    """`down(gelu(up(x)))`, its weights as [in, out] too."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.up = nn.Einsum("...D,DF->...F", (cfg.dim, cfg.mlp_dim), ("embed", "mlp"), bias=True, rngs=rngs)
        self.down = nn.Einsum("...F,FD->...D", (cfg.mlp_dim, cfg.dim), ("mlp", "embed"), bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        h = jax.nn.gelu(checkpoint_name(self.up(x), "up"), approximate=True)
        return self.down(constrain(h, "batch", "seq", "act_mlp"))


class GPT2(PositionedDecoder):
    """GPT-2: adds a trained vector for each position to the tokens instead of rotary embeddings.

    Raises ValueError for text longer than its positions, see `nn.LearnedPositions`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.positions = nn.LearnedPositions(cfg.num_positions, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda scale, rngs: Block(cfg, scale, rngs=rngs), cfg.scales, rngs=rngs)
        self.norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "n_layer"),
        Field("dim", "n_embd"),
        Field("mlp_dim", "n_inner"),
        Field("num_heads", "n_head"),
        Field("num_positions", "n_positions"),
        Field("norm_eps", "layer_norm_epsilon"),
        Field("tied", "tie_word_embeddings"),
        Field("scaled", "scale_attn_weights"),
        Field("scaled_by_layer", "scale_attn_by_inverse_layer_idx"),
    ],
    model_types={"gpt2": "GPT2LMHeadModel"},
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one formula
        "n_ctx": lambda c: c.num_positions,  # of early versions, read by none
    },
    ignored=("n_special", "predict_special_tokens"),  # of heads for classification
    absent={"mlp_dim": lambda c: 4 * c.dim, "num_positions": 1024},
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters. Releases leave out the prefix, and have the mask as a buffer."""
    layer = [
        *names.layer_norm("ln_1", "attn_norm"),
        Weight("attn.c_proj.weight", "attn.o.w", "(N H) D -> N H D"),
        Weight("attn.c_proj.bias", "attn.o.b"),
        *names.layer_norm("ln_2", "mlp_norm"),
        *names.linear("mlp.c_fc", "mlp.up"),
        *names.linear("mlp.c_proj", "mlp.down"),
    ]
    for n, part in enumerate("qkv"):  # thirds of one tensor
        layer.append(Weight("attn.c_attn.weight", f"attn.{part}.w", "D (R N H) -> D N H", {"R": n}))
        layer.append(Weight("attn.c_attn.bias", f"attn.{part}.b", "(R N H) -> N H", {"R": n}))
    return [
        *names.decoder_table(layer, model="transformer", embed="wte", layers="h", norm="ln_f"),
        Weight("transformer.wpe.weight", "positions.w"),
        *[Ignore(f"transformer.h.{{i}}.attn.{name}") for name in ("bias", "masked_bias")],
        *[Renamed(name, f"transformer.{name}") for name in ("wte.", "wpe.", "h.", "ln_f.")],
    ]


def _gpt(num_layers: int, dim: int, num_heads: int, *, vocab: int = 50_257, length: int = 1024) -> Config:
    return Config(
        vocab=vocab, num_layers=num_layers, dim=dim, mlp_dim=4 * dim, num_heads=num_heads, num_positions=length
    )


PRESETS = {
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-52k": _gpt(1, 16, 2, vocab=1024, length=2048),
    "gpt3-6b": _gpt(48, 3072, 12, vocab=32_768, length=16_384),
    "gpt3-22b": _gpt(48, 6144, 24, vocab=32_768, length=16_384),
    "gpt3-175b": _gpt(96, 12_288, 96, vocab=50_304, length=16_384),
}

FAMILY = Family("gpt2", GPT2, FIELDS, _table, PRESETS)
