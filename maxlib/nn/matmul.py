"""How a layer multiplies its weight: a part of the layer, so that another one may take its place."""

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

    One must be hashable and compare by value: it is part of the layer's structure.
    """

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]: ...

    def grouped(
        self, rows: Float[Array, "M I"], w: Any, rows_per_expert: Int[Array, " E"], layout: ops.Layout = "EOI"
    ) -> Float[Array, "M O"]:
        """See `ops.grouped_matmul`."""
        ...


@dataclasses.dataclass(frozen=True)
class Exact:
    """In the dtype of the activations: weights follow them. implementation: of `ops.grouped_matmul`, None for the best
    one.
    """

    implementation: Literal["ragged_dot", "tiled", "mosaic_gpu", "reference"] | None = None

    def einsum(self, spec: str, x: Float[Array, "..."], w: Any) -> Float[Array, "..."]:
        w = jnp.asarray(w[...], x.dtype)
        alone = sharding.current() is None  # on a mesh, merged dimensions may be gathered anew for every use
        return _as_matrix(spec, x, w) if alone and _is_matrix(spec) else jnp.einsum(spec, x, w)

    def grouped(
        self, rows: Float[Array, "M I"], w: Any, rows_per_expert: Int[Array, " E"], layout: ops.Layout = "EOI"
    ) -> Float[Array, "M O"]:
        return ops.grouped_matmul(rows, w, rows_per_expert, layout=layout, implementation=self.implementation)


@functools.cache
def _is_matrix(spec: str) -> bool:
    """Whether `spec` is a matrix product once neighbouring dimensions are one: "...D,NHD->...NH" or
    "...NH,DNH->...D".
    """
    x, w, out = spec.replace("->", ",").split(",")
    return len(w) > 2 and x[:3] == out[:3] == "..." and w == out[3:] + x[3:]


def _as_matrix(spec: str, x: Array, w: Array) -> Array:
    """The same einsum with a weight of two dimensions; of more, XLA on CPUs makes a transposed copy at every call."""
    summed = len(spec.partition(",")[0]) - len("...")
    lead, kept = x.shape[: x.ndim - summed], w.shape[: w.ndim - summed]
    fan_in = math.prod(w.shape[w.ndim - summed :])
    y = jnp.einsum("...I,OI->...O", x.reshape(*lead, fan_in), w.reshape(-1, fan_in))
    return y.reshape(*lead, *kept)
