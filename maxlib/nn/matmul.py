"""Matmul strategies: how a layer multiplies its weight. They are attributes of layers, so that they can be replaced."""

import dataclasses
import functools
import math
from typing import Any, Literal, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxlib import ops, sharding


@runtime_checkable
class Matmul(Protocol):
    """Products of activations and a stored weight, whose matrix is `w[...]`: a Param, an array or a `QuantizedWeight`.

    An implementation must be hashable and compare by value, because it is part of the layer's structure.
    """

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]: ...

    def grouped(
        self, rows: Float[Array, "M I"], w: Any, rows_per_expert: Int[Array, " E"], layout: ops.Layout = "EOI"
    ) -> Float[Array, "M O"]:
        """Multiplies rows, sorted by expert, by the matrices of their experts (`ops.grouped_matmul`)."""
        ...


@dataclasses.dataclass(frozen=True)
class Exact:
    """Multiplies in the dtype of the activations, to which weights are cast.

    Args:
        implementation: Name of an implementation of `ops.grouped_matmul`; None chooses the best one.
    """

    implementation: Literal["ragged_dot", "tiled", "mosaic_gpu", "reference"] | None = None

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        """Computes `einsum(spec, x, w)` in the dtype of `x`."""
        w = jnp.asarray(w[...], x.dtype)
        alone = sharding.current() is None  # on a mesh, merged dimensions may be gathered for every use
        return _as_matrix(spec, x, w) if alone and _is_matrix(spec) else jnp.einsum(spec, x, w)

    def grouped(
        self, rows: Float[Array, "M I"], w: Any, rows_per_expert: Int[Array, " E"], layout: ops.Layout = "EOI"
    ) -> Float[Array, "M O"]:
        """Multiplies rows by the matrices of their experts in the dtype of `rows`."""
        return ops.grouped_matmul(rows, w, rows_per_expert, layout=layout, implementation=self.implementation)


@functools.cache
def _is_matrix(spec: str) -> bool:
    """Returns True if `spec` is a matrix product once neighbouring dimensions are merged.

    Examples are "...D,NHD->...NH" and "...NH,DNH->...D".
    """
    x, w, out = spec.replace("->", ",").split(",")
    return len(w) > 2 and x[:3] == out[:3] == "..." and w == out[3:] + x[3:]


def _as_matrix(spec: str, x: Array, w: Array) -> Array:
    """Computes the einsum with the weight as a matrix `O I`; with more dimensions, XLA:CPU transposes it at every
    call.
    """
    summed = len(spec.partition(",")[0]) - len("...")
    lead, kept = x.shape[: x.ndim - summed], w.shape[: w.ndim - summed]
    fan_in = math.prod(w.shape[w.ndim - summed :])
    # [..., N, H] -> [..., I] and [D, N, H] -> [D, I], for example; then [..., O] back to the dimensions that are kept.
    y = jnp.einsum("...I,OI->...O", x.reshape(*lead, fan_in), w.reshape(-1, fan_in))
    return y.reshape(*lead, *kept)
