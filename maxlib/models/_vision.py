"""What encoders of images of any size have in common.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn, ops
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain
from maxlib.weights import Field

IMAGE, WINDOW = ops.Full(), ops.BidirectionalBlocks()  # what a patch attends to: all of its image, or a window of it
# Fields of the encoders of Qwen's models, in `vision_config` ...
PATCHES = (
    Field("num_layers", "depth"),
    Field("num_heads"),
    Field("patch_size"),
    Field("frames", "temporal_patch_size"),
    Field("merge", "spatial_merge_size"),
)
# ... and beside it.
PLACEHOLDERS = (
    Field("image_token", "image_token_id"),
    Field("video_token", "video_token_id"),
    Field("start_token", "vision_start_token_id"),
    Field("end_token", "vision_end_token_id"),
)


@dataclass(frozen=True, kw_only=True)
class PatchSizes:
    """Sizes of an encoder of images of any size, and the placeholder that stands for a square of patches."""

    dim: int  # E
    num_layers: int
    num_heads: int
    mlp_dim: int
    patch_size: int = 14
    frames: int = 1  # of a patch; an image is shown in all of them
    merge: int = 2  # side of the squares of patches that become one vector
    rope_theta: float = 10_000.0
    image_token: int
    mrope: ClassVar[bool] = False  # True if tokens of images have positions by time, row and column
    frame_step: ClassVar[int | None] = None

    def __post_init__(self):
        if self.dim % (4 * self.num_heads):
            raise ValueError(
                f"num_heads (num_attention_heads) must divide dim (hidden_size or embed_dim) into heads of multiples of 4, "
                f"got {self.num_heads} and {self.dim}"
            )

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    @property
    def rope(self) -> ops.AxialRope:
        """The rotary embedding, by row and column."""
        return ops.AxialRope(self.head_dim, self.rope_theta)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The placeholders."""
        return (self.image_token,)

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return 3 * self.frames * self.patch_size**2

    def cut(self, image: Float[np.ndarray, "3 H W"]) -> tuple[np.ndarray, np.ndarray]:
        """Cuts an image into patches, as Hugging Face's processor does with one that it has resized and normalized.

        Args:
            image: RGB, whose sides are multiples of `patch_size * merge`.

        Returns:
            Patches, `n patch_dim`, and their grid of 1 frame, rows and columns, `1 3`.
        """
        patches = nn.vision.patchify(image, self.patch_size, merge=self.merge, frames=self.frames)
        return np.asarray(patches.pixels), np.asarray(patches.grids)


@dataclass(frozen=True, kw_only=True)
class RowByRow(PatchSizes):
    """Sizes of an encoder whose processor has the patches of an image row by row."""

    def patches(self, pixels: Any, grids: Any, *, counts: Sequence[int] | None = None) -> nn.vision.Patches:
        """Returns the arrays of the processor as the model takes them: square by square instead of row by row.

        Args:
            pixels: `pixel_values`, `n ...`: the patches of all images.
            grids: `image_grid_thw`, `I 3`: frames, rows and columns of each image.
            counts: Number of images in each row of tokens, for a row of patches for each of them; None for one row.
        """
        grids, merge = np.asarray(grids), self.merge
        images = np.split(np.asarray(pixels).reshape(-1, self.patch_dim), np.cumsum(grids.prod(axis=1))[:-1])
        # [frames, rows / m, m, columns / m, m, values] -> [frames, rows / m, columns / m, m, m, values]
        squares = [
            image.reshape(frames, height // merge, merge, width // merge, merge, -1).swapaxes(2, 3).reshape(image.shape)
            for image, (frames, height, width) in zip(images, grids, strict=True)
        ]
        return nn.vision.pad_patches(np.concatenate(squares), grids, counts=counts)


class PatchEncoder(nnx.Module):
    """Encoder of images of any size, whose patches attend to all of their image, or to a window of it.

    A subclass makes `cfg`, `patches`, which projects a patch of the shape `shape`, and `layers`. Its `after_layers`
    makes vectors of what the layers return; `before_layers` may add positions before them.

    Attributes:
        window: Side of a window in patches; 0 without windows.
    """

    cfg: Any
    patches: nn.Einsum
    shape: tuple[int, ...]
    layers: nn.Stack
    window: int = 0

    def __call__(
        self, images: nn.vision.Patches, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> tuple[Float[Array, "R S D"], Float[Array, "R S n D"] | None]:
        """Returns a vector for each square of patches, and those that later layers add; None if they add none.

        Args:
            images: Patches of pixels as a processor normalizes them, in rows.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        return self.after_layers(self.run_layers(images, dtype, remat=remat)[0]), None

    def run_layers(
        self, images: nn.vision.Patches, dtype: Any, **options: Any
    ) -> tuple[Float[Array, "R P E"], dict[str, Any]]:
        """Returns what the layers make of each patch, and what they report.

        Args:
            images: Patches of pixels.
            dtype: The dtype of the computation.
            **options: Other arguments of the layers.
        """
        pixels, at = pad_to_squares(images, self.cfg.merge)
        order, blocks = None, None
        if self.window:
            # A window's patches must be neighbours, because a mask is an interval.
            order, window = by_window(at, self.window)
            pixels, window = reordered(pixels, order), reordered(window, order)
            at = nn.vision.PatchPositions(*(reordered(x, order) for x in at))
            blocks = nn.vision.bidirectional_blocks(at.segment_ids > 0, segment_ids=window)
        ctx = nn.make_context(
            *at.row.shape,
            positions=jnp.stack(self.axes(at), axis=2),
            segment_ids=at.segment_ids,  # an image is a document of a packed row
            bidirectional_blocks=blocks,
            masks=(IMAGE, WINDOW) if self.window else (IMAGE,),
            ropes=(self.cfg.rope,),
        )
        x = self.before_layers(self.patches(pixels.astype(dtype).reshape(*pixels.shape[:2], *self.shape)), at)
        x, _, aux = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, **options)
        return x if order is None else reordered(x, jnp.argsort(order, axis=1)), aux

    def axes(self, at: nn.vision.PatchPositions) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
        """Returns the positions by which heads turn: rows and columns."""
        return at.row, at.column

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns the input of the layers."""
        return x

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns the vectors of squares, whose patches stand together."""
        raise NotImplementedError


class PatchReader(nn.Decoder):
    """Decoder that reads images of any size with `tower`, if `cfg.vision` describes one."""

    tower: Any

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads, frames of videos among them; empty for a text model."""
        return inputs(self.tower, self.cfg.vision)


def inputs(tower: Any, cfg: PatchSizes | None) -> dict[str, Any]:
    """Returns the images that a text model with an encoder reads; nothing without one."""
    if cfg is None:
        return {}
    images = nn.vision.PatchInput(
        tower,
        tokens=cfg.tokens,
        merge=cfg.merge,
        patch_dim=cfg.patch_dim,
        mrope=cfg.mrope,
        frame_step=cfg.frame_step,
    )
    return {"images": images}


def pad_to_squares(
    images: nn.vision.Patches, merge: int
) -> tuple[Float[Array, "R P values"], nn.vision.PatchPositions]:
    """Pads rows of patches to whole squares, and returns their pixels and positions.

    Args:
        images: Patches of pixels, in rows.
        merge: Side of the squares.
    """
    P = images.pixels.shape[1]
    padding = -P % merge**2
    pixels = jnp.pad(jnp.asarray(images.pixels), ((0, 0), (0, padding), (0, 0)))
    return pixels, nn.vision.patch_positions(jnp.asarray(images.grids), P + padding, merge)


def by_window(at: nn.vision.PatchPositions, side: int) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
    """Returns the order of patches by image and window, padding last, and the number of each one's window.

    Args:
        at: Positions of the patches.
        side: Side of a window in patches.
    """
    columns = -(-at.width // side)  # windows beside each other
    window = at.row // side * columns + at.column // side
    real = at.segment_ids > 0
    most = at.segment_ids.shape[1]  # windows of an image are at most as many as patches
    window = jnp.where(real, (at.segment_ids - 1) * most + window + 1, 0)
    # Stable: the patches of a window keep their order, so that those of a square stay together.
    return jnp.argsort(jnp.where(real, window, jnp.iinfo(jnp.int32).max), axis=1, stable=True), window


def reordered(x: Any, order: Int[Array, "R P"]) -> Any:
    """Puts patches, `R P` or `R P C`, in another order."""
    return jnp.take_along_axis(x, order if x.ndim == 2 else order[:, :, None], axis=1)


def video_patches(cfg: PatchSizes, *, bias: bool, rngs: nnx.Rngs) -> nn.Einsum:
    """Makes the projection of patches of several frames, which files have as a convolution."""
    shape = (cfg.dim, 3, cfg.frames, cfg.patch_size, cfg.patch_size)
    axes = ("embed", "channel", "frame", "patch_row", "patch_column")
    return nn.Einsum("...CFab,DCFab->...D", shape, axes, bias=bias, rngs=rngs)


def bicubic(table: Float[Array, "side side E"], at: nn.vision.PatchPositions, dtype: Any) -> Float[Array, "R P E"]:
    """Returns learned positions of patches, resized from a square table to each image by a bicubic filter."""

    def taps(index: Array, size: Array) -> tuple[Array, Array]:
        # The four rows of the table around each index, and their weights, [R, P, 4] (Keys 1981, a = -0.75).
        place = (index + 0.5) * len(table) / jnp.maximum(size, 1) - 0.5
        rows = jnp.floor(place)[..., None] + jnp.arange(-1, 3)[None, None]
        d, a = jnp.abs(place[..., None] - rows), -0.75
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return jnp.clip(rows, 0, len(table) - 1).astype(jnp.int32), jnp.where(d <= 1, near, far)

    (rows, down), (columns, right) = taps(at.row, at.height), taps(at.column, at.width)
    # [R, P, 4, 1] and [R, P, 1, 4] -> [R, P, 4, 4, E]
    # In float32, as the gradient of a row is a sum over patches.
    around = table.astype(jnp.float32)[rows[..., :, None], columns[..., None, :]]
    return jnp.einsum("rpa,rpb,rpabe->rpe", down, right, around).astype(dtype)
