"""Image encoder of Qwen3-VL (arXiv:2511.21631) and Qwen3.5: images of any size, each attending only to itself.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text
model.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.models._sizes import AttentionSizes
from maxlib.models._vision import PATCHES, PLACEHOLDERS, PatchEncoder, PatchSizes, video_patches
from maxlib.models._vision import inputs as inputs
from maxlib.nn.remat import Policy
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Computed, Field, Fields, HFConfig, Table, Weight, fields, names

SECTIONS = (24, 20, 20)  # of M-RoPE: pairs of a head that turn by time, row and column


@dataclass(frozen=True, kw_only=True)
class Vision(PatchSizes):
    """Sizes of the encoder, and the placeholders that stand for a square of patches each."""

    mrope: ClassVar[bool] = True

    dim: int = 1152
    num_layers: int = 27
    num_heads: int = 16
    mlp_dim: int = 4304
    patch_size: int = 16
    frames: int = 2
    num_positions: int = 2304  # of a square table, resized for each image
    deepstack: tuple[int, ...] = ()  # layers that also feed the first text layers
    video_token: int
    start_token: int
    end_token: int

    def __post_init__(self):
        super().__post_init__()
        if math.isqrt(self.num_positions) ** 2 != self.num_positions:
            raise ValueError(f"num_positions (num_position_embeddings) must be a square, got {self.num_positions}")
        if sorted({*self.deepstack}) != list(self.deepstack) or not all(
            0 <= number < self.num_layers for number in self.deepstack
        ):
            raise ValueError(
                f"deepstack (deepstack_visual_indexes) must be ascending numbers of the {self.num_layers} layers, got "
                f"{self.deepstack}"
            )

    @property
    def tokens(self) -> tuple[int, ...]:
        """The placeholders of images and of frames."""
        return self.image_token, self.video_token


@dataclass(frozen=True, kw_only=True)
class DeepstackSizes(AttentionSizes):
    """Sizes of a text model that reads features of several layers of the image encoder."""

    sections: tuple[int, ...] = SECTIONS
    attention_bias: bool = False
    vision: Vision
    losses: tuple[Any, ...] = ()  # router losses for training, such as `nn.router.SwitchBalance(0.001)`

    def __post_init__(self):
        self.mrope  # noqa: B018  # its sections are checked
        if len(self.vision.deepstack) > self.num_layers:
            raise ValueError(
                f"deepstack (deepstack_visual_indexes) must feed at most the {self.num_layers} layers of text "
                f"(num_hidden_layers), got {self.vision.deepstack}"
            )

    @property
    def mrope(self) -> ops.MRope:
        """The rotary embedding of all layers."""
        return ops.MRope(self.rope, self.sections)

    @property
    def has_features(self) -> list[bool]:
        """Whether each layer gets features of images; those that do are scanned by themselves."""
        return [i < len(self.vision.deepstack) for i in range(self.num_layers)]


class Block(nn.vision.EncoderBlock):
    """Pre-norm layer in which each patch attends to all of its image; it may report what it returns as `kept`."""

    def __init__(self, cfg: Vision, *, keep: bool, rngs: nnx.Rngs):
        super().__init__(cfg.dim, cfg.mlp_dim, num_heads=cfg.num_heads, rope=cfg.rope, rngs=rngs)
        self.keep = keep

    def __call__(self, x: Float[Array, "R P E"], ctx: nn.Context, cache: None = None):
        x, cache, _ = super().__call__(x, ctx, cache)
        return x, cache, {"kept": x} if self.keep else {}


class Merger(nnx.Module):
    """Makes one vector of the text's width from each square of patches: a norm, before or after joining, and an MLP."""

    def __init__(self, dim: int, merge: int, text_dim: int, *, norm_first: bool, rngs: nnx.Rngs):
        F = dim * merge**2
        self.norm: Any = nn.LayerNorm(dim if norm_first else F, eps=1e-6)
        self.up = nn.Einsum("...E,FE->...F", (F, F), ("mlp", "vision"), bias=True, rngs=rngs)
        self.down = nn.Einsum("...F,DF->...D", (text_dim, F), ("embed", "mlp"), bias=True, rngs=rngs)
        self.norm_first, self.squared = norm_first, merge**2

    def __call__(self, x: Float[Array, "R P E"]) -> Float[Array, "R S D"]:
        x = self.norm(x) if self.norm_first else x
        x = x.reshape(len(x), x.shape[1] // self.squared, -1)  # the patches of a square stand together
        x = x if self.norm_first else self.norm(x)
        return self.down(exact_gelu(self.up(x)))


class QwenVision(PatchEncoder):
    """Image encoder: learned positions on a grid that is resized for each image, and rotation by row and column.

    Args:
        cfg: Sizes.
        text_dim: Width D of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        E, m = cfg.dim, cfg.merge
        self.cfg = cfg
        self.patches = video_patches(cfg, bias=True, rngs=rngs)
        init = nnx.initializers.normal(E**-0.5)
        self.positions = nnx.Param(init(rngs.params(), (cfg.num_positions, E), jnp.float32), axes=("position", "embed"))
        keep = [i in cfg.deepstack for i in range(cfg.num_layers)]
        self.layers = nn.Stack(lambda keep, rngs: Block(cfg, keep=keep, rngs=rngs), keep, rngs=rngs)
        self.merger = Merger(E, m, text_dim, norm_first=True, rngs=rngs)
        self.mergers = nnx.List([Merger(E, m, text_dim, norm_first=False, rngs=rngs) for _ in cfg.deepstack])
        self.shape, self.side = (3, cfg.frames, cfg.patch_size, cfg.patch_size), math.isqrt(cfg.num_positions)

    def __call__(
        self, images: nn.vision.Patches, *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> tuple[Float[Array, "R S D"], Float[Array, "R S n D"] | None]:
        """Returns a vector for each square of patches, and those of each layer in `deepstack`; see `PatchEncoder`."""
        # What layers keep has rows.
        x, aux = self.run_layers(images, dtype, remat=remat, pipelined=not self.mergers)
        later = [merger(kept) for merger, kept in zip(self.mergers, aux.get("kept", ()), strict=True)]
        return self.merger(x), jnp.stack(later, axis=2) if later else None

    def before_layers(self, x: Float[Array, "R P E"], at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns `x` with its positions added."""
        return x + self._positions(at).astype(x.dtype)

    def _positions(self, at: nn.vision.PatchPositions) -> Float[Array, "R P E"]:
        """Returns the learned positions of patches, between which those of images of other sizes lie (bilinear)."""
        # In float32, as the gradient of a row is a sum over patches.
        w, last = constrain(self.positions[...].astype(jnp.float32), "position", None), self.side - 1

        def ends(index, size):  # an image's first and last patch are at those of the table
            place = index.astype(jnp.float32) * last / jnp.maximum(size - 1, 1)
            low = jnp.floor(place)
            return low.astype(jnp.int32), (place - low)[:, :, None]

        (y, down), (x, right) = ends(at.row, at.height), ends(at.column, at.width)

        def table(y, x):
            return jnp.take(w, jnp.minimum(y, last) * self.side + jnp.minimum(x, last), axis=0)

        def row(y):
            return table(y, x) * (1 - right) + table(y, x + 1) * right

        return row(y) * (1 - down) + row(y + 1) * down


FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                fields.MLP,
                *PATCHES,
                Field("num_positions", "num_position_embeddings"),
                Field("deepstack", "deepstack_visual_indexes"),
            ],
        ),
        fields.axial_theta(10_000.0),
        *PLACEHOLDERS,
    ],
    fixed={"vision_config.in_channels": 3, "vision_config.hidden_act": "gelu_pytorch_tanh"},
)


def sections(default: tuple[int, ...], *, alternating: bool = True) -> Computed:
    """Makes the entry for the sections of M-RoPE: in `rope_parameters`, as transformers 5 has them, or in
    `rope_scaling`.

    Args:
        default: Value if a config omits them.
        alternating: As in `ops.MRope`.
    """

    def read(hf: HFConfig, c: Any) -> tuple[int, ...]:
        value = default
        for name in ("rope_scaling", "rope_parameters"):
            if hf.take(name, None, kind=dict):
                rope = hf.nested(name)
                rope.require("mrope_interleaved", alternating)
                rope.require("interleaved", alternating)  # its name in Qwen3-Omni
                value = tuple(rope.take("mrope_section", list(value), kind=list))
        return value

    def write(value: tuple[int, ...], cfg: Any) -> dict[str, Any]:
        written = {"rope_parameters.mrope_section": list(value)}
        return written | ({"rope_parameters.mrope_interleaved": True} if alternating else {})

    return Computed("sections", read, write)


def table(
    hf_prefix: str = "model.visual",
    *,
    mergers: str = "deepstack_merger_list",
    merger_parts: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2"),
) -> Table:
    """Maps the tensor names of the releases to parameters.

    Args:
        hf_prefix: Prefix of all of them.
        mergers: Name of the list of mergers for later layers.
        merger_parts: Names of the norm and the two projections of a merger.
    """
    layer = [
        *names.layer_norm("norm1", "attn_norm"),
        *names.layer_norm("norm2", "mlp_norm"),
        *names.qkv("attn.qkv", "attn"),
        *names.heads_out("attn.proj", "attn.o"),
        *names.linear("mlp.linear_fc1", "mlp.up"),
        *names.linear("mlp.linear_fc2", "mlp.down"),
    ]
    norm, up, down = merger_parts
    merger = [*names.layer_norm(norm, "norm"), *names.linear(up, "up"), *names.linear(down, "down")]
    return [
        *names.linear(f"{hf_prefix}.patch_embed.proj", "tower.patches"),
        Weight(f"{hf_prefix}.pos_embed.weight", "tower.positions"),
        *names.under(layer, f"{hf_prefix}.blocks.{{i}}", "tower.layers.{i}"),
        *names.under(merger, f"{hf_prefix}.merger", "tower.merger"),
        *names.under(merger, f"{hf_prefix}.{mergers}.{{i}}", "tower.mergers.{i}"),
    ]
