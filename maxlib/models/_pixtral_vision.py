"""Image encoder of Pixtral (Mistral AI 2024, arXiv:2410.07073), which Mistral's models since Small 3.1 see with.

Images of any size, each attending only to itself; patches rotate by row and column. Shapes: R rows of patches, P
patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._layers import PreNorm
from maxlib.models._vision import IMAGE, PatchEncoder, PatchSizes
from maxlib.nn.vision import exact_gelu
from maxlib.weights import Computed, Field, Fields, HFConfig, Renamed, Table, Weight, fields, names

MERGING, PLAIN = "mistral3", "llava"  # squares of patches become one vector each, or each patch does (Pixtral 12B)
EPS = 1e-5  # of the encoder's norms
ACTS = {"silu": jax.nn.silu, "gelu": exact_gelu}


@dataclass(frozen=True, kw_only=True)
class Vision(PatchSizes):
    """Sizes of the encoder, and the placeholder that stands for a square of patches."""

    kind: str = MERGING
    dim: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    mlp_dim: int = 4096
    act: str = "silu"
    image_size: int = 1540  # longest side that processors make
    bias: bool = False
    # Between rows of an image, and behind it, processors put other tokens, which are text.
    image_token: int = 10

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in (MERGING, PLAIN) or self.act not in ACTS:
            raise ValueError(
                f"kind must be {MERGING} or {PLAIN}, and act (hidden_act) {' or '.join(ACTS)}, got {self.kind} and "
                f"{self.act}"
            )
        if self.merge < 1 or (self.kind == PLAIN and self.merge != 1):
            raise ValueError(f"merge (spatial_merge_size) must be at least 1, and 1 for {PLAIN}, got {self.merge}")

    @property
    def rope(self) -> ops.AxialRope:
        """The rotary embedding: rows and columns alternate in the frequencies."""
        return ops.AxialRope(self.head_dim, self.rope_theta, alternating=True)

    def patches(self, pixels: Any, sizes: Any, *, counts: Sequence[int] | None = None) -> nn.vision.Patches:
        """Returns the arrays of Pixtral's processor as the model takes them.

        Args:
            pixels: `pixel_values`, `I 3 H W`: images, padded below and on the right to a common size.
            sizes: `image_sizes`, `I 2`: height and width of each without padding.
            counts: Number of images in each row of tokens, for a row of patches for each of them; None for one row.

        Raises:
            ValueError: when there are not as many sizes as images, an image is smaller than its size, or a side is no
                multiple of `patch_size * merge`.
        """
        pixels, sizes = [np.asarray(image) for image in pixels], np.asarray(sizes).reshape(-1, 2)
        fits = len(pixels) == len(sizes) and all(
            image.ndim == 3 and (image.shape[1:] >= size).all() for image, size in zip(pixels, sizes, strict=True)
        )
        if not fits or not pixels:
            raise ValueError(
                "pixels must be `I 3 H W` and sizes `I 2`, height and width of what an image has without padding, got "
                f"the shapes {[image.shape for image in pixels]} and the sizes {sizes.tolist()}"
            )
        images = [self.cut(image[:, :height, :width]) for image, (height, width) in zip(pixels, sizes, strict=True)]
        cut, grids = zip(*images, strict=True)
        return nn.vision.pad_patches(np.concatenate(cut), np.concatenate(grids), counts=counts)


class Block(PreNorm):
    """Pre-norm layer in which each patch attends to all of its image."""

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        E, N = cfg.dim, cfg.num_heads
        self.attn_norm = nn.RMSNorm(E, eps=EPS)
        self.attn = nn.Attention(E, num_heads=N, head_dim=cfg.head_dim, mask=IMAGE, rope=cfg.rope, rngs=rngs)
        self.mlp_norm = nn.RMSNorm(E, eps=EPS)
        self.mlp = nn.GatedMLP(E, cfg.mlp_dim, act=ACTS[cfg.act], rngs=rngs)


class Merger(nnx.Module):
    """Makes one vector from each square of patches: a norm, and a matrix over all of the square."""

    def __init__(self, cfg: Vision, eps: float, *, rngs: nnx.Rngs):
        E, self.squared = cfg.dim, cfg.merge**2
        self.norm = nn.RMSNorm(E, eps=eps)
        self.join = nn.Einsum("...E,FE->...F", (E, E * self.squared), ("embed", "vision"), rngs=rngs)

    def __call__(self, x: Float[Array, "R P E"]) -> Float[Array, "R S E"]:
        # The patches of a square are adjacent. Files have all of a channel side by side: [R, S, merge^2, E] ->
        # [R, S, E * merge^2].
        squares = self.norm(x).reshape(len(x), -1, self.squared, x.shape[-1]).swapaxes(2, 3)
        return self.join(squares.reshape(*squares.shape[:2], -1))


class PixtralVision(PatchEncoder):
    """Image encoder without learned positions, whose patches rotate by row and column, and its projector.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        eps: Of the text model's norms, which is that of the merger's norm too.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, eps: float, rngs: nnx.Rngs):
        E, D, p = cfg.dim, text_dim, cfg.patch_size
        self.cfg, self.shape = cfg, (3, p, p)
        axes = ("embed", "channel", "patch_row", "patch_column")
        self.patches = nn.Einsum("...Cab,DCab->...D", (E, 3, p, p), axes, rngs=rngs)
        self.norm = nn.RMSNorm(E, eps=EPS)  # before the layers
        self.layers = nn.Stack(lambda _, rngs: Block(cfg, rngs=rngs), cfg.num_layers, rngs=rngs)
        self.merger = Merger(cfg, eps, rngs=rngs) if cfg.kind == MERGING else None
        self.up = nn.Einsum("...E,FE->...F", (D, E), ("mlp", "vision"), bias=cfg.bias, rngs=rngs)
        self.down = nn.Einsum("...F,DF->...D", (D, D), ("embed", "mlp"), bias=cfg.bias, rngs=rngs)

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns the normed input of the layers."""
        return self.norm(x)

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns the vectors of squares."""
        x = x if self.merger is None else self.merger(x)
        return self.down(exact_gelu(self.up(x)))


def _read_kind(hf: HFConfig, c: Any) -> str:
    kind = hf.require("model_type", MERGING, PLAIN)
    if kind == PLAIN:
        # Left out, Llava means features of an earlier layer, without the first patch.
        hf.take("vision_feature_layer", kind=object)
        hf.take("vision_feature_select_strategy", kind=str)
        hf.require("vision_feature_select_strategy", "full")
        hf.ignore("image_seq_length", "ignore_index")  # of processors and losses
    hf.require("vision_feature_layer", -1, [-1])  # the encoder's output
    return kind


def _write_kind(kind: str, cfg: Any) -> dict[str, Any]:
    written = {"model_type": kind, "vision_feature_layer": -1}
    return written | ({"vision_feature_select_strategy": "full", "image_seq_length": 1} if kind == PLAIN else {})


def _read_merge(hf: HFConfig, c: Any) -> int:
    return hf.take("spatial_merge_size", 2) if c.kind == MERGING else 1


FIELDS = Fields(
    Vision,
    [
        Computed("kind", _read_kind, _write_kind),
        *fields.under(
            "vision_config",
            [
                *fields.ENCODER,
                Field("act", "hidden_act"),
                Field("patch_size"),
                Field("image_size"),
            ],
        ),
        Computed("merge", _read_merge, lambda merge, cfg: {"spatial_merge_size": merge} if cfg.kind == MERGING else {}),
        fields.axial_theta(10_000.0, "default"),  # one name for it before transformers 5.3, another since
        Field("bias", "multimodal_projector_bias"),
        Field("image_token", "image_token_index"),
    ],
    fixed={
        "vision_config.model_type": "pixtral",
        "vision_config.num_channels": 3,
        "vision_config.head_dim": lambda c: c.dim // c.num_heads,
        "projector_hidden_act": "gelu",
    },
    ignored=[  # of all configs, of none but text models
        "vision_config.tie_word_embeddings",
        "vision_config.vocab_size",
    ],
    absent={
        "act": "gelu",
        "patch_size": 16,
        "image_size": 1024,
        "bias": lambda c: c.kind == PLAIN,
        "image_token": lambda c: 10 if c.kind == MERGING else 32_000,
    },
)


def table() -> Table:
    """Maps the tensor names of the releases to parameters; transformers has another prefix."""
    layer = [
        *names.norms(attn_norm="attention_norm", mlp_norm="ffn_norm"),
        *names.attention("attention.{}_proj", "attn", out="attention.o_proj"),
        *names.mlp("feed_forward.{}_proj", "mlp"),
    ]
    joined = "multi_modal_projector.patch_merger.merging_layer.weight"
    return [
        Weight("vision_tower.patch_conv.weight", "tower.patches.w"),
        Weight("vision_tower.ln_pre.weight", "tower.norm.scale"),
        *names.under(layer, "vision_tower.transformer.layers.{i}", "tower.layers.{i}"),
        Weight("multi_modal_projector.norm.weight", "tower.merger.norm.scale"),
        Weight(joined, "tower.merger.join.w"),
        *names.linear("multi_modal_projector.linear_1", "tower.up"),
        *names.linear("multi_modal_projector.linear_2", "tower.down"),
        Renamed("model.vision_tower.", "vision_tower."),
        Renamed("model.multi_modal_projector.", "multi_modal_projector."),
    ]
