"""Activations of gated linear units, which combine a gate and an up projection."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array


def swiglu(gate: Array, up: Array) -> Array:
    """Returns `silu(gate) * up` (SwiGLU, https://arxiv.org/abs/2002.05202)."""
    return jax.nn.silu(gate) * up


def geglu(gate: Array, up: Array) -> Array:
    """Returns `gelu(gate) * up`, the gelu approximated by tanh (GeGLU, https://arxiv.org/abs/2002.05202)."""
    return jax.nn.gelu(gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """SwiGLU with clipped inputs (GPT-OSS): `g * sigmoid(alpha * g) * (u + 1)`.

    Args:
      alpha: slope of the sigmoid.
      limit: `g` is `min(gate, limit)`, and `u` is `up` clipped to `[-limit, limit]`.
    """

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)
