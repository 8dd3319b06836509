"""Gemma 4's sound (Google DeepMind 2026): settings in config.json, and the encoders: a conformer (Gulati et al. 2020,
arXiv:2005.08100), or a norm and a matmul.

Shapes: C clips of a batch, F frames of M mel bands, T = F / 4 frames after the convolutions,
E width of the encoder, N heads of width H, D width of the text model. Attention is computed in chunks: n chunks of q
frames, each of which attends to k frames around it.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from maxlib import nn, ops
from maxlib.models._gemma4_vision import Clipped, Projector
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain
from maxlib.weights import Field, Fields, fields


@dataclass(frozen=True, kw_only=True)
class Sound:
    """What both kinds of encoder have: the tokens of a clip.

    Attributes:
        unified: True where samples are frames, False where frames are bands of a log-mel spectrogram.
    """

    unified: ClassVar[bool]
    audio_token: int = 258_881
    begin_token: int = 256_000
    end_token: int = 258_883
    norm_eps: float = 1e-6

    def check(self, text: Any) -> None:
        """Raises ValueError for a text model, a `gemma4.Config`, that these settings do not fit."""
        if text.pad_token is None:
            raise ValueError("pad_token (pad_token_id) must be given, as placeholders of sound take its vectors")
        if (vision_config := text.vision) is not None and (vision_config.unified, vision_config.audio_token) != (
            self.unified,
            self.audio_token,
        ):
            raise ValueError(
                "vision and audio must be of one kind of model and have one audio_token (audio_token_id), got "
                f"{type(vision_config).__name__} with {vision_config.audio_token} and {type(self).__name__} with {self.audio_token}"
            )


@dataclass(frozen=True, kw_only=True)
class Audio(Sound):
    """Sizes of the encoder of E2B and E4B."""

    unified = False

    dim: int = 1024
    num_layers: int = 12
    num_heads: int = 8
    filters: tuple[int, ...] = (128, 32)  # of both convolutions
    taps: int = 5  # of the convolution in a layer
    residual_weight: float = 0.5  # of both MLPs of a layer
    chunk: int = 12  # frames that are computed together
    context_left: int = 13  # one more than the frames that a frame attends to
    context_right: int = 0  # one more than the later ones; 0: none
    softcap: float = 50.0
    clipped: bool = True  # linear layers have stored bounds
    bound: float = 1e10  # of what goes into norms
    out_dim: int = 1536

    def __post_init__(self):
        if self.dim % 2 or self.dim % self.num_heads:
            got = f"{self.dim} and {self.num_heads}"
            raise ValueError(f"dim (hidden_size) must be even and a multiple of num_attention_heads, got {got}")
        if len(self.filters) != 2 or self.filters[0] % 4 or min(self.filters) < 1:
            raise ValueError(
                "filters (subsampling_conv_channels) must be two numbers, of which the first, also the number of mel bands, "
                f"is a multiple of 4; got {self.filters}"
            )
        if self.chunk < 1 or self.context_left < 2 or self.context_right < 0:
            got = f"{self.chunk}, {self.context_left} and {self.context_right}"
            raise ValueError(
                "attention_chunk_size must be at least 1, attention_context_left 2 and attention_context_right 0, got "
                + got
            )

    @property
    def frame_dim(self) -> int:
        """Numbers in a frame: its mel bands. Each convolution halves them."""
        return self.filters[0]

    def num_tokens(self, lengths: Any) -> Any:
        """Returns the number of vectors of clips of so many frames, which two convolutions halve, rounding up."""
        return (lengths + 3) // 4


@dataclass(frozen=True, kw_only=True)
class UnifiedAudio(Sound):
    """Sizes of what the 12B model has in place of an encoder."""

    unified = True

    frame_dim: int = 640  # samples of a token

    def num_tokens(self, lengths: Any) -> Any:
        """Returns the number of vectors of clips of so many frames: as many."""
        return lengths


_TOKENS = [
    Field("audio_token", "audio_token_id"),
    Field("begin_token", "boa_token_id"),
    Field("end_token", "eoa_token_index"),
]
AUDIO = Fields(
    Audio,
    [
        *_TOKENS,
        *fields.under(
            "audio_config",
            [
                Field("norm_eps", "rms_norm_eps"),
                Field("dim", "hidden_size"),
                Field("num_layers", "num_hidden_layers"),
                Field("num_heads", "num_attention_heads"),
                Field("filters", "subsampling_conv_channels"),
                Field("taps", "conv_kernel_size"),
                Field("residual_weight"),
                Field("chunk", "attention_chunk_size"),
                Field("context_left", "attention_context_left"),
                Field("context_right", "attention_context_right"),
                Field("softcap", "attention_logit_cap"),
                Field("clipped", "use_clipped_linears"),
                Field("bound", "gradient_clipping"),
                Field("out_dim", "output_proj_dims"),
            ],
        ),
    ],
    fixed={"audio_config.model_type": "gemma4_audio", "audio_config.hidden_act": "silu"},
    fixed_if_present={
        "audio_config.attention_invalid_logits_value": -1e9,  # a score that hides a key
        "eoa_token_id": lambda c: c.end_token,  # another name in the releases
    },
)
UNIFIED = Fields(
    UnifiedAudio,
    [
        *_TOKENS,
        *fields.under("audio_config", [Field("norm_eps", "rms_norm_eps"), Field("frame_dim", "audio_embed_dim")]),
    ],
    fixed={"audio_config.model_type": "gemma4_unified_audio"},
    fixed_if_present={
        "eoa_token_id": lambda c: c.end_token,
        # The width of a frame by other names.
        "audio_config.audio_samples_per_token": lambda c: c.frame_dim,
        "audio_config.output_proj_dims": lambda c: c.frame_dim,
        "audio_config.hidden_size": lambda c: c.frame_dim,
    },
)


KEY_SCALE = math.log2(1 + math.e)  # softplus(1) / softplus(0); queries have a learned number in place of the 1


def _linear(cfg: Audio, spec: str, shape: tuple[int, ...], axes: tuple[str, ...], rngs: nnx.Rngs) -> Any:
    """Returns a layer without a bias, with bounds if the model stores them."""
    linear = nn.Einsum(spec, shape, axes, rngs=rngs)
    return Clipped(linear) if cfg.clipped else linear


def _bounded(x: Float[Array, "..."], bound: float) -> Float[Array, "..."]:
    """Clips `x` to a bound, or to the largest number of its dtype."""
    limit = min(bound, float(jnp.finfo(x.dtype).max))
    return jnp.clip(x, -limit, limit)


class FeedForward(nnx.Module):
    """Computes `x + 0.5 * norm(mlp(norm(x)))`, with an MLP four times as wide."""

    def __init__(self, cfg: Audio, *, rngs: nnx.Rngs):
        E, F = cfg.dim, 4 * cfg.dim
        self.bound, self.weight = cfg.bound, cfg.residual_weight
        self.norm, self.post_norm = nn.RMSNorm(E), nn.RMSNorm(E)  # eps 1e-6, whatever the config says
        self.up = _linear(cfg, "...D,FD->...F", (F, E), ("mlp", "embed"), rngs)
        self.down = _linear(cfg, "...F,DF->...D", (E, F), ("embed", "mlp"), rngs)

    def __call__(self, x: Float[Array, "C T E"]) -> Float[Array, "C T E"]:
        h = constrain(self.up(self.norm(_bounded(x, self.bound))), "batch", "seq", "act_mlp")
        h = self.post_norm(_bounded(self.down(jax.nn.silu(h)), self.bound))
        return x + h * self.weight


class Convolution(nnx.Module):
    """Gated linear unit, then a filter over the last few frames of each channel, a norm and a projection."""

    def __init__(self, cfg: Audio, *, rngs: nnx.Rngs):
        E = cfg.dim
        self.bound = cfg.bound
        self.norm, self.filter_norm = (nn.RMSNorm(E, eps=cfg.norm_eps) for _ in range(2))
        self.enter = _linear(cfg, "...D,FD->...F", (2 * E, E), ("mlp", "embed"), rngs)  # values, then gates
        init = nnx.initializers.normal(cfg.taps**-0.5)
        self.filter = nnx.Param(init(rngs.params(), (E, cfg.taps), jnp.float32), axes=("mlp", "tap"))
        self.leave = _linear(cfg, "...F,DF->...D", (E, E), ("embed", "mlp"), rngs)

    def __call__(self, x: Float[Array, "C T E"]) -> Float[Array, "C T E"]:
        value, gate = jnp.split(self.enter(self.norm(x)), 2, axis=-1)
        h, _ = ops.short_convolution(value * jax.nn.sigmoid(gate), self.filter[...])
        return x + self.leave(jax.nn.silu(self.filter_norm(_bounded(h, self.bound))))


class LocalAttention(nnx.Module):
    """Attention to the last few frames, with learned keys for distances (Dai et al. 2019, arXiv:1901.02860)."""

    def __init__(self, cfg: Audio, *, rngs: nnx.Rngs):
        E, N = cfg.dim, cfg.num_heads
        H, self.cfg = E // N, cfg
        heads = "...D,NHD->...NH", (N, H, E), ("heads", "head_dim", "embed")
        self.q, self.k, self.v = (_linear(cfg, *heads, rngs) for _ in range(3))
        self.distance = nn.Einsum(*heads, rngs=rngs)
        self.scale = nnx.Param(jnp.zeros(H), axes=("head_dim",))
        self.o = _linear(cfg, "...NH,DNH->...D", (E, N, H), ("embed", "heads", "head_dim"), rngs)

    def __call__(self, x: Float[Array, "C T E"], valid: Bool[Array, "C T"]) -> Float[Array, "C T E"]:
        wide = jnp.promote_types(x.dtype, jnp.float32)
        q, k, v = (constrain(part(x), "batch", "seq", "act_heads", None) for part in (self.q, self.k, self.v))
        H = q.shape[-1]
        scale = H**-0.5 / math.log(2) * jax.nn.softplus(jnp.asarray(self.scale[...], wide))
        q = _in_chunks(q.astype(wide) * scale[None, None, None], self.cfg.chunk)
        k, v = (_around(part.astype(wide), self.cfg) for part in (k * jnp.asarray(KEY_SCALE, wide), v))
        scores = jnp.einsum("CnqNH,CnkNH->CNnqk", q, k)
        scores = scores + jnp.einsum("CnqNH,qkNH->CNnqk", q, self._distances(x.dtype, wide))
        weights = self._weights(scores, _around(valid, self.cfg))
        # [C, N, n, q, k] -> [C, n, q, N, H] -> [C, T, N, H]
        out = jnp.einsum("CNnqk,CnkNH->CnqNH", weights, v)
        return self.o(out.reshape(len(x), -1, *out.shape[3:])[:, : x.shape[1]].astype(x.dtype))

    def _distances(self, dtype: Any, wide: Any) -> Float[Array, "q k N H"]:
        """Returns the key of the distance between each frame of a chunk and each frame around it."""
        places, index = _distances(self.cfg)
        keys = self.distance(jnp.asarray(places, dtype))  # [P, E] -> [P, N, H]
        # A row of zeros behind them is for frames without a distance.
        return jnp.pad(keys.astype(wide), ((0, 1), (0, 0), (0, 0)))[index]

    def _weights(self, scores: Float[Array, "C N n q k"], valid: Bool[Array, "C n k"]) -> Float[Array, "C N n q k"]:
        """Returns the softmax of capped scores over the frames that a frame attends to."""
        cap, seen = self.cfg.softcap, jnp.asarray(_window(self.cfg))[None, None] & valid[:, :, None]
        return jax.nn.softmax(jnp.where(seen[:, None], cap * jnp.tanh(scores / cap), -1e9), axis=-1)


def _in_chunks(x: Float[Array, "C T *rest"], size: int) -> Float[Array, "C n q *rest"]:
    """Splits frames into chunks; the last one is padded."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size), *[(0, 0)] * (x.ndim - 2)))
    return x.reshape(len(x), -1, size, *x.shape[2:])


def _around(x: Array, cfg: Audio) -> Array:
    """Returns the frames around each chunk, `C T ... -> C n k ...`; zeros before the first frame and after the last."""
    count, before, k = -(-x.shape[1] // cfg.chunk), cfg.context_left - 1, _size(cfg)
    after = count * cfg.chunk - x.shape[1] + cfg.context_right
    x = jnp.pad(x, ((0, 0), (before, after), *[(0, 0)] * (x.ndim - 2)))
    return x[:, np.arange(count)[:, None] * cfg.chunk + np.arange(k)[None]]


def _size(cfg: Audio) -> int:
    """Returns the number of frames around a chunk."""
    return cfg.chunk + cfg.context_left - 1 + cfg.context_right


def _steps(cfg: Audio) -> Int[np.ndarray, "q k"]:
    """Returns by how much a frame of a chunk comes after each of the frames around it."""
    return np.arange(cfg.chunk)[:, None] + cfg.context_left - 1 - np.arange(_size(cfg))[None]


def _window(cfg: Audio) -> Bool[np.ndarray, "q k"]:
    """Returns True where a frame of a chunk attends to a frame around it."""
    steps = _steps(cfg)
    return (steps > -max(cfg.context_right, 1)) & (steps < cfg.context_left - 1)


def _distances(cfg: Audio) -> tuple[Float[np.ndarray, "P E"], Int[np.ndarray, "q k"]]:
    """Returns sines and cosines of distances in falling order, and which of them a frame has to each frame around it.

    There are distances for half of the frames around a chunk. The largest one belongs to the first of the frames, which
    is `context_left - 1` before the chunk's: with the usual sizes both are 12. Frames beyond them have none.
    """
    most = _size(cfg) // 2
    rates = np.exp(-np.arange(cfg.dim // 2) * math.log(10_000) / max(cfg.dim // 2 - 1, 1))
    angles = np.arange(most, -1, -1)[:, None] * rates[None]
    index = cfg.context_left - 1 - _steps(cfg)
    index = np.where((index >= 0) & (index <= most), index, most + 1)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1), index


class Block(nnx.Module):
    """Half an MLP, attention, a convolution, half an MLP, and a norm."""

    def __init__(self, cfg: Audio, *, rngs: nnx.Rngs):
        self.bound = cfg.bound
        self.first_mlp, self.second_mlp = (FeedForward(cfg, rngs=rngs) for _ in range(2))
        self.attn_norm, self.attn_post_norm, self.norm = (nn.RMSNorm(cfg.dim) for _ in range(3))
        self.attn, self.conv = LocalAttention(cfg, rngs=rngs), Convolution(cfg, rngs=rngs)

    def __call__(self, x: Float[Array, "C T E"], ctx: nn.Context, cache: None = None):
        assert ctx.valid is not None
        x = self.first_mlp(x)
        h = self.attn(self.attn_norm(_bounded(x, self.bound)), ctx.valid)
        x = self.conv(x + self.attn_post_norm(_bounded(h, self.bound)))
        x = self.norm(_bounded(self.second_mlp(x), self.bound))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


class Subsampling(nnx.Module):
    """Convolution that halves the numbers of frames and bands, then a norm and a ReLU."""

    def __init__(self, channels: int, filters: int, *, eps: float, rngs: nnx.Rngs):
        init = nnx.initializers.normal((9 * channels) ** -0.5)
        axes = ("filter", "channel", "patch_row", "patch_column")
        self.w = nnx.Param(init(rngs.params(), (filters, channels, 3, 3), jnp.float32), axes=axes)
        self.norm = nn.LayerNorm(filters, eps=eps, bias=False)

    def __call__(
        self, x: Float[Array, "C F M channels"], lengths: Int[Array, " C"]
    ) -> tuple[Float[Array, "C F/2 M/2 filters"], Int[Array, " C"]]:
        """Returns the result, and the clips' numbers of frames."""
        # Padding is zero, as before the first frame.
        x = x * (jnp.arange(x.shape[1])[None] < lengths[:, None])[:, :, None, None].astype(x.dtype)
        w, order = jnp.asarray(self.w[...], x.dtype), ("NHWC", "OIHW", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)), dimension_numbers=order)
        return jax.nn.relu(self.norm(x)), (lengths + 1) // 2


class Tower(nnx.Module):
    """Encoder of sound: two convolutions, layers of attention and convolutions, and projections.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Audio, text_dim: int, *, rngs: nnx.Rngs):
        self.cfg, (first, second) = cfg, cfg.filters
        self.first = Subsampling(1, first, eps=cfg.norm_eps, rngs=rngs)
        self.second = Subsampling(first, second, eps=cfg.norm_eps, rngs=rngs)
        shape, axes = (cfg.dim, first // 4, second), ("embed", "patch_column", "channel")
        self.enter = nn.Einsum("...mc,Emc->...E", shape, axes, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.leave = nn.Einsum("...D,ED->...E", (cfg.out_dim, cfg.dim), ("vision", "embed"), bias=True, rngs=rngs)
        self.projector = Projector(cfg.out_dim, text_dim, eps=cfg.norm_eps, rngs=rngs)

    def __call__(
        self, audio: nn.audio.Clips, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "R clips T D"]:
        """Returns a vector for each four frames of a clip.

        Args:
            audio: Log-mel frames of clips, in rows.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        R, C, F, M = audio.frames.shape
        x = constrain(jnp.asarray(audio.frames, dtype).reshape(R * C, F, M, 1), "batch", "seq", None, None)
        x, lengths = self.first(x, jnp.asarray(audio.lengths).reshape(R * C))
        x, lengths = self.second(x, lengths)
        x = constrain(self.enter(x), "batch", "seq", "act_embed")
        ctx = nn.make_context(*x.shape[:2], valid=jnp.arange(x.shape[1])[None] < lengths[:, None])
        x, _, _ = self.layers(x, ctx, remat=remat)
        x = self.projector(self.leave(x))
        return x.reshape(R, C, *x.shape[1:])


class FrameProjector(nnx.Module):
    """A norm and a matmul in place of an encoder: a vector for each 640 samples.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: UnifiedAudio, text_dim: int, *, rngs: nnx.Rngs):
        self.projector = Projector(cfg.frame_dim, text_dim, eps=cfg.norm_eps, rngs=rngs)

    def __call__(
        self, audio: nn.audio.Clips, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "R clips F D"]:
        """Returns a vector for each frame.

        Args:
            audio: Samples of clips, in rows.
            dtype: The dtype of the computation.
            remat: Not used: there is one layer.
        """
        return self.projector(jnp.asarray(audio.frames, dtype))


def audio_tower(cfg: Audio | UnifiedAudio | None, text_dim: int, *, rngs: nnx.Rngs) -> Tower | FrameProjector | None:
    """Builds the encoder of sound, which outputs vectors of the text's width; None for a model that does not hear."""
    if cfg is None:
        return None
    make: Any = FrameProjector if isinstance(cfg, UnifiedAudio) else Tower
    return make(cfg, text_dim, rngs=rngs)
