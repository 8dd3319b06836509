"""Sizes that many families share, and what config.json and weight files call them.

`llama.py` writes its sizes out. Letters are those of `llama.py`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from maxlib import ops
from maxlib.ops import Rope
from maxlib.weights import Computed, Field, HFConfig, Table, Weight, fields, names

FULL, SLIDING = "full_attention", "sliding_attention"  # types of layers


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of every decoder. `fields.DECODER` says where config.json has them, but for `num_heads`."""

    vocab: int  # V
    num_layers: int
    dim: int  # D
    num_heads: int  # N
    norm_eps: float = 1e-6
    tied: bool = False  # the head is the embedding


@dataclass(frozen=True, kw_only=True)
class AttentionSizes(Sizes):
    """Sizes of a decoder with grouped-query attention (`fields.ATTENTION`)."""

    num_kv_heads: int  # K
    head_dim: int  # H
    rope: Rope


@dataclass(frozen=True, kw_only=True)
class SectionSizes(AttentionSizes):
    """Sizes of a decoder whose heads have a section for time, one for rows and one for columns (M-RoPE)."""

    sections: tuple[int, ...]  # rotated pairs of a head that turn by time, row and column

    def __post_init__(self):
        self.mrope  # noqa: B018  # its sections are checked

    @property
    def mrope(self) -> ops.MRope:
        """The rotary embedding of all layers."""
        return ops.MRope(self.rope, self.sections, alternating=False)


@dataclass(frozen=True, kw_only=True)
class WindowSizes(AttentionSizes):
    """Sizes of a decoder some of whose layers have a sliding window."""

    period: ClassVar[int] = 1  # without `layer_types` every `period`-th layer is FULL, the others are SLIDING

    layer_types: tuple[str, ...] | None = None  # FULL or SLIDING for each layer; None: the usual ones
    window: int | None = None  # of the sliding layers

    def __post_init__(self):
        fields.check_layer_types(self)

    @property
    def types(self) -> tuple[str, ...]:
        """FULL or SLIDING for each layer."""
        return self.layer_types or every(self.period, self.num_layers, SLIDING, FULL)

    @property
    def masks(self) -> tuple[ops.Mask, ...]:
        """The mask of each layer."""
        return tuple(causal(self.window if kind == SLIDING else None) for kind in self.types)


@dataclass(frozen=True, kw_only=True)
class RotatedWindowSizes(WindowSizes):
    """Sizes of a decoder that rotates heads only in layers with a window; without a window, all layers are full and
    rotate.
    """

    @property
    def types(self) -> tuple[str, ...]:
        """FULL or SLIDING for each layer. Without `layer_types` every fourth is FULL, or all if there is no window."""
        return self.layer_types or every(1 if self.window is None else 4, self.num_layers, SLIDING, FULL)

    @property
    def kinds(self) -> tuple[tuple[ops.Mask, Rope | None], ...]:
        """The mask and the rope of each layer; in models with a window, full layers have no rope."""
        full = ops.Causal(), self.rope if self.window is None else None
        return tuple((causal(self.window), self.rope) if kind == SLIDING else full for kind in self.types)


@dataclass(frozen=True, kw_only=True)
class LatentSizes(Sizes):
    """Sizes of a decoder with DeepSeek's latent attention (`fields.MLA`)."""

    q_rank: int | None  # None: queries are projected directly, without a latent
    kv_rank: int
    nope_dim: int
    v_dim: int


@dataclass(frozen=True, kw_only=True)
class RotatedLatentSizes(LatentSizes):
    """Sizes of latent attention with RoPE, which rotates the part of a key that all heads share."""

    rope: Rope


@dataclass(frozen=True, kw_only=True)
class SparseSizes:
    """Sizes of experts (`fields.EXPERTS`)."""

    expert_dim: int
    num_experts: int
    top_k: int
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`


@dataclass(frozen=True, kw_only=True)
class MixedSizes(AttentionSizes, SparseSizes):
    """Sizes of a decoder of Qwen with experts in some layers, and an MLP in the others (`MIXED`)."""

    mlp_dim: int  # of layers without experts
    renormalize: bool = True  # the weights of a token's experts sum to one
    sparse_step: int = 1  # every `sparse_step`-th layer has experts, ...
    dense_layers: tuple[int, ...] = ()  # ... except these

    @property
    def sparse(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        every, dense = self.sparse_step, self.dense_layers
        return tuple((i + 1) % every == 0 and i not in dense and self.num_experts > 0 for i in range(self.num_layers))


@dataclass(frozen=True, kw_only=True)
class RouterSizes(SparseSizes):
    """Sizes of experts and of DeepSeek's router (`fields.DEEPSEEK_EXPERTS` and `fields.GROUPS`)."""

    num_groups: int = 1
    top_groups: int = 1
    renormalize: bool = True  # the weights of a token's experts sum to `routed_scale`
    routed_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertSizes(Sizes, RouterSizes):
    """Sizes of a decoder with DeepSeek's experts, in all layers but the first `num_dense`; every token uses the shared
    experts.
    """

    num_dense: int  # number of first layers with a plain MLP
    mlp_dim: int
    num_shared: int

    @property
    def dense(self) -> list[bool]:
        """Whether each layer has a plain MLP."""
        return [i < self.num_dense for i in range(self.num_layers)]


@dataclass(frozen=True, kw_only=True)
class DeltaSizes(Sizes):
    """Sizes of a decoder with gated DeltaNet (`fields.LINEAR_ATTENTION`)."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int = 4  # of the convolution over queries, keys and values


@dataclass(frozen=True, kw_only=True)
class KimiDeltaSizes(Sizes):
    """Sizes of a decoder with Kimi delta attention."""

    delta_heads: int
    delta_dim: int  # of a head
    conv_width: int = 4


@dataclass(frozen=True, kw_only=True)
class MambaSizes:
    """Sizes of Mamba-2 (`MAMBA`)."""

    mamba_heads: int
    mamba_groups: int = 1
    mamba_state: int
    mamba_bias: bool = False
    conv_width: int = 4
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)  # the smallest and the largest step


@dataclass(frozen=True, kw_only=True)
class StreamSizes:
    """Sizes of a residual of several streams (`nn.HyperConnection`, `STREAMS`)."""

    streams: int = 4
    sinkhorn_steps: int = 20
    stream_eps: float = 1e-6


@dataclass(frozen=True, kw_only=True)
class MTPSizes:
    """Numbers of multi-token prediction modules."""

    num_mtp: int = 0  # modules (`predict_ahead`) to build
    stored_mtp: int = field(default=0, compare=False)  # modules in the checkpoint; those not built are not read


def causal(window: int | None) -> ops.Mask:
    """Returns the causal mask, within the last `window` tokens (the token itself included) unless it is None."""
    return ops.Causal() if window is None else ops.Causal() & ops.SlidingWindow(window)


def mtp_table(cfg: Any, layer: Sequence[Weight]) -> Table:
    """Makes the table of a decoder with multi-token prediction modules, numbered as further layers."""
    modules = names.mtp_table(layer, first=cfg.num_layers, used=cfg.num_mtp, stored=cfg.stored_mtp, tied=cfg.tied)
    return [*names.decoder_table(layer), *modules]


def llama_table(cfg: Any) -> Table:
    """Makes the table of a decoder with Llama's names, whose layers may have biases and norms of heads."""
    return names.decoder_table([*names.NORMS, *names.ATTENTION, *names.MLP])


def mixtral_experts(moe: str) -> list[Weight]:
    """Lists the weights of experts with Mixtral's names: w1, w3 and w2 are gate, up and down, one tensor per expert.

    Args:
        moe: The file's name of the layer of experts.
    """
    return names.experts(f"{moe}.experts.{{e}}.{{}}", ("w1", "w3", "w2"))


def kimi_delta_attention(a_log: str, at: dict[str, int] | None = None) -> list[Weight]:
    """Lists the weights of Kimi delta attention; files have one convolution for each of queries, keys and values.

    Args:
        a_log: Pattern of the logarithms of rates, whose axes differ.
        at: Indices into axes that the pattern drops.
    """
    table = [
        Weight("self_attn.A_log", "delta.a_log", a_log, at or {}),
        Weight("self_attn.dt_bias", "delta.dt_bias"),
        Weight("self_attn.b_proj.weight", "delta.b.w"),
        Weight("self_attn.o_norm.weight", "delta.norm.scale"),
        Weight("self_attn.o_proj.weight", "delta.o.w", "D (N H) -> D N H"),
    ]
    for part in "qkv":
        table.append(Weight(f"self_attn.{part}_proj.weight", f"delta.{part}.w", "(N H) D -> N H D"))
        table.append(
            Weight(f"self_attn.{part}_conv1d.weight", f"delta.{part}_conv", "(N H) one W -> N H W", {"one": 0})
        )
    for hf_name, part in {"f": "f", "g": "gate"}.items():
        table.append(Weight(f"self_attn.{hf_name}_a_proj.weight", f"delta.{part}_down.w"))
        table.append(Weight(f"self_attn.{hf_name}_b_proj.weight", f"delta.{part}_up.w", "(N H) R -> N H R"))
    return table


def hyper_connection(hf_name: str, path: str) -> list[Weight]:
    """Lists the weights of a hyper-connection, or of the head that reads its streams."""
    parts = {"fn": "mix.w", "base": "bias", "scale": "scale"}
    return [Weight(f"{hf_name}_{name}", f"{path}.{part}") for name, part in parts.items()]


def delta_net_names(cfg: DeltaSizes) -> list[Weight]:
    """Lists the weights of gated DeltaNet with the names of Qwen3.5."""
    keys, values = (cfg.num_key_heads, cfg.key_dim), (cfg.num_value_heads, cfg.value_dim)
    return [
        *names.queries_keys_values("linear_attn.in_proj_qkv.weight", "delta.{}.w", "D", keys=keys, values=values),
        Weight("linear_attn.in_proj_z.weight", "delta.gate.w", "(N H) D -> N H D"),
        Weight("linear_attn.in_proj_b.weight", "delta.b.w"),
        Weight("linear_attn.in_proj_a.weight", "delta.a.w"),
        *names.queries_keys_values(*names.CONV1D, keys=keys, values=values),
        *names.LINEAR_ATTENTION,
    ]


# Fields of most decoders: those of `AttentionSizes` but the rope, and `mlp_dim`.
DECODER = (*fields.DECODER, fields.MLP, *fields.ATTENTION)


# Fields of `MixedSizes` besides those of experts and of attention.
MIXED = (
    Field("renormalize", "norm_topk_prob"),
    Field("sparse_step", "decoder_sparse_step"),
    Field("dense_layers", "mlp_only_layers"),
)

STREAMS = (
    Field("streams", "hc_mult"),
    Field("sinkhorn_steps", "hc_sinkhorn_iters"),
    Field("stream_eps", "hc_eps"),
)

# Mamba-2, in the names of Granite 4 and Falcon-H1, without the number of heads.
MAMBA = (
    Field("mamba_groups", "mamba_n_groups"),
    Field("mamba_state", "mamba_d_state"),
    Field("conv_width", "mamba_d_conv"),
    Field("conv_bias", "mamba_conv_bias"),
    Field("mamba_bias", "mamba_proj_bias"),
    fields.dt_limit(),
)


def mamba_heads(inner: Callable[[Any], int]) -> Computed:
    """Makes the entry for the number of heads of Mamba, which must agree with the width of a head.

    Args:
        inner: Function from the preceding fields to the width of all heads together.
    """

    def read(hf: HFConfig, c: Any) -> int:
        heads, width = hf.take("mamba_n_heads", 128), hf.take("mamba_d_head", "auto", kind=object)
        if inner(c) % heads or width not in ("auto", inner(c) // heads):
            raise ValueError(
                f"{hf.where('mamba_n_heads')} times mamba_d_head must be {inner(c)} (mamba_d_ssm, or mamba_expand times "
                f"hidden_size), got {heads} heads of {width}."
            )
        return heads

    return Computed("mamba_heads", read, lambda number, cfg: {"mamba_n_heads": number})


def by_interval(*types: str) -> Callable[[HFConfig, Any], tuple[str, ...]]:
    """Returns the reader of two types of layers: every `full_attention_interval`th is the second, others the first."""

    def read(hf: HFConfig, c: Any) -> tuple[str, ...]:
        if (period := hf.take("full_attention_interval", 4)) < 1:
            raise ValueError(f"{hf.where('full_attention_interval')} must be at least 1, got {period}.")
        return every(period, c.num_layers, *types)

    return read


def every(period: int, num_layers: int, usual: str, other: str) -> tuple[str, ...]:
    """Returns the type of each layer: every `period`th is `other`, all others are `usual`."""
    return tuple(usual if (i + 1) % period else other for i in range(num_layers))
