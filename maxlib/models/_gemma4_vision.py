"""Image settings of Gemma 4 (Google DeepMind 2026) in config.json; `_gemma4_towers.py` has the encoders."""

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import numpy as np
from jaxtyping import Float

from maxlib import ops
from maxlib.weights import Field, Fields, fields


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

    dim: int = 768
    mlp_dim: int = 3072
    num_layers: int = 16
    num_heads: int = 12
    num_kv_heads: int = 12
    head_dim: int = 64
    rope_theta: float = 100.0
    num_positions: int = 10_240
    clipped: bool = False  # linear layers have stored bounds
    standardize: bool = False  # means are moved and scaled by stored numbers

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

    dim: int = 3840
    num_positions: int = 1120


_IMAGES = [
    Field("image_token", "image_token_id"),
    Field("video_token", "video_token_id"),
    Field("audio_token", "audio_token_id"),
    Field("begin_token", "boi_token_id"),
    Field("end_token", "eoi_token_id"),
    *fields.under(
        "vision_config",
        [
            Field("patch_size"),
            Field("pool", "pooling_kernel_size"),
            Field("norm_eps", "rms_norm_eps"),
        ],
    ),
]
VISION = Fields(
    Vision,
    [
        *_IMAGES,
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                Field("mlp_dim", "intermediate_size"),
                Field("num_layers", "num_hidden_layers"),
                *fields.ATTENTION,
                Field("num_positions", "position_embedding_size"),
                Field("clipped", "use_clipped_linears"),
                Field("standardize"),
            ],
        ),
        fields.axial_theta(100.0, "default"),  # the second as first released
    ],
    fixed={
        "vision_config.model_type": "gemma4_vision",
        "vision_config.hidden_activation": "gelu_pytorch_tanh",
    },
    ignored=[  # of processors, or read by nobody
        "vision_config.default_output_length",
        "vision_config.max_position_embeddings",
        "vision_config.global_head_dim",
    ],
)
UNIFIED = Fields(
    UnifiedVision,
    [
        *_IMAGES,
        *fields.under("vision_config", [Field("dim", "mm_embed_dim"), Field("num_positions", "mm_posemb_size")]),
    ],
    fixed={
        "vision_config.model_type": "gemma4_unified_vision",
        "vision_config.output_proj_dims": lambda c: c.dim,
    },
    fixed_if_present={"vision_config.model_patch_size": lambda c: c.patch_size * c.pool},
    ignored=["vision_config.num_soft_tokens"],  # of the processor
)
