"""Sound settings of Gemma 4 (Google DeepMind 2026) in config.json; `_gemma4_conformer.py` has the encoders."""

from dataclasses import dataclass
from typing import Any, ClassVar

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
