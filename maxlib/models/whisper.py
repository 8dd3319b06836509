"""Whisper (Radford et al. 2022, arXiv:2212.04356): an encoder of sound, and a decoder that writes its text.

The encoder reads 30 seconds of a log-mel spectrogram, 3000 frames; shorter sound is padded with silence before its
spectrogram is computed, as Hugging Face's processor does, and the padding is heard like the rest.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._layers import CrossPreNorm, PositionedDecoder, PreNorm
from maxlib.weights import Copy, Family, Field, Fields, Table, Weight, names


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of a Whisper; `PRESETS` has the published ones."""

    vocab: int
    num_layers: int  # of the decoder
    num_encoder_layers: int
    dim: int
    mlp_dim: int
    encoder_mlp_dim: int
    num_heads: int
    num_encoder_heads: int
    num_positions: int = 448  # of text
    num_vectors: int = 1500  # of the encoder, each of two frames
    num_bands: int = 80  # of the spectrogram


def _attention(cfg: Config, num_heads: int, mask: ops.Mask, rngs: nnx.Rngs) -> nn.Attention:
    H = cfg.dim // num_heads
    attn = nn.Attention(cfg.dim, num_heads=num_heads, head_dim=H, mask=mask, bias=True, out_bias=True, rngs=rngs)
    attn.k.b = None  # a bias of keys changes nothing: it adds the same number to all scores of a query
    return attn


class EncoderBlock(PreNorm):
    """Pre-norm layer with LayerNorm and biases, in which every vector attends to every other."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.attn_norm = nn.LayerNorm(cfg.dim)
        self.attn = _attention(cfg, cfg.num_encoder_heads, ops.Full(), rngs)
        self.mlp_norm = nn.LayerNorm(cfg.dim)
        self.mlp = nn.MLP(cfg.dim, cfg.encoder_mlp_dim, act=nn.vision.exact_gelu, rngs=rngs)


class DecoderBlock(CrossPreNorm):
    """Pre-norm layer of causal attention, attention to the sound, and the MLP."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, N = cfg.dim, cfg.num_heads
        self.attn_norm = nn.LayerNorm(D)
        self.attn = _attention(cfg, N, ops.Causal(), rngs)
        self.cross_norm = nn.LayerNorm(D)
        self.cross = nn.CrossAttention(D, num_heads=N, head_dim=D // N, bias=True, out_bias=True, rngs=rngs)
        self.cross.k.b = None
        self.mlp_norm = nn.LayerNorm(D)
        self.mlp = nn.MLP(D, cfg.mlp_dim, act=nn.vision.exact_gelu, rngs=rngs)


class AudioEncoder(nnx.Module):
    """Two convolutions over time, the second with a stride of two; then fixed positions, and layers."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        D, axes = cfg.dim, ("filter", "channel", "tap")
        # Three neighbouring frames, [B, S, 3, M] -> [B, S, D].
        self.conv1 = nn.Einsum("...tM,DMt->...D", (D, cfg.num_bands, 3), axes, bias=True, rngs=rngs)
        self.conv2 = nn.Einsum("...tM,DMt->...D", (D, D, 3), axes, bias=True, rngs=rngs)
        table = nn.SinusoidalPositions(D, last_included=True).vectors(jnp.arange(cfg.num_vectors))
        self.positions = nnx.Variable(table, axes=("position", "embed"))  # stored, but not trained
        self.encoder = nn.Encoder(
            nn.Stack(lambda _, rngs: EncoderBlock(cfg, rngs=rngs), cfg.num_encoder_layers, rngs=rngs),
            nn.LayerNorm(D),
        )

    def __call__(self, frames: Float[Array, "B F M"], *, dtype: Any, remat: nn.remat.Policy = None) -> nn.Encoded:
        """Returns a vector for every two frames of a spectrogram."""
        x = nn.vision.exact_gelu(self.conv1(_neighbours(jnp.asarray(frames, dtype), stride=1)))
        x = nn.vision.exact_gelu(self.conv2(_neighbours(x, stride=2)))
        return self.encoder(x + self.positions[...].astype(dtype)[None], remat=remat)


def _neighbours(x: Float[Array, "B F M"], *, stride: int) -> Float[Array, "B S 3 M"]:
    """Returns the frame before, at and after every `stride`-th frame; zeros before the first and after the last."""
    padded, last = jnp.pad(x, ((0, 0), (1, 1), (0, 0))), x.shape[1]
    return jnp.stack([padded[:, tap : tap + last : stride] for tap in range(3)], axis=2)


class Whisper(PositionedDecoder):
    """Whisper: `model(tokens, audio=clips)` hears one clip for each row of tokens.

    The `frames` of the clips, `B 1 F M` or `B F M`, are `input_features` of Hugging Face's processor with time before
    bands; `lengths` are not read. `encode(clips)` computes the encoder's output once; it may be passed as `audio`.
    Raises ValueError for text longer than its positions, see `nn.LearnedPositions`.
    """

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embed = nn.Embed(cfg.vocab, cfg.dim, rngs=rngs)
        self.positions = nn.LearnedPositions(cfg.num_positions, cfg.dim, rngs=rngs)
        self.tower = AudioEncoder(cfg, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: DecoderBlock(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.norm = nn.LayerNorm(cfg.dim)

    @property
    def inputs(self) -> dict[str, nn.Input]:
        """What the encoder hears, by its name in the call: `audio`."""
        return {"audio": nn.EncoderInput(self.encode, self._check_audio)}

    def encode(self, audio: nn.audio.Clips, *, dtype: Any = jnp.bfloat16, remat: nn.remat.Policy = None) -> nn.Encoded:
        """Returns the encoder's output for one clip in each row."""
        frames = jnp.asarray(audio.frames)
        return self.tower(frames.reshape(-1, *frames.shape[-2:]), dtype=dtype, remat=remat)

    def _check_audio(self, tokens: Int[Any, "B T"], audio: Any) -> None:
        if not isinstance(audio, nn.audio.Clips):
            raise TypeError(f"audio must be nn.audio.Clips, or an nn.Encoded, got {type(audio).__name__}")
        rows, (length, width) = (len(tokens),), (2 * self.cfg.num_vectors, self.cfg.num_bands)
        shape = np.shape(audio.frames)
        if shape not in ((*rows, length, width), (*rows, 1, length, width)):
            raise ValueError(
                f"audio must have one clip of {length} frames of {width} bands for each of the {len(tokens)} rows of tokens, "
                f"{(*rows, 1, length, width)}, got {shape}: pad sound to 30 seconds before its spectrogram is computed"
            )


FIELDS = Fields(
    Config,
    [
        Field("vocab", "vocab_size"),
        Field("num_layers", "decoder_layers"),
        Field("num_encoder_layers", "encoder_layers"),
        Field("dim", "d_model"),
        Field("mlp_dim", "decoder_ffn_dim"),
        Field("encoder_mlp_dim", "encoder_ffn_dim"),
        Field("num_heads", "decoder_attention_heads"),
        Field("num_encoder_heads", "encoder_attention_heads"),
        Field("num_positions", "max_target_positions"),
        Field("num_vectors", "max_source_positions"),
        Field("num_bands", "num_mel_bins"),
    ],
    model_types={"whisper": "WhisperForConditionalGeneration"},
    fixed={"is_encoder_decoder": True, "activation_function": "gelu", "scale_embedding": False},
    fixed_if_present={"tie_word_embeddings": True, "num_hidden_layers": lambda c: c.num_encoder_layers},
    ignored=(
        "use_weighted_layer_sum",
        "classifier_proj_size",
        "median_filter_width",
    ),  # of a classifier and time stamps
)


def _table(cfg: Config) -> Table:
    """Maps tensor names of Hugging Face to parameters."""
    encoder, decoder = "model.encoder", "model.decoder"
    sides = [("model.encoder.layers.{i}", "tower.encoder.layers.{i}"), ("model.decoder.layers.{i}", "layers.{i}")]
    table: list[Any] = []
    for layer, path in sides:
        table += [
            *names.attention(f"{layer}.self_attn.{{}}_proj", f"{path}.attn", out=f"{layer}.self_attn.out_proj"),
            *names.layer_norm(f"{layer}.self_attn_layer_norm", f"{path}.attn_norm"),
            *names.linear(f"{layer}.fc1", f"{path}.mlp.up"),
            *names.linear(f"{layer}.fc2", f"{path}.mlp.down"),
            *names.layer_norm(f"{layer}.final_layer_norm", f"{path}.mlp_norm"),
        ]
    layer, path = sides[1]
    return [
        *table,
        *names.attention(f"{layer}.encoder_attn.{{}}_proj", f"{path}.cross", out=f"{layer}.encoder_attn.out_proj"),
        *names.layer_norm(f"{layer}.encoder_attn_layer_norm", f"{path}.cross_norm"),
        *names.linear(f"{encoder}.conv1", "tower.conv1"),
        *names.linear(f"{encoder}.conv2", "tower.conv2"),
        Weight(f"{encoder}.embed_positions.weight", "tower.positions"),
        *names.layer_norm(f"{encoder}.layer_norm", "tower.encoder.norm"),
        Weight(f"{decoder}.embed_tokens.weight", "embed.w"),
        Weight(f"{decoder}.embed_positions.weight", "positions.w"),
        *names.layer_norm(f"{decoder}.layer_norm", "norm"),
        Copy("proj_out.weight", of=f"{decoder}.embed_tokens.weight"),
    ]


def _whisper(num_layers: int, dim: int, *, vocab: int = 51_865) -> Config:
    return Config(
        vocab=vocab,
        num_layers=num_layers,
        num_encoder_layers=num_layers,
        dim=dim,
        mlp_dim=4 * dim,
        encoder_mlp_dim=4 * dim,
        num_heads=dim // 64,
        num_encoder_heads=dim // 64,
    )


_LARGE_V3 = replace(_whisper(32, 1280, vocab=51_866), num_bands=128)
PRESETS = {
    "whisper-tiny": _whisper(4, 384),
    "whisper-base": _whisper(6, 512),
    "whisper-small": _whisper(12, 768),
    "whisper-medium": _whisper(24, 1024),
    "whisper-large-v2": _whisper(32, 1280),
    "whisper-large-v3": _LARGE_V3,
    "whisper-large-v3-turbo": replace(_LARGE_V3, num_layers=4),
}

FAMILY = Family("whisper", Whisper, FIELDS, _table, PRESETS)
