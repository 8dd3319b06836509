"""Kimi K2.5 to K2.7 (Moonshot AI 2026): Kimi K2, which is DeepSeek V3 in other sizes, with MoonViT, which encodes
images of any size.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models import deepseek
from maxlib.models._vision import pad_to_squares, patch_context, square_by_square
from maxlib.nn.remat import Policy
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Computed, Family, Field, Fields, Multimodal, Renamed, Table, Weight, fields, names

EPS = 1e-5  # of the encoder's norms


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Sizes of the encoder, and the placeholder that stands for a square of patches."""

    dim: int = 1152  # E
    num_layers: int = 27
    num_heads: int = 16
    mlp_dim: int = 4304
    patch_size: int = 14
    merge: int = 2
    side: int = 64  # of a square table of positions, resized for each image
    rope_theta: float = 10_000.0
    projector_eps: float = 1e-5
    image_token: int = 163_605
    video_token: int = 163_840
    start_token: int = 163_602
    end_token: int = 163_604

    def __post_init__(self):
        if self.dim % (4 * self.num_heads):
            raise ValueError(
                f"num_heads must divide dim (hidden_size) into heads of multiples of 4, got {self.num_heads} and {self.dim}"
            )

    @property
    def patch_dim(self) -> int:
        """Number of values in a patch."""
        return 3 * self.patch_size**2

    def cut(self, image: Float[np.ndarray, "3 H W"]) -> tuple[np.ndarray, np.ndarray]:
        """Cuts a normalised RGB image into patches `n patch_dim`; returns them and their grid, `1 3`."""
        patches = nn.vision.patchify(image, self.patch_size, merge=self.merge, frames=1)
        return np.asarray(patches.pixels), np.asarray(patches.grids)

    def patches(self, pixels: Any, grids: Any, *, counts: Sequence[int] | None = None) -> nn.vision.Patches:
        """Returns the arrays of Kimi's processor as the model takes them: square by square instead of row by row.

        Args:
            pixels: `pixel_values`, `n 3 p p`: the patches of all images.
            grids: `image_grid_thw`, `I 3`: 1 frame, rows and columns of each image.
            counts: Number of images in each row of tokens, for a row of patches for each of them; None for one row.
        """
        return square_by_square(pixels, grids, merge=self.merge, patch_dim=self.patch_dim, counts=counts)


@dataclass(frozen=True, kw_only=True)
class Config(deepseek.Config):
    """Sizes of a Kimi K2.5; `PRESETS` has the published ones."""

    vision: Vision


class MoonViT(nnx.Module):
    """Image encoder with learned positions, which are resized for each image, and rotation by column and row.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, p, F = cfg.dim, cfg.patch_size, cfg.dim * cfg.merge**2
        # Pairs of neighbouring dimensions turn by column and row in turn.
        self.rope = ops.AxialRope(E // cfg.num_heads, cfg.rope_theta, interleaved=True)
        axes = ("embed", "channel", "patch_row", "patch_column")
        self.patches = nn.Einsum("...Cab,DCab->...D", (E, 3, p, p), axes, bias=True, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        shape = (cfg.side, cfg.side, E)
        self.positions = nnx.Param(init(rngs.params(), shape, jnp.float32), axes=("position", "position", "embed"))

        def block(_: Any, rngs: nnx.Rngs) -> nn.vision.EncoderBlock:
            return nn.vision.EncoderBlock(E, cfg.mlp_dim, num_heads=cfg.num_heads, rope=self.rope, eps=EPS, rngs=rngs)

        self.layers = nn.Stack(block, cfg.num_layers, rngs=rngs)
        self.norm = nn.LayerNorm(E, eps=EPS)
        self.projector_norm = nn.LayerNorm(E, eps=cfg.projector_eps)
        self.up = nn.Einsum("...E,FE->...F", (F, F), ("mlp", "vision"), bias=True, rngs=rngs)
        self.down = nn.Einsum("...F,DF->...D", (text_dim, F), ("embed", "mlp"), bias=True, rngs=rngs)
        self.shape, self.merge, self.side = (3, p, p), cfg.merge, cfg.side

    def __call__(
        self, images: nn.vision.Patches, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> tuple[Float[Array, "R S D"], None]:
        """Returns a vector for each square of patches, and None: there is nothing for later layers.

        Args:
            images: Patches of normalised pixels, in rows.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        pixels, at = pad_to_squares(images, self.merge)
        ctx = patch_context(at, (at.row, at.column), self.rope)
        pixels = pixels.astype(dtype).reshape(*pixels.shape[:2], *self.shape)
        x = self.patches(pixels) + self._positions(at).astype(dtype)
        x, _, _ = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, remat=remat)
        # The patches of a square stand together: [R, P, E] -> [R, S, merge^2 * E]
        x = self.projector_norm(self.norm(x)).reshape(len(x), x.shape[1] // self.merge**2, -1)
        return self.down(exact_gelu(self.up(x))), None

    def _positions(self, at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns the learned positions of patches, resized to the image by a bicubic filter."""
        table = constrain(self.positions[...], "position", "position", None)
        (rows, down), (columns, right) = self._taps(at.row, at.height), self._taps(at.column, at.width)
        # [R, P, 4, 1] and [R, P, 1, 4] -> [R, P, 4, 4, E]
        near = table[rows[..., :, None], columns[..., None, :]]
        return jnp.einsum("rpa,rpb,rpabe->rpe", down, right, near)

    def _taps(self, index: Array, size: Array) -> tuple[Array, Array]:
        """Returns the four rows of the table around each index, and their weights, `R P 4` (Keys 1981, a = -0.75)."""
        place = (index + 0.5) * self.side / jnp.maximum(size, 1) - 0.5
        taps = jnp.floor(place)[..., None] + jnp.arange(-1, 3)[None, None]
        d, a = jnp.abs(place[..., None] - taps), -0.75
        near = ((a + 2) * d - (a + 3)) * d * d + 1
        far = ((a * d - 5 * a) * d + 8 * a) * d - 4 * a
        return jnp.clip(taps, 0, self.side - 1).astype(jnp.int32), jnp.where(d <= 1, near, far)


class KimiK25(deepseek.DeepSeek):
    """Kimi K2 that sees images of any size; positions count tokens. Videos, whose frames are joined, are not read."""

    def __init__(self, cfg: Config, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.tower = MoonViT(cfg.vision, cfg.dim, rngs=rngs)

    @property
    def inputs(self) -> dict[str, Any]:
        """Returns the images that the model reads."""
        cfg = self.cfg.vision
        images = nn.vision.PatchInput(self.tower, tokens=(cfg.image_token,), merge=cfg.merge, patch_dim=cfg.patch_dim)
        return {"images": images}


def _read_merge(hf: Any, c: Any) -> int:
    sides = hf.nested("vision_config").take("merge_kernel_size", [2, 2], kind=list)
    if len({*sides}) != 1 or len(sides) != 2:
        raise ValueError(f"{hf.where('vision_config.merge_kernel_size')} must be two equal numbers, got {sides}")
    return sides[0]


VISION = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                Field("num_layers", "num_hidden_layers"),
                Field("num_heads", "num_attention_heads"),
                Field("mlp_dim", "intermediate_size"),
                Field("patch_size"),
                Field("side", "pos_emb_height"),
            ],
        ),
        Computed("merge", _read_merge, lambda merge, cfg: {"vision_config.merge_kernel_size": [merge, merge]}),
        fields.axial_theta(10_000.0),
        Field("projector_eps", "projection_layer_norm_eps"),
        Field("image_token", "image_token_id"),
        Field("video_token", "video_token_id"),
        Field("start_token", "vision_start_token_id"),
        Field("end_token", "vision_end_token_id"),
    ],
    fixed={
        "vision_config.model_type": "kimi_k25_vision",
        "vision_config.hidden_act": "gelu_pytorch_tanh",
        "vision_config.pos_emb_width": lambda c: c.side,
        "projection_hidden_size": lambda c: c.dim,
    },
    ignored=["vision_config.pos_emb_time"],  # frames of a video that are joined
)
FIELDS = Multimodal(
    replace(
        deepseek.FIELDS, config=Config, model_types={"deepseek_v3": "DeepseekV3Model", "kimi_k2": "DeepseekV3Model"}
    ),
    {"vision": VISION},
    model_types={"kimi_k25": "Kimi_K25ForConditionalGeneration"},
    tied=True,
    text_alone=False,
)


def _table(cfg: Config) -> Table:
    """Maps the names of the release; transformers writes some others."""
    text = [*names.NORMS, *names.mla(cfg.q_rank, cfg.nope_dim), *names.MLP, *names.MOE]
    layer = [
        *names.layer_norm("norm0", "attn_norm"),
        *names.layer_norm("norm1", "mlp_norm"),
        *names.linear("mlp.fc0", "mlp.up"),
        *names.linear("mlp.fc1", "mlp.down"),
        Weight("wo.weight", "attn.o.w", "D (N H) -> D N H"),
        Weight("wo.bias", "attn.o.b"),
    ]
    for n, part in enumerate("qkv"):
        layer.append(Weight("wqkv.weight", f"attn.{part}.w", "(three N H) D -> N H D", {"three": n}))
        layer.append(Weight("wqkv.bias", f"attn.{part}.b", "(three N H) -> N H", {"three": n}))
    tower = "vision_tower"
    return [
        Renamed("language_model.model.blocks.", "language_model.model.layers."),
        Renamed(f"{tower}.encoder.patch_embed.", f"{tower}.patch_embed."),
        Renamed("model.mm_projector.", "mm_projector."),
        *names.decoder_table(text, prefix="language_model."),
        *names.linear(f"{tower}.patch_embed.proj", "tower.patches"),
        Weight(f"{tower}.patch_embed.pos_emb.weight", "tower.positions"),
        *names.under(layer, f"{tower}.encoder.blocks.{{i}}", "tower.layers.{i}"),
        *names.layer_norm(f"{tower}.encoder.final_layernorm", "tower.norm"),
        *names.layer_norm("mm_projector.pre_norm", "tower.projector_norm"),
        *names.linear("mm_projector.proj.0", "tower.up"),
        *names.linear("mm_projector.proj.2", "tower.down"),
    ]


_K2 = deepseek.PRESETS["kimi-k2"]
_SIZES = {field.name: getattr(_K2, field.name) for field in dataclass_fields(_K2)}
PRESETS = {"kimi-k2.5": Config(**_SIZES, vision=Vision())}

FAMILY = Family("kimi_k25", KimiK25, FIELDS, _table, PRESETS)
