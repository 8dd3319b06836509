"""Image encoder of Muse Glimmer: images of any size, whose patches attend to a window of 32 x 32, and in every fourth
layer to all of their image.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.models import _vision
from maxlib.models._vision import PatchEncoder, RowByRow
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Computed, Field, Fields, HFConfig, Table, Weight, fields, names

FULL, WINDOW = "full_attention", "window_attention"


@dataclass(frozen=True, kw_only=True)
class Vision(RowByRow):
    """Sizes of the encoder, and the placeholders that stand for a square of patches each."""

    dim: int = 1536
    num_layers: int = 50
    num_heads: int = 16
    mlp_dim: int = 8960
    frames: int = 2
    side: int = 32  # of a square table of positions, resized for each image, and of a window
    layer_types: tuple[str, ...] | None = None  # FULL or WINDOW; None: every fourth and the last are FULL
    norm_eps: float = 1e-5  # of the norms before and after all layers
    projector_dim: int = 4096
    image_token: int = 200_092
    video_token: int = 200_091

    def __post_init__(self):
        super().__post_init__()
        fields.check_layer_types(self)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The placeholders of images and of frames."""
        return self.image_token, self.video_token

    @property
    def types(self) -> tuple[str, ...]:
        """FULL or WINDOW for each layer."""
        return self.layer_types or usual_types(self.num_layers)


def usual_types(num_layers: int) -> tuple[str, ...]:
    """Returns the types of layers of a config.json without them: every fourth and the last are FULL."""
    return tuple(FULL if (i + 1) % 4 == 0 or i + 1 == num_layers else WINDOW for i in range(num_layers))


class ImageEncoder(PatchEncoder):
    """Image encoder with learned positions, which are resized for each image, and rotation by column and row.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text.
        norm_eps: Epsilon of the text's norms, and of the one of the vectors.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, norm_eps: float, rngs: nnx.Rngs):
        E, F, S = cfg.dim, cfg.projector_dim, cfg.dim * cfg.merge**2
        self.cfg, self.side, self.window, self.shape = cfg, cfg.side, cfg.side, (cfg.patch_dim,)
        self.patches = nn.Einsum("...C,EC->...E", (E, cfg.patch_dim), ("embed", "vision"), rngs=rngs)
        init = nnx.initializers.normal(0.02)
        table = init(rngs.params(), (cfg.side, cfg.side, E), jnp.float32)
        self.positions = nnx.Param(table, axes=("position", "position", "embed"))
        self.enter_norm, self.norm = nn.LayerNorm(E, eps=cfg.norm_eps), nn.LayerNorm(E, eps=cfg.norm_eps)

        def block(kind: str, rngs: nnx.Rngs) -> nn.vision.EncoderBlock:
            return nn.vision.EncoderBlock(
                E,
                cfg.mlp_dim,
                num_heads=cfg.num_heads,
                rope=cfg.rope,
                act=exact_gelu,
                eps=1e-5,
                mask=_vision.IMAGE if kind == FULL else _vision.WINDOW,
                rngs=rngs,
            )

        self.layers = nn.Stack(block, cfg.types, rngs=rngs)
        # The projector's input has the patches of a square side by side in each channel.
        self.up = nn.Einsum("...S,FS->...F", (F, S), ("mlp", "vision"), rngs=rngs)
        self.mid = nn.Einsum("...F,GF->...G", (F, F), ("vision", "mlp"), rngs=rngs)
        self.down = nn.Einsum("...F,DF->...D", (text_dim, F), ("embed", "mlp"), rngs=rngs)
        self.unit = nn.norm.UnitRMSNorm(norm_eps)

    def axes(self, at: nn.vision.PatchPositions) -> tuple[Int[Array, "R P"], Int[Array, "R P"]]:
        """Returns the positions by which heads turn: columns and rows, counted from 1."""
        return at.column + 1, at.row + 1

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns `x` with its positions added, and normed."""
        return self.enter_norm(x + self._positions(at).astype(x.dtype))

    def after_layers(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        """Returns the vectors of squares."""
        # [R, P, E] -> [R, S, merge^2, E] -> [R, S, E * merge^2]
        x = self.norm(x)
        x = x.reshape(len(x), -1, self.cfg.merge**2, x.shape[2]).swapaxes(2, 3)
        x = exact_gelu(self.mid(exact_gelu(self.up(x.reshape(*x.shape[:2], -1)))))
        return self.unit(self.down(x))

    def _positions(self, at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns the learned positions of patches, between which those of images of other sizes lie (bilinear); beyond
        the table are zeros.
        """
        # In float32, as the gradient of a row is a sum over patches.
        table = constrain(self.positions[...].astype(jnp.float32), "position", "position", None)
        (rows, down), (columns, right) = self._taps(at.row, at.height), self._taps(at.column, at.width)
        # [R, P, 2, 1] and [R, P, 1, 2] -> [R, P, 2, 2, E]
        near = table[rows[..., :, None], columns[..., None, :]]
        return jnp.einsum("rpa,rpb,rpabe->rpe", down, right, near)

    def _taps(self, index: Array, size: Array) -> tuple[Array, Array]:
        """Returns the two rows of the table around each index, and their weights, `R P 2`."""
        place = (index + 0.5) * self.side / jnp.maximum(size, 1) - 0.5
        taps = jnp.floor(place)[..., None] + jnp.arange(2)[None, None]
        weights = 1 - jnp.abs(place[..., None] - taps)
        inside = (taps >= 0) & (taps < self.side)
        return jnp.clip(taps, 0, self.side - 1).astype(jnp.int32), jnp.where(inside, weights, 0)


def _read_types(hf: HFConfig, c: Any) -> tuple[str, ...] | None:
    types = hf.nested("vision_config").layer_types(c.num_layers, FULL, WINDOW)
    return None if types == usual_types(c.num_layers) else types


def _write_types(types: tuple[str, ...] | None, cfg: Any) -> dict[str, Any]:
    return {"vision_config.layer_types": list(types or usual_types(cfg.num_layers))}


FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                *fields.ENCODER,
                Field("patch_size"),
                Field("frames", "patch_temporal"),
                Field("merge", "merge_size"),
                Field("side", "pos_emb_height"),
                Field("norm_eps", "layer_norm_eps"),
            ],
        ),
        Computed("layer_types", _read_types, _write_types),
        fields.axial_theta(10_000.0),
        Field("projector_dim", "projector_hidden_size"),
        Field("image_token", "image_token_id"),
        Field("video_token", "video_token_id"),
    ],
    fixed={
        "vision_config.model_type": "muse_glimmer_vision",
        "vision_config.hidden_act": "gelu",
        "vision_config.pos_emb_width": lambda c: c.side,
        "vision_config.max_position_embeddings": lambda c: c.side**2,
        "out_hidden_size": lambda c: c.dim * c.merge**2,
        "projector_hidden_act": "gelu",
    },
)


def table(cfg: Vision) -> Table:
    """Maps the tensor names of the release to parameters."""
    tower = "model.vision_tower"
    layer = [
        *names.layer_norm("norm1", "attn_norm"),
        *names.layer_norm("norm2", "mlp_norm"),
        *names.attention("attn.{}_proj", "attn", out="attn.proj"),
        *names.linear("mlp.fc1", "mlp.up"),
        *names.linear("mlp.fc2", "mlp.down"),
    ]
    embedder = f"{tower}.patch_embedder"
    return [
        Weight(f"{embedder}.patch_embedding.weight", "tower.patches.w"),
        Weight(f"{embedder}.position_embedding_table.weight", "tower.positions", "(Y X) E -> Y X E"),
        *names.layer_norm(f"{tower}.ln_pre", "tower.enter_norm"),
        *names.under(layer, f"{tower}.layers.{{i}}", "tower.layers.{i}"),
        *names.layer_norm(f"{tower}.ln_post", "tower.norm"),
        *names.linear("model.vision_adapter.fc1", "tower.up"),
        *names.linear("model.vision_adapter.fc2", "tower.mid"),
        *names.linear("model.vision_projection", "tower.down"),
    ]
