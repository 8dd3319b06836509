"""Dion (Ahn et al. 2025, arXiv:2504.05295): orthogonal updates of low rank with error feedback.

Shapes: M matrices, I inputs, O outputs, R rank.
"""

import zlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from maxlib.training._muon import Dimensions, flat_matrices, is_masked, restored_matrices


class DionState(NamedTuple):
    """State of `scale_by_dion`.

    Attributes:
        mu: Momentum, without what updates have used of it.
        basis: The right factor of each matrix's last approximation, `M I R`, with columns of norm 1.
    """

    mu: dict[str, Array]
    basis: dict[str, Array]


def scale_by_dion(
    dimensions: Mapping[str, Dimensions],
    axes: Mapping[str, tuple[str | None, ...]],
    *,
    rank: int,
    beta: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Replaces updates by an orthogonal approximation of the momentum, of rank R.

    A step of power iteration gives `B ≈ P Rᵀ`; the momentum loses the share `1 - beta` of it, so what the approximation
    misses stays. The update is `P Qᵀ √(O / I)`, Q the columns of R with norm 1.

    Args:
        dimensions: The input and output dimensions of each array by path; others number its matrices.
        axes: The names of each array's axes by path.
        rank: R; no more than the smaller side of a matrix.
        beta: Decay of the momentum.
        eps: Added to norms of columns.
    """

    def init(params):
        mu, basis = {}, {}
        for path, p in params.items():
            if not is_masked(p):
                count, inputs, outputs = flat_matrices(p, dimensions[path], axes[path]).shape
                key = jax.random.key(zlib.crc32(path.encode()))
                mu[path] = jnp.zeros_like(p)
                basis[path] = jax.random.normal(key, (count, inputs, min(rank, inputs, outputs)), p.dtype)
        return DionState(mu, basis)

    def update(updates, state, params=None):
        new, mu, basis = {}, {}, {}
        for path, g in updates.items():
            if is_masked(g):
                continue
            # [M, I, O] -> [M, O, I]
            momentum = jnp.swapaxes(flat_matrices(state.mu[path] + g, dimensions[path], axes[path]), 1, 2)
            left = jnp.linalg.qr(momentum @ state.basis[path])[0]  # [M, O, R]
            right = jnp.swapaxes(momentum, 1, 2) @ left  # [M, I, R]
            momentum -= (1 - beta) * left @ jnp.swapaxes(right, 1, 2)
            basis[path] = right / (jnp.linalg.norm(right, axis=1, keepdims=True) + eps)
            step = basis[path] @ jnp.swapaxes(left, 1, 2)  # [M, I, O]
            step *= (step.shape[2] / step.shape[1]) ** 0.5
            mu[path] = restored_matrices(jnp.swapaxes(momentum, 1, 2), g, dimensions[path], axes[path])
            new[path] = restored_matrices(step, g, dimensions[path], axes[path])
        return updates | new, DionState(mu, basis)

    return optax.GradientTransformation(init, update)
