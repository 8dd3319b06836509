"""How gated layers join their two projections."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array

NAMES = "expert_gate", "expert_up"
"""What the two projections of experts are called in policies of `jax.checkpoint`."""


def swiglu(gate: Array, up: Array) -> Array:
    """`silu(gate) * up`."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True)
class ClampedSwiGLU:
    """`g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u` clipped to `[-limit, limit]` (GPT-OSS)."""

    alpha: float = 1.702
    limit: float = 7.0

    def __call__(self, gate: Array, up: Array) -> Array:
        gate = jnp.minimum(gate, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (jnp.clip(up, -self.limit, self.limit) + 1)
