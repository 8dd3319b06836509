"""MPT (MosaicML 2023): ALiBi in place of positions, layer norms without biases, and no biases elsewhere."""

from dataclasses import dataclass, replace

from flax import nnx

from maxlib import nn
from maxlib.models._layers import PreNorm, TextDecoder
from maxlib.models._sizes import Sizes
from maxlib.weights import Family, Field, Fields, Table, Weight, names


@dataclass(frozen=True, kw_only=True)
class Config(Sizes):
    """Sizes of an MPT; `PRESETS` has the published ones."""

    norm_eps: float = 1e-5
    clip: float | None = None  # the largest value of queries, keys and values
    tied: bool = True


class Block(PreNorm):
    """GPT-2's layer without biases."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N, clip = cfg.dim, cfg.num_heads, None if cfg.clip is None else nn.norm.Clip(cfg.clip)
        self.attn_norm = nn.LayerNorm(D, eps=cfg.norm_eps, bias=False)
        self.attn = nn.Attention(D, num_heads=N, head_dim=D // N, q_norm=clip, k_norm=clip, v_norm=clip, rngs=rngs)
        self.mlp_norm = nn.LayerNorm(D, eps=cfg.norm_eps, bias=False)
        self.mlp = nn.MLP(D, 4 * D, act=nn.vision.exact_gelu, bias=False, rngs=rngs)


class MPT(TextDecoder):
    """MPT: scores fall linearly with the distance of query and key, so text may be longer than in training."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        norm = nn.LayerNorm(cfg.dim, eps=cfg.norm_eps, bias=False)
        super().__init__(cfg, lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, norm=norm, rngs=rngs)
        self.position_bias = nn.ALiBi(cfg.num_heads)


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "n_layers"),
        Field("dim", "d_model"),
        Field("num_heads", "n_heads"),
        Field("norm_eps", "layer_norm_epsilon"),
        Field("clip", "attn_config.clip_qkv"),
        Field("tied", "tie_word_embeddings"),
    ],
    model_types={"mpt": "MptForCausalLM"},
    fixed={
        "no_bias": True,
        "expansion_ratio": 4,
        "attn_config.attn_type": "multihead_attention",
        "attn_config.softmax_scale": (None,),
        "attn_config.prefix_lm": False,
        "attn_config.qk_ln": False,
        "attn_config.alibi": True,
        "attn_config.alibi_bias_max": 8,
    },
    fixed_if_present={"logit_scale": (None,), "embedding_fraction": 1.0},
    ignored=(  # with ALiBi, of training, and of how it is computed
        *("learned_pos_emb", "norm_type", "init_config", "max_seq_len", "attn_config.attn_pdrop"),
        *("attn_config.attn_impl", "attn_config.attn_uses_sequence_id", "attn_config.model_type"),
    ),
)


def _table(cfg: Config) -> Table:
    layer = [
        Weight("norm_1.weight", "attn_norm.scale"),
        *names.qkv("attn.Wqkv", "attn"),
        *names.heads_out("attn.out_proj", "attn.o"),
        Weight("norm_2.weight", "mlp_norm.scale"),
        *names.linear("ffn.up_proj", "mlp.up"),
        *names.linear("ffn.down_proj", "mlp.down"),
    ]
    return names.decoder_table(layer, model="transformer", embed="wte", layers="blocks", norm="norm_f")


_7B = Config(vocab=50_432, num_layers=32, dim=4096, num_heads=32)
PRESETS = {"mpt-7b": _7B, "mpt-30b": replace(_7B, num_layers=48, dim=7168, num_heads=64)}

FAMILY = Family("mpt", MPT, FIELDS, _table, PRESETS)
