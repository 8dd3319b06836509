"""Gemma 4's images (Google DeepMind 2026): settings in config.json, and the encoders: patches that attend to their
image and are pooled, or a few norms in place of an encoder.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text
model, H width of a head; a patch has a rows and b columns of pixels, each of C colors.
"""

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.models._layers import PreNorm
from maxlib.models._vision import IMAGE, PatchEncoder
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain
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


class Clipped(nnx.Module):
    """Linear layer with clipped inputs and outputs: `clip(linear(clip(x)))`.

    The bounds are stored, but not trained.

    Args:
        linear: The layer.
    """

    def __init__(self, linear: nn.Einsum):
        self.linear = linear
        self.input_min, self.input_max = _stored(-jnp.inf), _stored(jnp.inf)
        self.output_min, self.output_max = _stored(-jnp.inf), _stored(jnp.inf)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the projection of `x`, in the dtype of `x`."""
        y = self.linear(_clip(x, self.input_min, self.input_max))
        return _clip(y, self.output_min, self.output_max)


def _stored(bound: float) -> nnx.Variable:
    return nnx.Variable(jnp.asarray(bound, jnp.float32), axes=())


def _clip(x: Float[Array, "..."], low: nnx.Variable, high: nnx.Variable) -> Float[Array, "..."]:
    return jnp.clip(x, jnp.asarray(low[...], x.dtype), jnp.asarray(high[...], x.dtype))


class AxialNorm(nn.RMSNorm):
    """RMS norm of heads, whose quarters it then puts where `ops.AxialRope` pairs them.

    Gemma's heads rotate by column in their first half and by row in their second, each in pairs of its two quarters:
    `[x, x', y, y']`. `AxialRope` pairs the halves of a head, `[x, y, x', y']`. Scores do not depend on an order that
    queries and keys share.
    """

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        """Normalizes and reorders the last axis, in the dtype of `x`."""
        x = super().__call__(x)
        # [..., H] -> [..., axis, half, H / 4] -> [..., half, axis, H / 4]
        return x.reshape(*x.shape[:-1], 2, 2, -1).swapaxes(-3, -2).reshape(x.shape)


class Block(PreNorm):
    """Layer with norms before and behind each branch, in which a patch attends to all of its image."""

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm = (
            nn.RMSNorm(cfg.dim, eps=cfg.norm_eps) for _ in range(4)
        )
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            num_kv_heads=cfg.num_kv_heads,
            head_dim=cfg.head_dim,
            scale=1.0,
            q_norm=AxialNorm(cfg.head_dim, eps=cfg.norm_eps),
            k_norm=AxialNorm(cfg.head_dim, eps=cfg.norm_eps),
            v_norm=nn.norm.UnitRMSNorm(cfg.norm_eps),
            mask=IMAGE,
            rope=cfg.rope,
            rngs=rngs,
        )
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, act=jax.nn.gelu, rngs=rngs)
        for parent, parts in ((self.attn, "qkvo"), (self.mlp, ("gate", "up", "down"))):
            for part in parts if cfg.clipped else ():
                setattr(parent, part, Clipped(getattr(parent, part)))


class Positions(nnx.Module):
    """Learned positions: the sum of a vector for the column and one for the row.

    Args:
        length: Number of columns, and of rows.
        dim: Width E of a vector.
        rngs: Source of initial values.
    """

    def __init__(self, length: int, dim: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal((2 * dim) ** -0.5)
        self.columns, self.rows = (
            nnx.Param(init(rngs.params(), (length, dim), jnp.float32), axes=("position", "embed")) for _ in range(2)
        )

    def __call__(self, column: Int[Array, "R P"], row: Int[Array, "R P"]) -> Float[Array, "R P E"]:
        """Returns the position of each patch."""
        # In float32, as the gradient of a row is a sum over patches.
        tables = (table[...].astype(jnp.float32) for table in (self.columns, self.rows))
        columns, rows = (constrain(table, "position", None) for table in tables)
        return jnp.take(columns, column, axis=0) + jnp.take(rows, row, axis=0)


class Projector(nnx.Module):
    """Norm without a weight, then a matmul to the width of the text.

    Args:
        dim: Width E of the encoder's output.
        text_dim: Width D of the text model.
        eps: Added to the mean square.
        rngs: Source of initial values.
    """

    def __init__(self, dim: int, text_dim: int, *, eps: float, rngs: nnx.Rngs):
        self.norm = nn.norm.UnitRMSNorm(eps)
        self.proj = nn.Einsum("...E,DE->...D", (text_dim, dim), ("embed", "vision"), rngs=rngs)

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... D"]:
        return self.proj(self.norm(x))


def _patches(cfg: Vision | UnifiedVision, *, bias: bool, rngs: nnx.Rngs) -> nn.Einsum:
    """Returns the layer that makes a vector of each patch."""
    shape, axes = (cfg.dim, cfg.patch_side, cfg.patch_side, 3), ("embed", "patch_row", "patch_column", "channel")
    return nn.Einsum("...abC,EabC->...E", shape, axes, bias=bias, rngs=rngs)


class Tower(PatchEncoder):
    """Image encoder: patches rotate by column and row, and attend to all of their image; squares become their mean.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        self.cfg, self.shape = cfg, (cfg.patch_side, cfg.patch_side, 3)
        self.patches = _patches(cfg, bias=False, rngs=rngs)
        self.positions = Positions(cfg.num_positions, cfg.dim, rngs=rngs)
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        # Stored, but not trained.
        self.bias = nnx.Variable(jnp.zeros(cfg.dim), axes=("norm",)) if cfg.standardize else None
        self.scale = nnx.Variable(jnp.ones(cfg.dim), axes=("norm",)) if cfg.standardize else None
        self.projector = Projector(cfg.dim, text_dim, eps=cfg.norm_eps, rngs=rngs)

    def run_layers(self, images: nn.vision.Patches, dtype: Any, **options: Any) -> tuple[Float[Array, "R P E"], Any]:
        """Returns what the layers make of each patch of pixels from 0 to 1, see `PatchEncoder`."""
        pixels = 2 * jnp.asarray(images.pixels) - 1  # from -1 to 1
        return super().run_layers(nn.vision.Patches(pixels, images.grids), dtype, **options)

    def axes(self, at: nn.vision.PatchPositions) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
        """Returns the positions by which heads turn: columns first."""
        return at.column, at.row

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns `x` with its positions added."""
        return x + self.positions(at.column, at.row).astype(x.dtype)

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns the vectors of squares."""
        return self.projector(self._pool(x))

    def _pool(self, x: Float[Array, "R P E"]) -> Float[Array, "R S E"]:
        """Returns sqrt(E) times the mean of each square, standardized; in float32, as it is large."""
        R, E = len(x), x.shape[2]
        wide = jnp.promote_types(x.dtype, jnp.float32)
        # The patches of a square are adjacent: [R, P, E] -> [R, S, m^2, E] -> [R, S, E]
        pooled = E**0.5 * x.astype(wide).reshape(R, -1, self.cfg.merge**2, E).mean(axis=2)
        if self.bias is not None and self.scale is not None:
            bias, scale = (jnp.asarray(v[...], wide)[None, None] for v in (self.bias, self.scale))
            pooled = (pooled - bias) * scale
        return pooled.astype(x.dtype)


class PatchProjector(nnx.Module):
    """Layers in place of an encoder: a norm, a matmul, a norm, positions and a norm make a vector of each patch.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: UnifiedVision, text_dim: int, *, rngs: nnx.Rngs):
        self.side = cfg.patch_side
        self.patch_norm = nn.LayerNorm(cfg.patch_dim, eps=1e-5)
        self.patches = _patches(cfg, bias=True, rngs=rngs)
        self.embed_norm, self.position_norm = (nn.LayerNorm(cfg.dim, eps=1e-5) for _ in range(2))
        self.positions = Positions(cfg.num_positions, cfg.dim, rngs=rngs)
        self.projector = Projector(cfg.dim, text_dim, eps=cfg.norm_eps, rngs=rngs)

    def __call__(
        self, images: nn.vision.Patches, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> tuple[Float[Array, "R P D"], None]:
        """Returns a vector for each patch, and None.

        Args:
            images: Patches of pixels from 0 to 1, in rows.
            dtype: The dtype of the computation.
            remat: Not used: there is one layer.
        """
        at = nn.vision.patch_positions(jnp.asarray(images.grids), images.pixels.shape[1], 1)
        # All numbers of a patch are normed together: [R, P, a b C] -> [R, P, a, b, C] -> [R, P, E]
        pixels = self.patch_norm(jnp.asarray(images.pixels, dtype))
        x = self.embed_norm(self.patches(pixels.reshape(*pixels.shape[:2], self.side, self.side, 3)))
        x = self.position_norm(x + self.positions(at.column, at.row).astype(dtype))
        return self.projector(constrain(x, "batch", "seq", "act_embed")), None


def tower(cfg: Vision | UnifiedVision | None, text_dim: int, *, rngs: nnx.Rngs) -> Tower | PatchProjector | None:
    """Builds the image encoder, which outputs vectors of the text's width; None for a text model."""
    if cfg is None:
        return None
    make: Any = PatchProjector if isinstance(cfg, UnifiedVision) else Tower
    return make(cfg, text_dim, rngs=rngs)
