"""Image settings of Gemma 4 (Google DeepMind 2026) in config.json; `_gemma4_towers.py` has the encoders."""

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Float

from maxlib import ops
from maxlib.weights import Field, Fields, HFConfig, fields

IN = "vision_config."  # prefix of the fields of the encoder in config.json


@dataclass(frozen=True, kw_only=True)
class Images:
    """What both kinds of encoder have: the tokens that stand for vectors, and how an image is cut.

    Attributes:
        unified: True where the processor joins `pool` x `pool` patches, False where the encoder takes their mean.
    """

    unified: ClassVar[bool]
    image_token: int = 258_880
    video_token: int = 258_884
    audio_token: int = 258_881  # refused by models that only see
    begin_token: int = 255_999
    end_token: int = 258_882
    patch_size: int = 16
    pool: int = 3
    norm_eps: float = 1e-6
    num_positions: int  # of columns, and of rows

    def __post_init__(self):
        if self.patch_size < 1 or self.pool < 1:
            got = f"{self.patch_size} and {self.pool}"
            raise ValueError(f"patch_size and pool (pooling_kernel_size) must be at least 1, got {got}")

    def check(self, text: Any) -> None:
        """Raises ValueError for a text model, a `gemma4.Config`, that these settings do not fit."""
        if text.pad_token is None:
            raise ValueError("pad_token (pad_token_id) must be given, as placeholders of images take its vectors")
        if self.unified and (text.sparse or text.per_layer_dim):
            raise ValueError(
                "a unified model must have no experts (enable_moe_block) and no hidden_size_per_layer_input, got "
                f"{text.sparse} and {text.per_layer_dim}"
            )

    def check_size(self, images: Any) -> None:
        """Raises ValueError for images with more rows or columns than there are positions; not known inside jit."""
        with contextlib.suppress(jax.errors.TracerArrayConversionError):
            side = 0 if images is None else np.asarray(images.grids)[..., 1:].max(initial=0)
            if side > self.num_positions:
                raise ValueError(
                    f"an image must have at most {self.num_positions} rows and columns of patches, for which there are learned "
                    f"positions, got {side}"
                )

    @property
    def patch_side(self) -> int:
        """Pixels along a side of a patch as the encoder gets it."""
        return self.patch_size * (self.pool if self.unified else 1)

    @property
    def merge(self) -> int:
        """Patches along a side of the squares that become one vector."""
        return 1 if self.unified else self.pool

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return 3 * self.patch_side**2

    def cut(self, image: Float[np.ndarray, "3 height width"]) -> tuple[np.ndarray, np.ndarray]:
        """Cuts an image into patches, square after square.

        Args:
            image: RGB from 0 to 1, whose sides are multiples of `patch_side * merge`.

        Returns:
            Patches, `n patch_dim`, and their grid of 1 frame, rows and columns, `1 3`.

        Raises:
            ValueError: when the sides are not such multiples.
        """
        p, m, (_, height, width) = self.patch_side, self.merge, image.shape
        if height % (p * m) or width % (p * m):
            raise ValueError(f"the sides of an image must be multiples of {p * m}, got {height} x {width}: resize it")
        # [C, y, m, a, x, m, b] -> [y, x, m, m, a, b, C]
        squares = image.reshape(3, height // (p * m), m, p, width // (p * m), m, p).transpose(1, 4, 2, 5, 3, 6, 0)
        return squares.reshape(-1, self.patch_dim), np.array([[1, height // p, width // p]], np.int32)


@dataclass(frozen=True, kw_only=True)
class Vision(Images):
    """Sizes of the encoder of E2B, E4B, 26B-A4B and 31B."""

    unified = False
    model_types = ("gemma4",)
    architecture = "Gemma4ForConditionalGeneration"
    fixed = {IN + "model_type": "gemma4_vision", IN + "hidden_activation": "gelu_pytorch_tanh"}
    fixed_if_present = {IN + "attention_bias": (False, None)}
    # Of processors, or read by nobody.
    ignored = tuple(IN + name for name in ("default_output_length", "max_position_embeddings", "global_head_dim"))

    dim: int = hf(IN + "hidden_size", 768)
    mlp_dim: int = hf(IN + "intermediate_size", 3072)
    num_layers: int = hf(IN + "num_hidden_layers", 16)
    num_heads: int = hf(IN + "num_attention_heads", 12)
    num_kv_heads: int = hf(IN + "num_key_value_heads", 12)
    head_dim: int = hf(IN + "head_dim", 64)
    rope_theta: float = hf_fields(_read_theta, _write_theta, default=100.0)
    num_positions: int = hf(IN + "position_embedding_size", 10_240)
    clipped: bool = hf(IN + "use_clipped_linears", False)  # linear layers have stored bounds
    standardize: bool = hf(IN + "standardize", False)  # means are moved and scaled by stored numbers

    def __post_init__(self):
        super().__post_init__()
        if self.head_dim % 4:
            raise ValueError(f"head_dim must be a multiple of 4, pairs by column and by row, got {self.head_dim}")

    @property
    def rope(self) -> ops.AxialRope:
        """The rotary embedding, by column and row."""
        return ops.AxialRope(self.head_dim, self.rope_theta)


@dataclass(frozen=True, kw_only=True)
class UnifiedVision(Images):
    """Sizes of what the 12B model has in place of an encoder."""

    unified = True
    model_types = ("gemma4_unified",)
    architecture = "Gemma4UnifiedForConditionalGeneration"
    fixed = {IN + "model_type": "gemma4_unified_vision"}
    ignored = (IN + "num_soft_tokens",)  # of the processor

    dim: int = hf(IN + "mm_embed_dim", 3840, same=(IN + "output_proj_dims",))
    num_positions: int = hf(IN + "mm_posemb_size", 1120)

    @classmethod
    def from_hf(cls, fields: HFConfig) -> "UnifiedVision":
        """Reads config.json. Raises ValueError for values that the family does not support."""
        found = super().from_hf(fields)
        fields.nested("vision_config").require("model_patch_size", found.patch_side)
        return found


def _read_theta(hf: HFConfig, c: Any) -> float:
    vision = hf.nested("vision_config")
    if not vision.take("rope_parameters", None, kind=dict):
        return 100.0
    rope = vision.nested("rope_parameters")
    rope.require("rope_type", "axial", "default")  # as first released
    return rope.take("rope_theta", 100.0)


def _write_theta(theta: float, cfg: Any) -> dict[str, Any]:
    return {IN + "rope_parameters": {"rope_type": "axial", "rope_theta": theta}}


def read_vision(hf: HFConfig) -> Vision | UnifiedVision | None:
    """Reads the image settings of a config; None if it says nothing."""
    hf.ignore("vision_soft_tokens_per_image")  # of processors
    if hf.take("vision_config", None, kind=dict) is not None:
        return (UnifiedVision if hf.take("model_type") == "gemma4_unified" else Vision).from_hf(fields)
    hf.ignore(*(f"{name}_token_id" for name in ("image", "video", "boi", "eoi")))
    return None


FIELDS = Fields(
    Images,
    [
        Field("image_token", "image_token_id"),
        Field("video_token", "video_token_id"),
        Field("audio_token", "audio_token_id"),
        Field("begin_token", "boi_token_id"),
        Field("end_token", "eoi_token_id"),
        Field("patch_size", IN + "patch_size"),
        Field("pool", IN + "pooling_kernel_size"),
        Field("norm_eps", IN + "rms_norm_eps"),
    ],
)
