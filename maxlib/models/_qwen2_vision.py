"""Image encoders of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): images of any size; in the second,
patches of most layers attend to a window of their image.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text
model.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import PreNorm
from maxlib.models._qwen_vision import Merger
from maxlib.models._vision import IMAGE, PATCHES, PLACEHOLDERS, WINDOW, PatchEncoder, PatchSizes, video_patches
from maxlib.weights import Computed, Field, Fields, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Vision(PatchSizes):
    """Sizes of the encoder, and the placeholders that stand for a square of patches each."""

    mrope: ClassVar[bool] = True

    dim: int = 1280
    num_layers: int = 32
    num_heads: int = 16
    mlp_dim: int = 5120
    frames: int = 2
    window: int | None = None  # side in pixels, of Qwen2.5-VL; None for Qwen2-VL's layers, which have no windows
    full_layers: tuple[int, ...] = ()  # the layers without windows
    frame_step: int = 1  # positions between the frames of a video, half a second of it each
    video_token: int
    start_token: int
    end_token: int

    def __post_init__(self):
        super().__post_init__()
        if self.window is not None and self.window_squares < 1:
            raise ValueError(
                f"window (window_size) must be at least {self.merge * self.patch_size} pixels, got {self.window}"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """The placeholders of images and of frames."""
        return self.image_token, self.video_token

    @property
    def window_squares(self) -> int:
        """Side of a window in squares of patches."""
        return (self.window or 0) // self.merge // self.patch_size


class WindowBlock(PreNorm):
    """Qwen2.5-VL's layer: RMSNorm, SwiGLU with biases, and attention to an image or to a window of it."""

    def __init__(self, cfg: Vision, mask: ops.Mask, *, rngs: nnx.Rngs):
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=1e-6)
        self.attn = nn.Attention(
            cfg.dim,
            num_heads=cfg.num_heads,
            head_dim=cfg.head_dim,
            mask=mask,
            rope=cfg.rope,
            bias=True,
            out_bias=True,
            rngs=rngs,
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=1e-6)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, bias=True, rngs=rngs)


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `x * sigmoid(1.702 x)`."""
    return x * jax.nn.sigmoid(1.702 * x)


class Qwen2Vision(PatchEncoder):
    """Image encoder with rotation by row and column, and no learned positions.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, has_windows = cfg.dim, cfg.window is not None
        self.cfg, self.window = cfg, cfg.window_squares * cfg.merge
        self.shape = (3, cfg.frames, cfg.patch_size, cfg.patch_size)
        self.patches = video_patches(cfg, bias=False, rngs=rngs)
        self.merger = Merger(E, cfg.merge, text_dim, norm_first=True, rngs=rngs)
        if has_windows:
            self.merger.norm = nn.RMSNorm(E, eps=1e-6)

        def block(mask: ops.Mask, rngs: nnx.Rngs) -> Any:
            if has_windows:
                return WindowBlock(cfg, mask, rngs=rngs)
            N, F = cfg.num_heads, cfg.mlp_dim
            return nn.vision.EncoderBlock(E, F, num_heads=N, rope=cfg.rope, act=quick_gelu, rngs=rngs)

        masks = [WINDOW if has_windows and i not in cfg.full_layers else IMAGE for i in range(cfg.num_layers)]
        self.layers = nn.Stack(block, masks, rngs=rngs)

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns a vector for each square of patches."""
        return self.merger(x)


# In the releases: the first as transformers 5 calls it otherwise, the second read by nothing.
_RELEASED = {"vision_config.in_chans": 3, "vision_config.spatial_patch_size": lambda c: c.patch_size}


def _write_mlp_ratio(width: int, cfg: Vision) -> dict[str, Any]:
    if width % cfg.dim:
        raise ValueError(f"Qwen2-VL's encoder needs an mlp_dim that is a multiple of dim, got {width} and {cfg.dim}")
    return {"vision_config.mlp_ratio": width // cfg.dim}


WITHOUT_WINDOWS = Fields(
    Vision,
    [
        *fields.under("vision_config", [Field("dim", "embed_dim"), *PATCHES]),
        Computed("mlp_dim", lambda hf, c: hf.nested("vision_config").take("mlp_ratio", 4) * c.dim, _write_mlp_ratio),
        fields.axial_theta(10_000.0),
        *PLACEHOLDERS,
    ],
    fixed={"vision_config.in_channels": 3, "vision_config.hidden_act": "quick_gelu"},
    fixed_if_present=_RELEASED,
)
_WINDOWED = [
    Field("dim", "hidden_size"),
    Field("mlp_dim", "intermediate_size"),
    Field("window", "window_size"),
    Field("full_layers", "fullatt_block_indexes"),
    Field("frame_step", "tokens_per_second"),
]
WITH_WINDOWS = Fields(
    Vision,
    [*fields.under("vision_config", [*_WINDOWED, *PATCHES]), fields.axial_theta(10_000.0), *PLACEHOLDERS],
    fixed={"vision_config.in_channels": 3, "vision_config.hidden_act": "silu"},
    fixed_if_present=_RELEASED,
    absent={"dim": 3584, "mlp_dim": 3420, "window": 112, "full_layers": (7, 15, 23, 31), "frame_step": 4},
)


def table(cfg: Vision) -> Table:
    """Maps the tensor names of the releases to parameters."""
    layer = [*names.layer_norm("norm1", "attn_norm"), *names.layer_norm("norm2", "mlp_norm")]
    layer += [*names.qkv("attn.qkv", "attn"), *names.heads_out("attn.proj", "attn.o")]
    plain = [*names.linear("mlp.fc1", "mlp.up"), *names.linear("mlp.fc2", "mlp.down")]
    layer += plain if cfg.window is None else names.MLP
    merger = [*names.layer_norm("ln_q", "norm"), *names.linear("mlp.0", "up"), *names.linear("mlp.2", "down")]
    return [
        Weight("visual.patch_embed.proj.weight", "tower.patches.w"),
        *names.under(layer, "visual.blocks.{i}", "tower.layers.{i}"),
        *names.under(merger, "visual.merger", "tower.merger"),
    ]
