"""Image encoders of Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923): images of any size; in the second,
patches of most layers attend to a window of their image.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text
model.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._qwen_vision import Merger
from maxlib.models._vision import by_window, pad_to_squares, reordered
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain
from maxlib.weights import Computed, Field, Fields, HFConfig, Table, Weight, fields, names


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Sizes of the encoder, and the placeholders that stand for a square of patches each."""

    dim: int = 1280
    num_layers: int = 32
    num_heads: int = 16
    mlp_dim: int = 5120
    patch_size: int = 14
    frames: int = 2  # of a patch; an image is shown in all of them
    merge: int = 2
    window: int | None = None  # side in pixels, of Qwen2.5-VL; None for Qwen2-VL's layers, which have no windows
    full_layers: tuple[int, ...] = ()  # the layers without windows
    frame_step: int = 1  # positions between the frames of a video, half a second of it each
    rope_theta: float = 10_000.0
    image_token: int
    video_token: int
    start_token: int
    end_token: int

    def __post_init__(self):
        if self.dim % (4 * self.num_heads):
            raise ValueError(
                f"num_heads must divide dim (embed_dim or hidden_size) into heads of multiples of 4, got "
                f"{self.num_heads} and {self.dim}"
            )
        if self.window is not None and self.window_squares < 1:
            raise ValueError(
                f"window (window_size) must be at least {self.merge * self.patch_size} pixels, got {self.window}"
            )

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return 3 * self.frames * self.patch_size**2

    @property
    def window_squares(self) -> int:
        """Side of a window in squares of patches."""
        return (self.window or 0) // self.merge // self.patch_size

    def cut(self, image: Float[np.ndarray, "3 H W"]) -> tuple[np.ndarray, np.ndarray]:
        """Cuts an image into patches, as Hugging Face's processor does with one that it has resized and normalized.

        Args:
            image: RGB, whose sides are multiples of `patch_size * merge`.

        Returns:
            Patches, `n patch_dim`, and their grid of 1 frame, rows and columns, `1 3`.
        """
        patches = nn.vision.patchify(image, self.patch_size, merge=self.merge, frames=self.frames)
        return np.asarray(patches.pixels), np.asarray(patches.grids)


IMAGE, WINDOW = ops.Full(), ops.BidirectionalBlocks()


class WindowBlock(nnx.Module):
    """Qwen2.5-VL's layer: RMSNorm, SwiGLU with biases, and attention to an image or to a window of it."""

    def __init__(self, cfg: Vision, mask: ops.Mask, *, rngs: nnx.Rngs):
        N, H = cfg.num_heads, cfg.dim // cfg.num_heads
        rope = ops.AxialRope(H, cfg.rope_theta)
        self.attn_norm = nn.RMSNorm(cfg.dim, eps=1e-6)
        self.attn = nn.Attention(
            cfg.dim, num_heads=N, head_dim=H, mask=mask, rope=rope, bias=True, out_bias=True, rngs=rngs
        )
        self.mlp_norm = nn.RMSNorm(cfg.dim, eps=1e-6)
        self.mlp = nn.GatedMLP(cfg.dim, cfg.mlp_dim, bias=True, rngs=rngs)

    def __call__(self, x: Float[Array, "R P E"], ctx: nn.Context, cache: None = None):
        x = x + self.attn(self.attn_norm(x), ctx)[0]
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "batch", "seq", "act_embed"), cache, {}


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `x * sigmoid(1.702 x)`."""
    return x * jax.nn.sigmoid(1.702 * x)


class Qwen2Vision(nnx.Module):
    """Image encoder with rotation by row and column, and no learned positions.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, p = cfg.dim, cfg.patch_size
        axes = ("embed", "channel", "frame", "patch_row", "patch_column")
        self.patches = nn.Einsum("...CFab,DCFab->...D", (E, 3, cfg.frames, p, p), axes, rngs=rngs)
        self.rope = ops.AxialRope(E // cfg.num_heads, cfg.rope_theta)
        self.merger = Merger(E, cfg.merge, text_dim, norm_first=True, rngs=rngs)
        if cfg.window is not None:
            self.merger.norm = nn.RMSNorm(E, eps=1e-6)
        windowed = [cfg.window is not None and i not in cfg.full_layers for i in range(cfg.num_layers)]

        def block(mask: ops.Mask, rngs: nnx.Rngs) -> Any:
            if cfg.window is not None:
                return WindowBlock(cfg, mask, rngs=rngs)
            N, F = cfg.num_heads, cfg.mlp_dim
            return nn.vision.EncoderBlock(E, F, num_heads=N, rope=self.rope, act=quick_gelu, rngs=rngs)

        self.layers = nn.Stack(block, [WINDOW if inside else IMAGE for inside in windowed], rngs=rngs)
        self.shape, self.merge, self.window_squares = (3, cfg.frames, p, p), cfg.merge, cfg.window_squares

    def __call__(
        self, images: nn.vision.Patches, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> tuple[Float[Array, "R S D"], None]:
        """Returns a vector for each square of patches, and None: nothing is added to later layers.

        Args:
            images: Patches of normalized pixels, in rows.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        pixels, at = pad_to_squares(images, self.merge)
        order, blocks = None, None
        if self.window_squares:
            # A window's patches must be neighbours, because a mask is an interval.
            order, window = by_window(at, self.window_squares * self.merge)
            pixels, window = reordered(pixels, order), reordered(window, order)
            at = nn.vision.PatchPositions(*(reordered(x, order) for x in at))
            blocks = nn.vision.bidirectional_blocks(at.segment_ids > 0, segment_ids=window)
        ctx = nn.make_context(
            *at.row.shape,
            positions=jnp.stack([at.row, at.column], axis=2),
            segment_ids=at.segment_ids,
            bidirectional_blocks=blocks,
            masks=(IMAGE, WINDOW),
            ropes=(self.rope,),
        )
        x = self.patches(pixels.astype(dtype).reshape(*pixels.shape[:2], *self.shape))
        x, _, _ = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, remat=remat)
        if order is not None:
            x = reordered(x, jnp.argsort(order, axis=1))
        return self.merger(x), None


_TOKENS = (
    Field("image_token", "image_token_id"),
    Field("video_token", "video_token_id"),
    Field("start_token", "vision_start_token_id"),
    Field("end_token", "vision_end_token_id"),
)
_SHARED = (
    Field("num_layers", "depth"),
    Field("num_heads"),
    Field("patch_size"),
    Field("frames", "temporal_patch_size"),
    Field("merge", "spatial_merge_size"),
)
# In the releases: the first as transformers 5 calls it otherwise, the second read by nothing.
_RELEASED = {"vision_config.in_chans": 3, "vision_config.spatial_patch_size": lambda c: c.patch_size}


def _mlp_ratio(hf: HFConfig, c: Any) -> int:
    return hf.nested("vision_config").take("mlp_ratio", 4) * c.dim


def _write_mlp_ratio(width: int, cfg: Vision) -> dict[str, Any]:
    if width % cfg.dim:
        raise ValueError(f"Qwen2-VL's encoder needs an mlp_dim that is a multiple of dim, got {width} and {cfg.dim}")
    return {"vision_config.mlp_ratio": width // cfg.dim}


WITHOUT_WINDOWS = Fields(
    Vision,
    [
        *fields.under("vision_config", [Field("dim", "embed_dim"), *_SHARED]),
        Computed("mlp_dim", _mlp_ratio, _write_mlp_ratio),
        fields.axial_theta(10_000.0),
        *_TOKENS,
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
    [*fields.under("vision_config", [*_WINDOWED, *_SHARED]), fields.axial_theta(10_000.0), *_TOKENS],
    fixed={"vision_config.in_channels": 3, "vision_config.hidden_act": "silu"},
    fixed_if_present=_RELEASED,
    absent={"dim": 3584, "mlp_dim": 3420, "window": 112, "full_layers": (7, 15, 23, 31), "frame_step": 4},
)


def table(cfg: Vision) -> Table:
    """Maps the tensor names of the releases to parameters."""
    layer = [*names.layer_norm("norm1", "attn_norm"), *names.layer_norm("norm2", "mlp_norm")]
    for n, part in enumerate("qkv"):
        layer.append(Weight("attn.qkv.weight", f"attn.{part}.w", "(three N H) D -> N H D", {"three": n}))
        layer.append(Weight("attn.qkv.bias", f"attn.{part}.b", "(three N H) -> N H", {"three": n}))
    layer += [Weight("attn.proj.weight", "attn.o.w", "D (N H) -> D N H"), Weight("attn.proj.bias", "attn.o.b")]
    plain = [*names.linear("mlp.fc1", "mlp.up"), *names.linear("mlp.fc2", "mlp.down")]
    layer += plain if cfg.window is None else names.MLP
    merger = [*names.layer_norm("ln_q", "norm"), *names.linear("mlp.0", "up"), *names.linear("mlp.2", "down")]
    return [
        Weight("visual.patch_embed.proj.weight", "tower.patches.w"),
        *names.under(layer, "visual.blocks.{i}", "tower.layers.{i}"),
        *names.under(merger, "visual.merger", "tower.merger"),
    ]
