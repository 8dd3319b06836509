"""Sound settings of Gemma 4 (Google DeepMind 2026) in config.json; `_gemma4_conformer.py` has the encoders."""

from dataclasses import dataclass
from typing import Any, ClassVar

from maxlib.weights import Field, Fields, HFConfig, fields

IN = "audio_config."  # prefix of the fields of the encoder in config.json


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
        if (sees := text.vision) is not None and (sees.unified, sees.audio_token) != (self.unified, self.audio_token):
            raise ValueError(
                "vision and audio must be of one kind of model and have one audio_token (audio_token_id), got "
                f"{type(sees).__name__} with {sees.audio_token} and {type(self).__name__} with {self.audio_token}"
            )


@dataclass(frozen=True, kw_only=True)
class Audio(Sound):
    """Sizes of the encoder of E2B and E4B."""

    unified = False
    model_types = ("gemma4",)
    architecture = "Gemma4ForConditionalGeneration"
    fixed = {IN + "model_type": "gemma4_audio", IN + "hidden_act": "silu"}
    fixed_if_present = {IN + "attention_invalid_logits_value": (-1e9,)}  # a score that hides a key

    dim: int = hf(IN + "hidden_size", 1024)
    num_layers: int = hf(IN + "num_hidden_layers", 12)
    num_heads: int = hf(IN + "num_attention_heads", 8)
    filters: tuple[int, ...] = hf(IN + "subsampling_conv_channels", (128, 32))  # of both convolutions
    taps: int = hf(IN + "conv_kernel_size", 5)  # of the convolution in a layer
    residual_weight: float = hf(IN + "residual_weight", 0.5)  # of both MLPs of a layer
    chunk: int = hf(IN + "attention_chunk_size", 12)  # frames that are computed together
    context_left: int = hf(IN + "attention_context_left", 13)  # one more than the frames that a frame attends to
    context_right: int = hf(IN + "attention_context_right", 0)  # one more than the later ones; 0: none
    softcap: float = hf(IN + "attention_logit_cap", 50.0)
    clipped: bool = hf(IN + "use_clipped_linears", True)  # linear layers have stored bounds
    bound: float = hf(IN + "gradient_clipping", 1e10)  # of what goes into norms
    out_dim: int = hf(IN + "output_proj_dims", 1536)

    def __post_init__(self):
        super().__post_init__()
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
        """Numbers in a frame: mel bands, of which each convolution halves the number."""
        return self.filters[0]

    def num_tokens(self, lengths: Any) -> Any:
        """Returns the number of vectors of clips of so many frames, which two convolutions halve, rounding up."""
        return (lengths + 3) // 4


@dataclass(frozen=True, kw_only=True)
class UnifiedAudio(Sound):
    """Sizes of what the 12B model has in place of an encoder."""

    unified = True
    model_types = ("gemma4_unified",)
    architecture = "Gemma4UnifiedForConditionalGeneration"
    fixed = {IN + "model_type": "gemma4_unified_audio"}

    frame_dim: int = hf(IN + "audio_embed_dim", 640)  # samples of a token

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "UnifiedAudio":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        found = super().from_hf(fields)
        for name in ("audio_samples_per_token", "output_proj_dims", "hidden_size"):  # the same by other names
            fields.nested("audio_config").require(name, found.frame_dim)
        return found

    def num_tokens(self, lengths: Any) -> Any:
        """Returns the number of vectors of clips of so many frames: as many."""
        return lengths


def read_audio(hf: HFConfig) -> Audio | UnifiedAudio | None:
    """Reads the sound settings of a config; None if it says nothing."""
    hf.ignore("audio_ms_per_token")  # of processors
    if hf.take("audio_config", None, kind=dict) is not None:
        return (UnifiedAudio if hf.take("model_type") == "gemma4_unified" else Audio).from_hf(fields)
    hf.ignore("audio_token_id", *(f"{name}_token_{end}" for name in ("boa", "eoa") for end in ("id", "index")))
    return None


FIELDS = Fields(
    Sound,
    [
        Field("audio_token", "audio_token_id"),
        Field("begin_token", "boa_token_id"),
        Field("end_token", "eoa_token_index"),
        Field("norm_eps", IN + "rms_norm_eps"),
    ],
)


# TODO
#     @classmethod
#     def from_hf(cls, fields: HFConfig) -> Any:
#         """Reads config.json. Raises ValueError for values that the family does not support."""
#         found = super().from_hf(fields)
#         fields.require("eoa_token_id", found.end_token)  # another name in the releases
#         return found
