"""Optimizers of matrices.

Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982) and its variants with a second moment, with the
orthogonalization spread over devices; Dion (Ahn et al. 2025, arXiv:2504.05295), of low rank with error feedback; and
SOAP (Vyas et al. 2024, arXiv:2409.11321), Adam in the eigenbasis of Shampoo's preconditioner.

Shapes: M matrices, I inputs, O outputs, R rank.
"""

import math
import zlib
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from maxlib import sharding

Dimensions = tuple[tuple[int, ...], tuple[int, ...]]  # of inputs, and of outputs
Normalize = Literal["rows", "elements"]
COEFFICIENTS = (3.4445, -4.775, 2.0315)  # of the quintic whose slope at zero is large
STEPS = 5


class MuonState(NamedTuple):
    """State of `scale_by_muon`.

    Attributes:
        count: Number of updates.
        mu: Mean gradient.
        nu: Mean square of the orthogonalized update, of each output or each element; empty if it is not used.
    """

    count: Int[Array, ""]
    mu: dict[str, Array]
    nu: dict[str, Array]


def scale_by_muon(
    dimensions: Mapping[str, Dimensions],
    axes: Mapping[str, tuple[str | None, ...]],
    *,
    beta: float = 0.95,
    nesterov: bool = True,
    normalize: Normalize | None = None,
    beta2: float = 0.95,
    rms: float = 0.2,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Replaces updates by their orthogonalized mean, scaled to the size of Adam's updates.

    Under a layout that splits matrices, each device orthogonalizes some of the matrices: an all-to-all brings it their
    parts, and another one sends the results back. Without that, every device would gather and orthogonalize all.

    Args:
        dimensions: The input and output dimensions of each array by path; others number its matrices.
        axes: The names of each array's axes by path.
        beta: Decay of the mean gradient.
        nesterov: True looks one step ahead.
        normalize: "rows" divides the update by the root mean square of each output (NorMuon, arXiv:2510.05491),
            "elements" of each element (AdaMuon, arXiv:2507.11005); None does neither.
        beta2: Decay of the mean square.
        rms: Root mean square of an update of full rank.
        eps: Added to the root of the mean square.
    """

    def init(params):
        nu = {}
        if normalize == "elements":
            nu = {path: jnp.zeros_like(p) for path, p in params.items() if not is_masked(p)}
        elif normalize == "rows":
            nu = {
                path: jnp.zeros_like(jnp.mean(p, axis=matrix_dims(p, dimensions[path], axes[path])[0], keepdims=True))
                for path, p in params.items()
                if not is_masked(p)
            }
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), nu)

    def update(updates, state, params=None):
        count = state.count + 1
        mu = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, state.mu, updates)
        if nesterov:
            ahead, now = 1 - beta ** (count + 1), 1 - beta**count
            means = jax.tree.map(lambda m, g: beta * m / ahead + (1 - beta) * g / now, mu, updates)
        else:
            means = mu
        arrays = {path: x for path, x in means.items() if not is_masked(x)}
        dims = {path: matrix_dims(x, dimensions[path], axes[path]) for path, x in arrays.items()}
        orthogonal = orthogonalize(arrays, dims, axes)
        new, nu = {}, {}
        for path, x in orthogonal.items():
            inputs, outputs = dims[path]
            fan_in, fan_out = (math.prod(x.shape[d] for d in side) for side in dims[path])
            if normalize is None:
                new[path] = x * rms * math.sqrt(max(fan_in, fan_out))
                continue
            square = jnp.square(x) if normalize == "elements" else jnp.mean(jnp.square(x), axis=inputs, keepdims=True)
            nu[path] = beta2 * state.nu[path] + (1 - beta2) * square
            x = x / (jnp.sqrt(nu[path] / (1 - beta2**count)) + eps)
            norm = jnp.sqrt(jnp.sum(jnp.square(x), axis=(*inputs, *outputs), keepdims=True))
            new[path] = x * rms * math.sqrt(fan_in * fan_out) / (norm + eps)
        return updates | new, MuonState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def is_masked(x: Any) -> bool:
    """Returns True for a parameter that another optimizer of `optax.partition` updates."""
    return isinstance(x, optax.MaskedNode)


def matrix_dims(x: Array, dims: Dimensions, axes: tuple[str | None, ...]) -> Dimensions:
    """Returns the input and output dimensions of an array, also of a single layer of a stack, which offloading passes.

    Args:
        x: The array.
        dims: The dimensions with the stack's axis.
        axes: The names of the axes, with the stack's.
    """
    shift = len(axes) - x.ndim
    return tuple(d - shift for d in dims[0]), tuple(d - shift for d in dims[1])


def flat_matrices(x: Array, dims: Dimensions, axes: tuple[str | None, ...]) -> Float[Array, "M I O"]:
    """Returns the matrices of an array."""
    inputs, outputs = matrix_dims(x, dims, axes)
    moved = x.transpose(_matrices_last(x.ndim, inputs, outputs))
    count = x.ndim - len(inputs) - len(outputs)
    return moved.reshape(
        -1, math.prod(moved.shape[count : count + len(inputs)]), math.prod(moved.shape[count + len(inputs) :])
    )


def restored_matrices(
    matrices: Float[Array, "M I O"], like: Array, dims: Dimensions, axes: tuple[str | None, ...]
) -> Array:
    """Returns matrices as an array of the shape of `like`."""
    return _restored(matrices, like, matrix_dims(like, dims, axes))


def orthogonalize(
    arrays: dict[str, Array],
    dims: Mapping[str, Dimensions],
    axes: Mapping[str, tuple[str | None, ...]],
) -> dict[str, Array]:
    """Orthogonalizes the matrices of each array; under a layout, spread over its devices.

    Args:
        arrays: Arrays by path.
        dims: Their input and output dimensions.
        axes: The names of their axes; of a single layer of a stack the last ones.
    """
    layout = sharding.current()
    if layout is None or not arrays:
        return _orthogonalize_parts(arrays, dims, {path: P() for path in arrays}, {})
    specs = {}
    for path, x in arrays.items():
        names = axes[path][len(axes[path]) - x.ndim :]
        specs[path], _ = sharding.layers.drop_uneven(
            layout.optimizer_spec(names, x.shape, path=path), x.shape, layout.mesh
        )

    def parts(arrays: dict[str, Array]) -> dict[str, Array]:
        return _orthogonalize_parts(arrays, dims, specs, layout.mesh.shape)

    return jax.shard_map(parts, mesh=layout.mesh, in_specs=(specs,), out_specs=specs, check_vma=False)(arrays)


def _orthogonalize_parts(
    arrays: dict[str, Array],
    dims: Mapping[str, Dimensions],
    specs: Mapping[str, P],
    sizes: Mapping[str, int],
) -> dict[str, Array]:
    """Orthogonalizes the matrices of which this device has a part; matrices of one shape go together."""
    groups: dict[Any, list[str]] = {}
    stacks = {}
    for path, x in arrays.items():
        order = _matrices_last(x.ndim, *dims[path])
        spec = (*specs[path], *[None] * (x.ndim - len(specs[path])))
        count = len(order) - sum(map(len, dims[path]))
        # [batch..., inputs..., outputs...] -> [M, inputs..., outputs...]
        moved = x.transpose(order)
        stacks[path] = moved.reshape(-1, *moved.shape[count:])
        split = tuple((i + 1, spec[d]) for i, d in enumerate(order[count:]) if spec[d] is not None)
        groups.setdefault((stacks[path].shape[1:], split, len(dims[path][0]), x.dtype), []).append(path)
    done = {}
    for (_, split, num_inputs, _), paths in groups.items():
        together = jnp.concatenate([stacks[path] for path in paths])
        result = _exchanged(together, split, num_inputs, sizes)
        ends = np.cumsum([len(stacks[path]) for path in paths])
        done |= dict(zip(paths, jnp.split(result, ends[:-1]), strict=True))
    return {path: _restored(done[path], x, dims[path]) for path, x in arrays.items()}


def _matrices_last(ndim: int, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the order of dimensions in which those that number matrices come first."""
    return (*(d for d in range(ndim) if d not in inputs + outputs), *inputs, *outputs)


def _restored(x: Array, like: Array, dims: Dimensions) -> Array:
    """Returns an array with the shape and the order of dimensions of `like`."""
    order = _matrices_last(like.ndim, *dims)
    back = tuple(order.index(d) for d in range(like.ndim))
    return x.reshape([like.shape[d] for d in order]).transpose(back)


def _exchanged(x: Array, split: tuple[tuple[int, Any], ...], num_inputs: int, sizes: Mapping[str, int]) -> Array:
    """Brings each device its share of the matrices, whole, orthogonalizes them, and sends the parts back.

    Args:
        x: This device's part of each matrix, `M inputs... outputs...`.
        split: The dimensions that are split, with their mesh axes.
        num_inputs: Number of input dimensions.
        sizes: The sizes of mesh axes.
    """
    axes = [name for _, axis in split for name in ((axis,) if isinstance(axis, str) else axis)]
    count, devices = len(x), math.prod(sizes[name] for name in axes)
    x = jnp.pad(x, ((0, -count % devices), *[(0, 0)] * (x.ndim - 1)))
    for d, axis in split:
        x = jax.lax.all_to_all(x, axis, split_axis=0, concat_axis=d, tiled=True)
    matrices = x.reshape(len(x), math.prod(x.shape[1 : num_inputs + 1]), -1)
    x = newton_schulz(matrices).reshape(x.shape)
    for d, axis in reversed(split):
        x = jax.lax.all_to_all(x, axis, split_axis=d, concat_axis=0, tiled=True)
    return x[:count]


def newton_schulz(x: Float[Array, "M I O"], eps: float = 1e-8) -> Float[Array, "M I O"]:
    """Maps the singular values of each matrix to about 1, by five steps `a X + (b A + c A²) X` with `A = X Xᵀ`."""
    a, b, c = COEFFICIENTS
    is_tall = x.shape[1] > x.shape[2]
    x = jnp.swapaxes(x, 1, 2) if is_tall else x
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + eps)
    for _ in range(STEPS):
        gram = x @ jnp.swapaxes(x, 1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return jnp.swapaxes(x, 1, 2) if is_tall else x


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
