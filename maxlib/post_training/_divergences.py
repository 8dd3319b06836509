"""Distillation from stored targets: the teacher's k likeliest tokens, and one bucket for all others."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxlib.ops import divergence


def top_k_divergence(
    student: Float[Array, "*B K"], teacher: Float[Array, "*B K"], *, beta: float = 0.0, tail: bool = True
) -> Float[Array, "*B"]:
    """Computes `ops.divergence` over the teacher's K likeliest tokens.

    Args:
        student: The student's log-probabilities of these tokens, over the whole vocabulary.
        teacher: The teacher's.
        beta: 0 for KL(teacher ‖ student), 1 for KL(student ‖ teacher), between as in `ops.divergence`.
        tail: True adds a bucket of all other tokens, log(1 - Σ p), on both sides. False divides by Σ p instead, which
            forgets how much probability the K tokens had, and is 0 for K = 1.
    """
    return divergence(_closed(student, tail), _closed(teacher, tail), beta=beta)


def _closed(log_probs: Float[Array, "*B K"], tail: bool) -> Float[Array, "*B _"]:
    """Completes log-probabilities of some tokens to a distribution."""
    total = jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True)
    if not tail:
        return log_probs - jnp.log(total)
    # Rounding may sum them to 1 or more.
    rest = jnp.log1p(-jnp.minimum(total, 1 - 1e-7))
    return jnp.concatenate([log_probs, rest], axis=-1)  # [*B, K] -> [*B, K + 1]
