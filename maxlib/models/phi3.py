"""Phi-3, Phi-3.5 and Phi-4: Llama's block with fused projections on disk, windows, LongRoPE (Microsoft 2024,
arXiv:2404.14219).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.ops._rope import LongRope, Rope
from maxlib.sharding import constrain
from maxlib.weights import Family, HFConfig, Table, Weight, names, rope_to_hf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What distinguishes one Phi-3 from another; `PRESETS` has the published ones. window: None sees everything."""

    vocab: int
    num_layers: int
    dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    window: int | None = None
    norm_eps: float = 1e-5
    tied: bool = False

    def __post_init__(self):
        if not isinstance(self.rope.scaling, LongRope | None) or self.rope.interleaved:
            raise ValueError(
                f"Phi-3's rope must have the scaling LongRope (config.json: rope_type longrope) or none, and not be "
                f"interleaved, got {self.rope}"
            )

    @property
    def mask(self) -> ops.Mask:
        return ops.Causal() if self.window is None else ops.Causal() & ops.SlidingWindow(self.window)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "Config":
        """Reads config.json. Raises ValueError for what this file does not compute."""
        fields.require("model_type", "phi3")
        fields.require("hidden_act", "silu")
        for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):  # in Phi-4-mini's config; transformers has none
            fields.require(bias, False)
        for factor in ("full_attn_mod", "interpolate_factor"):
            fields.require(factor, 1)
        dim, num_heads = (fields.take(name, kind=int) for name in ("hidden_size", "num_attention_heads"))
        head_dim = fields.take("head_dim", dim // num_heads)
        return cls(
            vocab=fields.take("vocab_size", kind=int),
            num_layers=fields.take("num_hidden_layers", kind=int),
            dim=dim,
            mlp_dim=fields.take("intermediate_size", kind=int),
            num_heads=num_heads,
            num_kv_heads=fields.take("num_key_value_heads", num_heads),
            head_dim=head_dim,
            rope=_rope(fields, head_dim),
            window=fields.take("sliding_window", None, kind=int),
            norm_eps=fields.take("rms_norm_eps", 1e-5),
            tied=fields.take("tie_word_embeddings", False),
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of config.json."""
        return {
            "architectures": ["Phi3ForCausalLM"],
            "model_type": "phi3",
            "vocab_size": self.vocab,
            "hidden_size": self.dim,
            "intermediate_size": self.mlp_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.norm_eps,
            "sliding_window": self.window,
            "tie_word_embeddings": self.tied,
            **rope_to_hf(self.rope, head_dim=self.head_dim),
        }


def _rope(fields: HFConfig, head_dim: int) -> Rope:
    """LongRoPE's switch is at `original_max_position_embeddings` of the config's top level, as in all releases."""
    rope = fields.rope(head_dim=head_dim, partial=True, default_length=4096)
    if rope.scaling is not None and fields.take("original_max_position_embeddings", None, kind=int) is None:
        raise ValueError(
            "config.json: original_max_position_embeddings must be given beside max_position_embeddings, but it is missing: "
            "transformers takes 4096 then, whatever the scaling says. Add the length that the model was first trained for."
        )
    return rope


class Block(nnx.Module):
    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            mask=cfg.mask,
            rope=cfg.rope,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], ctx: nn.Context, cache: Any = None):
        h, cache = self.attn(self.attn_norm(x), ctx, cache)
        x = constrain(x + checkpoint_name(h, "attn"), "batch", "seq", "act_embed")
        x = x + checkpoint_name(self.mlp(self.mlp_norm(x)), "mlp")
        return constrain(x, "batch", "seq", "act_embed"), cache, {}

    def init_cache(self, batch: int, capacity: int, dtype=jnp.bfloat16):
        return self.attn.init_cache(batch, capacity, dtype)


class Phi3(nn.Decoder):
    """A decoder, `docs/decisions/0001`."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.masks, self.ropes = (cfg.mask,), (cfg.rope,)
        if isinstance(cfg.rope.scaling, LongRope):
            self.recompute_cache_at = cfg.rope.scaling.original_length + 1
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda i, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.head = None if cfg.tied else nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)


def _table(cfg: Config) -> Table:
    """Hugging Face's names for the weights. Queries, keys and values are rows of one tensor, so are gate and up."""
    heads = {"q": 0, "k": cfg.num_heads, "v": cfg.num_heads + cfg.num_kv_heads}
    layer = [
        *names.NORMS,
        *[
            Weight("self_attn.qkv_proj.weight", f"attn.{n}.w", "(R H) D -> R H D", at={"R": i})
            for n, i in heads.items()
        ],
        Weight("self_attn.o_proj.weight", "attn.o.w", "D (N H) -> D N H"),
        Weight("mlp.gate_up_proj.weight", "mlp.gate.w", "(two F) D -> F D", at={"two": 0}),
        Weight("mlp.gate_up_proj.weight", "mlp.up.w", "(two F) D -> F D", at={"two": 1}),
        Weight("mlp.down_proj.weight", "mlp.down.w"),
    ]
    return names.decoder_table(layer)


# fmt: off
_LONG_3 = (  # of the first release, as are the short ones
    1.0299999713897705, 1.0499999523162842, 1.0499999523162842, 1.0799999237060547, 1.2299998998641968,
    1.2299998998641968, 1.2999999523162842, 1.4499999284744263, 1.5999999046325684, 1.6499998569488525,
    1.8999998569488525, 2.859999895095825, 3.68999981880188, 5.419999599456787, 5.489999771118164, 5.489999771118164,
    9.09000015258789, 11.579999923706055, 15.65999984741211, 15.769999504089355, 15.789999961853027,
    18.360000610351562, 21.989999771118164, 23.079999923706055, 30.009998321533203, 32.35000228881836,
    32.590003967285156, 35.56000518798828, 39.95000457763672, 53.840003967285156, 56.20000457763672,
    57.95000457763672, 59.29000473022461, 59.77000427246094, 59.920005798339844, 61.190006256103516,
    61.96000671386719, 62.50000762939453, 63.3700065612793, 63.48000717163086, 63.48000717163086, 63.66000747680664,
    63.850006103515625, 64.08000946044922, 64.760009765625, 64.80001068115234, 64.81001281738281, 64.81001281738281,
)
_SHORT_3 = (
    *[1.05] * 3, *[1.1] * 3, *[1.2500000000000002] * 2, 1.4000000000000004, 1.4500000000000004, 1.5500000000000005,
    1.8500000000000008, 1.9000000000000008, *[2.000000000000001] * 19, *[2.1000000000000005] * 2, 2.2,
    *[2.3499999999999996] * 4, *[2.3999999999999995] * 2, 2.6499999999999986, 2.6999999999999984, 2.8999999999999977,
    2.9499999999999975, *[3.049999999999997] * 3,
)
_LONG_3_5 = (
    1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115,
    1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863,
    4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137,
    17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523,
    32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156,
    50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457, 62.61000442504883,
    62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457, 63.77000427246094, 63.93000411987305,
    63.96000289916992, 63.970001220703125, 64.02999877929688, 64.06999969482422, 64.08000183105469,
    64.12000274658203, 64.41000366210938, 64.4800033569336, 64.51000213623047, 64.52999877929688, 64.83999633789062,
)
_SHORT_3_5 = (
    1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842, 1.0499999523162842,
    1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0699999332427979, 1.0999999046325684,
    1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662, 1.2899998426437378,
    1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083, 1.8499997854232788,
    1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745, 2.0199997425079346,
    2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914,
    2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0799996852874756,
    2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533, 2.729999542236328,
    2.749999523162842, 2.8399994373321533,
)
_LONG_4 = (
    1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
    16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6,
    32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
)


def _longrope(short: tuple[float, ...], long: tuple[float, ...]) -> Rope:
    return Rope(96, 10_000.0, LongRope(short, long, 4096, factor=32.0), max_length=131_072)


_MINI = Config(
    vocab=32_064, num_layers=32, dim=3072, mlp_dim=8192, num_heads=32, num_kv_heads=32, head_dim=96,
    rope=Rope(96, 10_000.0, max_length=4096), window=2047,
)
_MEDIUM = dataclasses.replace(
    _MINI, num_layers=40, dim=5120, mlp_dim=17_920, num_heads=40, num_kv_heads=10, head_dim=128,
    rope=Rope(128, max_length=4096),
)
_MINI_3_5 = dataclasses.replace(_MINI, rope=_longrope(_SHORT_3_5, _LONG_3_5), window=262_144)
PRESETS = {
    "phi-3-mini-4k": _MINI,
    "phi-3-mini-128k": dataclasses.replace(_MINI_3_5, rope=_longrope(_SHORT_3, _LONG_3)),
    "phi-3-medium-4k": _MEDIUM,
    "phi-3.5-mini": _MINI_3_5,
    "phi-4-mini": dataclasses.replace(
        _MINI_3_5, vocab=200_064, num_heads=24, num_kv_heads=8, head_dim=128, rope=_longrope((1.0,) * 48, _LONG_4),
        tied=True,
    ),
    "phi-4": dataclasses.replace(_MEDIUM, vocab=100_352, rope=Rope(128, 250_000.0, max_length=16_384), window=None),
}
# fmt: on

FAMILY = Family(name="phi3", model_types=("phi3",), model=Phi3, config=Config, table=_table, presets=PRESETS)
