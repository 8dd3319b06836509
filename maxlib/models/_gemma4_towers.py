"""Gemma 4's image encoders: patches that attend to their image and are pooled, or a few norms in place of an encoder.

Shapes: R rows of patches, P patches of a row, S = P / merge^2 vectors, E width of the encoder, D width of the text
model, H width of a head; a patch has a rows and b columns of pixels, each of C colors.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from maxlib import nn
from maxlib.models._gemma4_vision import UnifiedVision, Vision
from maxlib.models._layers import PreNorm
from maxlib.models._vision import IMAGE, PatchEncoder
from maxlib.nn.remat import Policy
from maxlib.sharding import constrain


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
