"""SOAP (Vyas et al. 2024, arXiv:2409.11321): Adam in the eigenbasis of Shampoo's preconditioner.

Shapes: M matrices, I inputs, O outputs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from maxlib.training._muon import Dimensions, flat_matrices, is_masked, restored_matrices


class SoapState(NamedTuple):
    """State of `scale_by_soap`; dictionaries are by path.

    Attributes:
        count: Number of updates, with the first one, which only begins the preconditioner.
        mu: Mean gradient.
        nu: Mean square of the gradient in the eigenbasis.
        left: Mean of G Gᵀ and its eigenbasis, `M I I` each.
        right: Mean of Gᵀ G and its eigenbasis, `M O O` each.
    """

    count: Int[Array, ""]
    mu: dict[str, Array]
    nu: dict[str, Array]
    left: dict[str, tuple[Array, Array]]
    right: dict[str, tuple[Array, Array]]


def scale_by_soap(
    dimensions: Mapping[str, Dimensions],
    axes: Mapping[str, tuple[str | None, ...]],
    *,
    b1: float = 0.95,
    b2: float = 0.95,
    eps: float = 1e-8,
    precondition_every: int = 10,
    max_size: int = 8192,
) -> optax.GradientTransformation:
    """Replaces updates by those of Adam in the eigenbases of the mean G Gᵀ and Gᵀ G of each matrix.

    The first update is zero. The bases are refined by a step of power iteration and a QR decomposition.

    Args:
        dimensions: The input and output dimensions of each array by path; others number its matrices.
        axes: The names of each array's axes by path.
        b1: Decay of the mean gradient.
        b2: Decay of the mean square, and of the preconditioner.
        eps: Added to the root of the mean square.
        precondition_every: Steps between new bases.
        max_size: A side of a matrix longer than this keeps its own basis.
    """

    def flat(path: str, x: Array) -> Float[Array, "M I O"]:
        return flat_matrices(x, dimensions[path], axes[path])

    def init(params):
        zeros = {path: jnp.zeros_like(p) for path, p in params.items() if not is_masked(p)}
        left, right = {}, {}
        for path, x in zeros.items():
            count, *sizes = flat(path, x).shape
            for side, size in zip((left, right), sizes, strict=True):
                if size <= max_size:
                    side[path] = tuple(jnp.zeros((2, count, size, size), x.dtype))
        return SoapState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros), left, right)

    def update(updates, state, params=None):
        new, mu, nu, left, right = {}, {}, {}, {}, {}
        is_first = state.count == 0
        steps = jnp.maximum(state.count, 1)
        for path, g in updates.items():
            if is_masked(g):
                continue
            bases = {name: side[path][1] for name, side in (("l", state.left), ("r", state.right)) if path in side}
            grads = flat(path, g)
            rotated = _rotate(grads, bases)
            mean = jnp.where(is_first, 0.0, b1 * state.mu[path] + (1 - b1) * g)
            square = b2 * flat(path, state.nu[path]) + (1 - b2) * jnp.square(rotated)
            square = jnp.where(is_first, 0.0, square)
            step = _rotate(_rotate(flat(path, mean), bases) / (jnp.sqrt(square) + eps), bases, back=True)
            scale = jnp.sqrt(1 - b2**steps) / (1 - b1**steps)
            new[path] = restored_matrices(jnp.where(is_first, 0.0, step * scale), g, dimensions[path], axes[path])
            moments = {
                "l": jnp.einsum("MIO,MJO->MIJ", grads, grads),
                "r": jnp.einsum("MIO,MIP->MOP", grads, grads),
            }
            for name, old, side in (("l", state.left, left), ("r", state.right, right)):
                if path in old:
                    gram = b2 * old[path][0] + (1 - b2) * moments[name]
                    basis, square = _refined(gram, old[path][1], square, name, state.count, precondition_every)
                    side[path] = (gram, basis)
            mu[path], nu[path] = mean, restored_matrices(square, g, dimensions[path], axes[path])
        return updates | new, SoapState(state.count + 1, mu, nu, left, right)

    return optax.GradientTransformation(init, update)


def _rotate(x: Float[Array, "M I O"], bases: Mapping[str, Array], *, back: bool = False) -> Float[Array, "M I O"]:
    """Returns `Lᵀ X R`, or with `back` its inverse `L X Rᵀ`; a side without a basis is not rotated."""
    if "l" in bases:
        x = jnp.einsum("MIJ,MJO->MIO" if back else "MJI,MJO->MIO", bases["l"], x)
    if "r" in bases:
        x = jnp.einsum("MIP,MOP->MIO" if back else "MIP,MPO->MIO", x, bases["r"])
    return x


def _refined(gram: Array, basis: Array, square: Array, side: str, count: Any, every: int) -> tuple[Array, Array]:
    """Returns the new eigenbasis of `gram`, and the mean square with its rows (or columns) in the basis's order."""

    def begin(_):
        return jnp.flip(jnp.linalg.eigh(gram)[1], axis=-1), square

    def refine(_):
        product = gram @ basis
        order = jnp.argsort(-jnp.sum(basis * product, axis=1), axis=-1)  # [M, I], by estimated eigenvalues
        product = jnp.take_along_axis(product, order[:, None], axis=2)
        rows = order[:, :, None] if side == "l" else order[:, None]
        return jnp.linalg.qr(product)[0], jnp.take_along_axis(square, rows, axis=1 if side == "l" else 2)

    def keep(_):
        return basis, square

    branch = jnp.where(count == 0, 0, jnp.where(count % every == 0, 1, 2))
    return jax.lax.switch(branch, [begin, refine, keep], None)
