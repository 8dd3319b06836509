"""Audio encoder of Qwen3-Omni (AuT, arXiv:2509.17765): convolutions over chunks of a second, and layers of attention
to windows of some seconds.

Shapes: R rows of C clips, F frames of M mel bands, n chunks of 100 frames, each of which becomes 13 vectors, T = 13 n
vectors, c channels, E width of the encoder, D width of the text model.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from maxlib import nn
from maxlib.nn.remat import Policy
from maxlib.nn.vision import EncoderBlock, exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Field, Fields, Table, Weight, fields, names

CHUNK, VECTORS = 100, 13  # frames of a chunk, and the vectors they become: halved three times, rounding up
EPS = 1e-5  # of norms


@dataclass(frozen=True, kw_only=True)
class Audio:
    """Sizes of the encoder, and the placeholder that stands for each of its vectors."""

    dim: int = 1280  # E
    num_layers: int = 32
    num_heads: int = 20
    mlp_dim: int = 5120
    num_bands: int = 128  # M
    channels: int = 480  # c
    window: int = 800  # frames that attend to each other
    positions_per_second: int = 13  # of videos, whose clock is that of the vectors of sound
    audio_token: int
    start_token: int
    end_token: int | None = None

    def __post_init__(self):
        if self.dim % (2 * self.num_heads):
            raise ValueError(
                f"num_heads (encoder_attention_heads) must divide dim (d_model) into even heads, got {self.num_heads} and "
                f"{self.dim}"
            )
        if self.window < CHUNK:
            raise ValueError(f"window (n_window_infer) must be at least {CHUNK} frames, got {self.window}")

    def num_tokens(self, lengths: Any) -> Any:
        """Returns the number of vectors of clips of so many frames."""
        rest = lengths % CHUNK
        for _ in range(3):
            rest = (rest + 1) // 2
        return lengths // CHUNK * VECTORS + rest


class Convolution(nnx.Module):
    """Convolution of 3 x 3 that halves the numbers of bands and frames, and a GELU."""

    def __init__(self, channels: int, filters: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal((9 * channels) ** -0.5)
        axes = ("filter", "channel", "patch_row", "patch_column")
        self.w = nnx.Param(init(rngs.params(), (filters, channels, 3, 3), jnp.float32), axes=axes)
        self.b = nnx.Param(jnp.zeros(filters), axes=("norm",))

    def __call__(self, x: Float[Array, "N M F channels"]) -> Float[Array, "N m f filters"]:
        w, b = jnp.asarray(self.w[...], x.dtype), jnp.asarray(self.b[...], x.dtype)
        order = ("NHWC", "OIHW", "NHWC")
        x = jax.lax.conv_general_dilated(x, w, (2, 2), ((1, 1), (1, 1)), dimension_numbers=order)
        return exact_gelu(x + b[None, None, None])


class AudioEncoder(nnx.Module):
    """Encoder of sound: three convolutions, fixed positions in each chunk, layers, and two projections.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Audio, text_dim: int, *, rngs: nnx.Rngs):
        E, c, bands = cfg.dim, cfg.channels, cfg.num_bands
        self.convs = nnx.List([Convolution(channels, c, rngs=rngs) for channels in (1, c, c)])
        for _ in self.convs:
            bands = (bands + 1) // 2
        self.enter = nn.Einsum("NmFc,Ecm->NFE", (E, c, bands), ("embed", "channel", "patch_row"), rngs=rngs)

        def block(_: Any, rngs: nnx.Rngs) -> EncoderBlock:
            return EncoderBlock(E, cfg.mlp_dim, num_heads=cfg.num_heads, act=exact_gelu, eps=EPS, rngs=rngs)

        self.layers = nn.Stack(block, cfg.num_layers, rngs=rngs)
        self.norm = nn.LayerNorm(E, eps=EPS)
        self.up = nn.Einsum("...E,FE->...F", (E, E), ("mlp", "vision"), bias=True, rngs=rngs)
        self.down = nn.Einsum("...F,DF->...D", (text_dim, E), ("embed", "mlp"), bias=True, rngs=rngs)
        self.cfg = cfg

    def __call__(
        self, audio: nn.audio.Clips, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "R C T D"]:
        """Returns 13 vectors for each 100 frames of a clip; those of padding are last.

        Args:
            audio: Log-mel frames of clips, in rows.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        R, C, F, M = audio.frames.shape
        lengths = jnp.asarray(audio.lengths).reshape(R * C)
        frames = jnp.asarray(audio.frames, dtype).reshape(R * C, F, M)
        frames = jnp.where((jnp.arange(F)[None] < lengths[:, None])[:, :, None], frames, 0)
        x = self._convolved(constrain(frames, "batch", "seq", None), lengths)
        # Each chunk counts from 0: [T] -> [T, E] -> [1, T, E]
        place = nn.SinusoidalPositions(self.cfg.dim, last_included=True).vectors(jnp.arange(x.shape[1]) % VECTORS)
        x = constrain(x + place[None].astype(dtype), "batch", "seq", "act_embed")
        # A window is a document of a packed row.
        index = jnp.arange(x.shape[1])[None]
        window = 1 + index // (self.cfg.window // CHUNK * VECTORS)
        segment_ids = jnp.where(index < self.cfg.num_tokens(lengths)[:, None], window, 0)
        ctx = nn.make_context(*x.shape[:2], segment_ids=segment_ids)
        x, _, _ = self.layers(x, ctx, remat=remat)
        x = self.down(exact_gelu(self.up(self.norm(x))))
        return x.reshape(R, C, *x.shape[1:])

    def _convolved(self, frames: Float[Array, "RC F M"], lengths: Array) -> Float[Array, "RC T E"]:
        """Returns the vectors of chunks, each of which is convolved by itself.

        Behind a clip of less than a chunk are zeros in every layer, as if it were alone; the last chunk of a longer
        clip is filled with zeros before the first layer only.
        """
        frames = jnp.pad(frames, ((0, 0), (0, -frames.shape[1] % CHUNK), (0, 0)))
        n = frames.shape[1] // CHUNK
        # [RC, n F, M] -> [RC n, M, F, 1]
        x = frames.reshape(-1, CHUNK, frames.shape[2]).swapaxes(1, 2)[..., None]
        real = jnp.repeat(lengths, n)
        is_short = real < CHUNK
        for conv in self.convs:
            x, real = conv(x), (real + 1) // 2
            x = jnp.where(_beyond(x, real) & is_short[:, None, None, None], 0, x)
        return self.enter(x).reshape(len(frames), n * VECTORS, -1)


def _beyond(x: Float[Array, "N M F c"], lengths: Array) -> Bool[Array, "N 1 F 1"]:
    """Returns True for frames behind the last one."""
    return (jnp.arange(x.shape[2])[None] >= lengths[:, None])[:, None, :, None]


FIELDS = Fields(
    Audio,
    [
        *fields.under(
            "audio_config",
            [
                Field("dim", "d_model"),
                Field("num_layers", "encoder_layers"),
                Field("num_heads", "encoder_attention_heads"),
                Field("mlp_dim", "encoder_ffn_dim"),
                Field("num_bands", "num_mel_bins"),
                Field("channels", "downsample_hidden_size"),
                Field("window", "n_window_infer"),
            ],
        ),
        Field("positions_per_second", "position_id_per_seconds"),
        Field("audio_token", "audio_token_id"),
        Field("start_token", "audio_start_token_id"),
        Field("end_token", "audio_end_token_id"),
    ],
    fixed={
        "audio_config.model_type": "qwen3_omni_moe_audio_encoder",
        "audio_config.activation_function": "gelu",
        "audio_config.n_window": CHUNK // 2,
        "audio_config.scale_embedding": False,
    },
    fixed_if_present={"audio_config.num_hidden_layers": lambda c: c.num_layers},
    # The length of a table of positions (a chunk uses 13), the number of chunks convolved at once, and dropout.
    ignored=[f"audio_config.{name}" for name in ("max_source_positions", "conv_chunksize", "activation_dropout")],
    absent={"positions_per_second": 25, "audio_token": 151_646, "start_token": 151_647},
)


def table(hf_prefix: str) -> Table:
    """Maps the tensor names of the releases to parameters."""
    layer = [
        *[entry for part in "qkv" for entry in names.heads(f"self_attn.{part}_proj", f"attn.{part}")],
        *names.heads_out("self_attn.out_proj", "attn.o"),
        *names.layer_norm("self_attn_layer_norm", "attn_norm"),
        *names.linear("fc1", "mlp.up"),
        *names.linear("fc2", "mlp.down"),
        *names.layer_norm("final_layer_norm", "mlp_norm"),
    ]
    outer = [
        *[entry for i in range(3) for entry in names.linear(f"conv2d{i + 1}", f"convs.{i}")],
        Weight("conv_out.weight", "enter.w", "E (c m) -> E c m"),
        *names.under(layer, "layers.{i}", "layers.{i}"),
        *names.layer_norm("ln_post", "norm"),
        *names.linear("proj1", "up"),
        *names.linear("proj2", "down"),
    ]
    return names.under(outer, hf_prefix, "audio_tower")
