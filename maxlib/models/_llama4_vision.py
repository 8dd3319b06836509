"""Llama 4's image encoder, whose patches are laid side by side and projected to the text's width (Meta AI 2025)."""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib import nn, ops
from maxlib.nn.remat import Policy
from maxlib.nn.vision import exact_gelu
from maxlib.sharding import constrain
from maxlib.weights import Computed, Field, Fields, HFConfig, Table, Weight, fields, names

SHUFFLE = 2  # side of the squares of patches that become one vector


@dataclass(frozen=True, kw_only=True)
class Vision:
    """Sizes of the encoder, and what stands for a tile of an image in the text: `num_tokens` times `image_token`."""

    dim: int = 1408
    num_layers: int = 34
    num_heads: int = 16
    image_size: int = 336
    patch_size: int = 14
    projector_dim: int = 4096
    rope_theta: float = 10_000.0
    image_token: int = 200_092
    begin_token: int = 200_080
    end_token: int = 200_081

    def __post_init__(self):
        nn.vision.check_sizes(self.dim, self.num_heads, self.image_size, self.patch_size)
        if self.image_size % (SHUFFLE * self.patch_size):
            raise ValueError(f"image_size must be a multiple of {SHUFFLE * self.patch_size}, got {self.image_size}")

    @property
    def num_tokens(self) -> int:
        """Number of vectors that a tile becomes."""
        return (self.image_size // self.patch_size // SHUFFLE) ** 2

    @property
    def mlp_dim(self) -> int:
        """Width of the encoder's MLPs, and of a square of patches: Hugging Face has one field for both."""
        return self.dim * SHUFFLE**2


class Llama4Vision(nnx.Module):
    """Image encoder of Llama 4: positions both learned and rotary on the grid of patches, a class token behind them.

    Args:
        cfg: Sizes.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, *, rngs: nnx.Rngs):
        dim, patch_size = cfg.dim, cfg.patch_size
        self.image_size, self.patch_size = cfg.image_size, patch_size
        self.patches = nn.vision.patch_embedding(dim, patch_size, bias=False, rngs=rngs)
        side, init = cfg.image_size // patch_size, nnx.initializers.normal(dim**-0.5)
        self.class_token = nnx.Param(init(rngs.params(), (dim,), jnp.float32), axes=("embed",))
        self.positions = nnx.Param(init(rngs.params(), (side**2 + 1, dim), jnp.float32), axes=("position", "embed"))
        self.pre_norm = nn.LayerNorm(dim)
        self.rope = ops.GridRope(dim // cfg.num_heads, side, cfg.rope_theta)
        self.layers = nn.Stack(
            lambda _, rngs: nn.vision.EncoderBlock(
                dim, cfg.mlp_dim, num_heads=cfg.num_heads, rope=self.rope, act=exact_gelu, eps=1e-5, rngs=rngs
            ),
            cfg.num_layers,
            rngs=rngs,
        )
        self.norm = nn.LayerNorm(dim)

    def __call__(
        self, images: Float[Array, "I C H W"], *, dtype: Any = jnp.bfloat16, remat: Policy = None
    ) -> Float[Array, "I P D"]:
        """Returns one vector per patch, row by row.

        Args:
            images: RGB tiles, from -1 to 1.
            dtype: The dtype of the computation.
            remat: Policy of recomputation, see `nn.remat`.
        """
        grid = nn.vision.in_patches(images.astype(dtype), self.image_size, self.patch_size)
        I, D = len(images), self.positions.shape[-1]
        last = jnp.broadcast_to(jnp.asarray(self.class_token[...], dtype), (I, 1, D))
        x = jnp.concatenate([self.patches(grid).reshape(I, -1, D), last], axis=1)  # [I, P, D] -> [I, P + 1, D]
        x = self.pre_norm(x + jnp.asarray(self.positions[...], dtype)[None])
        ctx = nn.make_context(*x.shape[:2], masks=(ops.Full(),), ropes=(self.rope,))
        x, _, _ = self.layers(constrain(x, "batch", "seq", "act_embed"), ctx, remat=remat)
        return self.norm(x[:, :-1])  # without the class token


class ShuffleProjector(nnx.Module):
    """Projector from patches to fewer vectors of the text's width: squares side by side, an MLP, a matmul.

    Args:
        cfg: Sizes.
        text_dim: Width of the text model.
        rngs: Source of initial values.
    """

    def __init__(self, cfg: Vision, text_dim: int, *, rngs: nnx.Rngs):
        F = cfg.projector_dim
        self.up = nn.Einsum("...E,FE->...F", (F, cfg.mlp_dim), ("mlp", "vision"), rngs=rngs)
        self.down = nn.Einsum("...F,EF->...E", (F, F), ("vision", "mlp"), rngs=rngs)
        self.proj = nn.Einsum("...E,DE->...D", (text_dim, F), ("embed", "vision"), rngs=rngs)

    def __call__(self, x: Float[Array, "I P E"]) -> Float[Array, "I S D"]:
        I, P, E = x.shape
        side = math.isqrt(P) // SHUFFLE
        # The shuffle^2 patches of a square become one vector of width shuffle^2 * E: pixel shuffle, backwards.
        squares = x.reshape(I, side, SHUFFLE, side, SHUFFLE, E).transpose(0, 1, 3, 2, 4, 5)
        x = squares.reshape(I, side * side, -1)
        return self.proj(exact_gelu(self.down(exact_gelu(self.up(x)))))


def _read_theta(hf: HFConfig, c: Any) -> float:
    rope = fields.read_rope(hf.nested("vision_config"), head_dim=c.dim // c.num_heads)
    if rope.scaling is not None:
        raise ValueError(f"config.json: the rope of vision_config must have no scaling, got {rope.scaling}")
    return rope.theta


def _write_theta(theta: float, cfg: Any) -> dict[str, Any]:
    return {
        "vision_config.rope_theta": theta,
        "vision_config.rope_parameters": {"rope_type": "default", "rope_theta": theta},
    }


FIELDS = Fields(
    Vision,
    [
        *fields.under(
            "vision_config",
            [
                Field("dim", "hidden_size"),
                Field("num_layers", "num_hidden_layers"),
                Field("num_heads", "num_attention_heads"),
                Field("image_size"),
                Field("patch_size"),
                Field("projector_dim", "projector_output_dim"),
            ],
        ),
        Computed("rope_theta", _read_theta, _write_theta),
        Field("image_token", "image_token_index"),
        Field("begin_token", "boi_token_index"),
        Field("end_token", "eoi_token_index"),
    ],
    fixed={
        "vision_config.model_type": "llama4_vision_model",
        "vision_config.num_channels": 3,
        "vision_config.hidden_act": "gelu",
        "vision_config.pixel_shuffle_ratio": 1 / SHUFFLE,
        "vision_config.projector_input_dim": lambda c: c.projector_dim,
        "vision_config.vision_output_dim": lambda c: c.projector_dim,
        "vision_config.intermediate_size": lambda c: c.dim * SHUFFLE**2,
    },
    ignored=[
        # The releases have these, and nothing reads them: the norms' epsilon is 1e-5, and no projector has a bias.
        "vision_config.norm_eps",
        "vision_config.multi_modal_projector_bias",
        "vision_config.vision_feature_layer",
        "vision_config.vision_feature_select_strategy",
    ],
    absent={"dim": 768, "image_size": 448},
)


def table() -> Table:
    """Maps the tensor names of the releases to parameters."""
    layer = [
        *names.layer_norm("input_layernorm", "attn_norm"),
        *names.ATTENTION,
        *names.layer_norm("post_attention_layernorm", "mlp_norm"),
        *names.linear("mlp.fc1", "mlp.up"),
        *names.linear("mlp.fc2", "mlp.down"),
    ]
    return [
        Weight("vision_model.patch_embedding.linear.weight", "tower.patches.w", "D (C a b) -> D C a b"),
        Weight("vision_model.class_embedding", "tower.class_token"),
        Weight("vision_model.positional_embedding_vlm", "tower.positions"),
        *names.layer_norm("vision_model.layernorm_pre", "tower.pre_norm"),
        *names.under(layer, "vision_model.model.layers.{i}", "tower.layers.{i}"),
        *names.layer_norm("vision_model.layernorm_post", "tower.norm"),
        Weight("vision_model.vision_adapter.mlp.fc1.weight", "projector.up.w"),
        Weight("vision_model.vision_adapter.mlp.fc2.weight", "projector.down.w"),
        Weight("multi_modal_projector.linear_1.weight", "projector.proj.w"),
    ]
