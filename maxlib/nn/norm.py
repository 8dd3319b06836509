"""Norms over the last axis, computed in float32."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxlib._xla_workarounds import for_each_token, inner, scaled
from maxlib.nn._linear import check_ends


class RMSNorm(nnx.Module):
    """Root-mean-square norm: `x / sqrt(mean(x^2) + eps) * scale` (Zhang & Sennrich 2019, arXiv:1910.07467).

    Args:
        dim: Size of the last axis.
        eps: Added to the mean square.
        plus_one: True multiplies by `1 + scale`, as Gemma stores its weights.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, plus_one: bool = False):
        # The initial scale is 1: 1 + 0 or 1.
        self.scale = nnx.Param(jnp.zeros(dim) if plus_one else jnp.ones(dim), axes=("norm",))
        self.eps, self.plus_one = eps, plus_one

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalizes the last axis, in the dtype of `x`."""
        check_ends(x, "D", self.scale.shape, "the norm")
        return _scaled_to_unit(x, self.scale[...], self.eps, self.plus_one)


class HeadsRMSNorm(RMSNorm):
    """RMS norm over all heads together; `dim` is their total width (OLMo 2, MiniMax-M2)."""

    def __call__(self, x: Float[Array, "... N H"]) -> Float[Array, "... N H"]:
        """Normalizes the last two axes together, in the dtype of `x`."""
        return super().__call__(x.reshape(*x.shape[:-2], -1)).reshape(x.shape)  # [..., N, H] -> [..., N * H] and back


class GroupRMSNorm(RMSNorm):
    """RMS norm over each of several groups of neighbouring channels, with one scale per channel (Mamba-2).

    Args:
        dim: Size of the last axis, the sum of all groups.
        groups: Number of groups, which divides `dim`.
        eps: Added to the mean square.
        plus_one: True multiplies by `1 + scale`, as in `RMSNorm`.

    Raises:
        ValueError: when `groups` does not divide `dim`.
    """

    def __init__(self, dim: int, *, groups: int, eps: float = 1e-6, plus_one: bool = False):
        if groups < 1 or dim % groups:
            raise ValueError(f"groups must divide dim; got groups={groups} and dim={dim}")
        super().__init__(dim, eps=eps, plus_one=plus_one)
        self.groups = groups

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalizes each group of the last axis, in the dtype of `x`."""
        check_ends(x, "D", self.scale.shape, "the norm")
        # [..., D] -> [..., groups, D / groups] and back
        x32 = _to_unit(x.reshape(*x.shape[:-1], self.groups, -1), self.eps).reshape(x.shape)
        scale = jnp.asarray(self.scale[...], x32.dtype) + (1.0 if self.plus_one else 0.0)
        # [D] -> [..., D]
        return (x32 * for_each_token(scale, x.shape)).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class UnitRMSNorm:
    """Root-mean-square norm without a weight (Llama 4's norm of queries and keys).

    Args:
        eps: Added to the mean square.
    """

    eps: float = 1e-6

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalizes the last axis, in the dtype of `x`."""
        return _to_unit(x, self.eps).astype(x.dtype)


# Cheap to compute again; kept for the backward pass, it would take several times the memory of `x`.
@functools.partial(jax.checkpoint, static_argnums=(2, 3), prevent_cse=False)
def _scaled_to_unit(x: Array, scale: Array, eps: float, plus_one: bool) -> Array:
    # float32, because a mean of squares in bfloat16 would have only 8 significant bits.
    x32 = _to_unit(x, eps)
    scale = scale.astype(x32.dtype) + (1.0 if plus_one else 0.0)
    # [D] -> [..., D]
    return (x32 * for_each_token(scale, x.shape)).astype(x.dtype)


def _to_unit(x, eps: float):
    """Returns `x / sqrt(mean(x^2) + eps)` in float32 or wider."""
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return scaled(x32, jax.lax.rsqrt(inner(x32, x32) / x.shape[-1] + eps))


class LayerNorm(nnx.Module):
    """Layer norm: `(x - mean(x)) / sqrt(var(x) + eps) * scale + bias` (Ba et al. 2016, arXiv:1607.06450).

    Args:
        dim: Size of the last axis.
        eps: Added to the variance.
        bias: False leaves out the bias.
        plus_one: True multiplies by `1 + scale`, as Nemotron stores its weights.
    """

    def __init__(self, dim: int, *, eps: float = 1e-5, bias: bool = True, plus_one: bool = False):
        self.scale = nnx.Param(jnp.zeros(dim) if plus_one else jnp.ones(dim), axes=("norm",))
        self.bias = nnx.Param(jnp.zeros(dim), axes=("norm",)) if bias else None
        self.eps, self.plus_one = eps, plus_one

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalizes the last axis, in the dtype of `x`."""
        check_ends(x, "D", self.scale.shape, "the norm")
        x32 = _standardized(x, self.eps)
        # [D] -> [..., D]: explicit, because `jax_numpy_rank_promotion="raise"` forbids implicit rank promotion.
        scale = jnp.asarray(self.scale[...], x32.dtype) + (1.0 if self.plus_one else 0.0)
        x32 = x32 * for_each_token(scale, x.shape)
        if self.bias is not None:
            x32 = x32 + for_each_token(jnp.asarray(self.bias[...], x32.dtype), x.shape)
        return x32.astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class UnitLayerNorm:
    """Layer norm without a weight or a bias (OLMo 1).

    Args:
        eps: Added to the variance.
    """

    eps: float = 1e-5

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Normalizes the last axis, in the dtype of `x`."""
        return _standardized(x, self.eps).astype(x.dtype)


class HeadsLayerNorm(nnx.Module):
    """Layer norm of each head, with a scale for every head and dimension, and no bias (Command R+, StableLM 2 12B).

    Args:
        num_heads: Number of heads.
        head_dim: Width of a head.
        axis: Name of the axis of heads, "heads" or "kv_heads".
        eps: Added to the variance.
    """

    def __init__(self, num_heads: int, head_dim: int, *, axis: str = "heads", eps: float = 1e-5):
        self.scale = nnx.Param(jnp.ones((num_heads, head_dim)), axes=(axis, "head_dim"))
        self.eps = eps

    def __call__(self, x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
        """Normalizes the last axis, in the dtype of `x`."""
        check_ends(x, "NH", self.scale.shape, "the norm")
        x32 = _standardized(x, self.eps)
        # [N, H] -> [1, 1, N, H]
        return (x32 * jnp.asarray(self.scale[...], x32.dtype)[None, None]).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Clip:
    """Limits values to `[-limit, limit]`; as `q_norm`, `k_norm` and `v_norm` it is OLMo's `clip_qkv`.

    Args:
        limit: The largest absolute value.
    """

    limit: float

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Clips `x`."""
        return jnp.clip(x, -self.limit, self.limit)


def _standardized(x, eps: float):
    """Returns `(x - mean(x)) / sqrt(var(x) + eps)` in float32 or wider."""
    x32 = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    return scaled(x32, jax.lax.rsqrt(inner(x32, x32) / x.shape[-1] + eps))
